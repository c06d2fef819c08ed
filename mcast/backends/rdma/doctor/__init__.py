"""Checks of this host: what keeps the real provider from working."""
