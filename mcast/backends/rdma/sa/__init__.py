"""Asking the real subnet administrator."""
