"""One simulated fabric for many processes: its server, and the provider that attaches to it.

Each call of a client is a request over a Unix stream socket. A client has one for its requests, and one for
each event channel and queue pair, which is readable while something waits there.
"""
