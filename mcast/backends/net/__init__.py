"""Interfaces, bridges, IGMP and groups of the host, and descriptors that say whether something is there."""
