"""Network state of the host's kernel."""
