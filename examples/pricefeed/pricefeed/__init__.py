"""Prices from one publisher to any number of subscribers, by multicast that may lose anything."""
