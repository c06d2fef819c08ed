"""One simulated fabric for many processes: the server that owns it, and the provider that attaches to it

A client's calls are requests over a Unix socket; so come the descriptors that tell of events and messages.
"""
