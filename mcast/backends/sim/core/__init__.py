"""State machines of a simulated fabric between its hosts: switches, the SA, routes, delivery."""
