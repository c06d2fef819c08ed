"""Values and bytes that hosts, switches and the subnet administrator exchange."""
