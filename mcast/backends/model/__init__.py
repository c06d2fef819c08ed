"""What a host and its RDMA devices do, as state machines that all providers without real devices share.

cm           the connection manager: ids, memberships, event channels
qp           a queue pair: states, receive queue, drops
queue_pairs  the queue pairs of a provider, and the attach tables of its devices
port         a device with its port, GIDs and interfaces
sa_client    the kernel's SA client of a port
log          the events that these parts write into a trace
times        the clock that is passed in

What carries messages, answers SA requests and finds routes is passed in: `Network` of `cm` says what is
needed. So these files import no provider; a fabric of switches is in `mcast.backends.sim.core`.
"""
