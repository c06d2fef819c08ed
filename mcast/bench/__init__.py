"""How fast a group is."""
