"""What goes wrong: the tree of errors, the table of their causes, and what is found out about a host."""
