"""Runs that are written down as a file."""
