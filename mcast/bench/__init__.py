"""How fast a group is, and who answers in it."""
