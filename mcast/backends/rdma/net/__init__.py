"""What the host's kernel knows of its network."""
