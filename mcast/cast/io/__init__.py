"""Sources, sinks and sessions: the drivers of `mcast.cast.protocol`, blocking and awaiting."""
