"""Measurements of a group: rate, loss, latency, and the members that answer."""
