"""How fast a group is, and which members answer in it."""
