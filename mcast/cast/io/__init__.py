"""Sessions, sources and sinks: the I/O around `mcast.cast.protocol`, blocking and awaiting."""
