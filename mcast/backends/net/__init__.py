"""What the providers on real networks ask of the host: its interfaces, bridges, IGMP and groups."""
