"""Where a rank is: its endpoint, and the groups in which the ranks send."""

from __future__ import annotations

from contextlib import ExitStack
from ipaddress import IPv4Address
from secrets import randbelow, token_bytes
from typing import NamedTuple

from mcast.api import SIMULATED, Backend, McastAddress, backend_status, open_backend, provider
from mcast.endpoint.blocking import Endpoint, open_endpoint
from mcast.endpoint.ports import active

_DEPTH = 4096
"""Length of the receive queue in messages, if the device allows it."""

_FIRST, _GROUPS = IPv4Address("239.192.0.0"), 1 << 18
"""The organization-local scope of IPv4 multicast, and how many groups it has (RFC 2365, section 6.2)."""


_KEY = 32
"""The bytes of a key."""


class JobTerms(NamedTuple):
    """Settings of rank 0, which all ranks use.

    group     in which rank 0 sends
    token     16 bytes, by which the ranks know each other's objects from those of strangers
    peer_timeout  so many seconds a rank may be silent
    wait      so many seconds the ranks that have begun a call wait for the others
    rate      the most bytes a second
    key       closes the groups to all that are no ranks; None: they are open
    """

    group: McastAddress
    token: bytes
    peer_timeout: float
    wait: float
    rate: float
    key: bytes | None


def job_terms(
    size: int,
    backend: str | Backend,
    group: McastAddress | str | None,
    peer_timeout: float,
    wait: float,
    rate: float,
    authenticated: bool,
) -> JobTerms:
    """The terms of a collective of so many ranks.

    Raises ValueError or TypeError for arguments that cannot be, UnknownBackend for an unknown provider.
    """
    for name, value in {"peer_timeout": peer_timeout, "wait": wait, "rate": rate}.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}: give more than 0")
    if isinstance(backend, str):
        backend_status(backend)
    if group is None:
        group = McastAddress(address=_FIRST + randbelow(_GROUPS - size))
    key = token_bytes(_KEY) if authenticated else None
    terms = JobTerms(McastAddress.of(group), token_bytes(16), peer_timeout, wait, rate, key)
    group_of(terms, size - 1)
    return terms


def group_of(terms: JobTerms, rank: int) -> McastAddress:
    """The group in which that rank sends. ValueError if it is none."""
    first = terms.group
    if isinstance(first.address, bytes):
        raise ValueError("a raw MGID has no neighbours for the other ranks: use an IPv4 or IPv6 group")
    return McastAddress(address=first.address + rank, port=first.port)


def opened(stack: ExitStack, backend: str | Backend, bind: str | None, local_rank: int) -> Endpoint:
    """An endpoint on a port of this host; without `bind`, the ranks of a host take the ports in turn.

    Raises BackendError, McastError or ValueError where there is none.
    """
    if isinstance(backend, str):
        if backend in SIMULATED and not provider(backend).shared():
            raise ValueError(
                "each rank would have a simulated fabric of its own: use `udp`, or run `mcast sim serve` and "
                "export what it prints"
            )
        backend = stack.enter_context(open_backend(backend))
    local_ports = active(backend)
    local_port = local_ports[local_rank % len(local_ports)]
    depth = min(_DEPTH, local_port.device.max_qp_wr)
    where = local_port.address if bind is None else bind
    return stack.enter_context(open_endpoint(backend, where, loopback="off", receive_depth=depth))
