"""What hosts, switches and the subnet administrator agree on, as values and as bytes."""
