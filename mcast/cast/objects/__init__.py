"""Objects to and from a group of an endpoint, by blocking or awaiting: the drivers of `mcast.cast.nack`."""
