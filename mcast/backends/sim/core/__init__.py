"""What joins the hosts of a simulated fabric, as state machines: switches, the SA, routes, messages."""
