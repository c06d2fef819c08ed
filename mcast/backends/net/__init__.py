"""Interfaces, bridges, IGMP and groups of the host, for the providers on real networks."""
