"""What is wrong with this host."""
