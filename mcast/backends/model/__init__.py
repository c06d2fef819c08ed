"""State machines of a host and its RDMA devices, shared by all providers without real devices.

cm           the connection manager: ids, memberships, event channels
qp           a queue pair: states, receive queue, drops
queue_pairs  the queue pairs of a provider, and the attach tables of its devices
port         a device with its port, GIDs and interfaces
sa_client    the kernel's SA client of a port
log          the events that these parts write into a trace
times        the clock that is passed in

A provider passes in the parts that carry messages, answer SA requests and find routes (`Network` in `cm`). So
these files import no provider; a fabric of switches is in `mcast.backends.sim.core`.
"""
