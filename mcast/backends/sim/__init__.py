"""The simulator: an in-process model of a RoCE or an InfiniBand fabric.

`Fabric.roce(...)` or `Fabric.infiniband(...)` makes a fabric; `open_fabric(fabric)` opens it as a backend;
`open_backend("sim-roce")` does both. `mcast.backends.sim.served` serves one fabric to many processes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from mcast.api import Backend, LinkLayer, Provider, Status
from mcast.backends.model.port import Limits
from mcast.backends.sim.backend import SimBackend
from mcast.backends.sim.core.options import InfinibandOptions, RoceOptions
from mcast.backends.sim.core.sa import Quirks
from mcast.backends.sim.fabric import Fabric
from mcast.backends.sim.served.attach import (
    attach,
    describe_from_environment,
    describe_served,
    open_sim,
    served_status,
)
from mcast.backends.sim.testbed import sim_testbed

if TYPE_CHECKING:
    from mcast.api import Testbed

__all__ = [
    "INFINIBAND",
    "ROCE",
    "SHARED_INFINIBAND",
    "SHARED_ROCE",
    "SIM",
    "Fabric",
    "InfinibandOptions",
    "Limits",
    "Quirks",
    "RoceOptions",
    "open_fabric",
]


def open_fabric(fabric: Fabric, host: int | None = None) -> Backend:
    """Open the backend of a program on one host of the fabric, or on all hosts at once."""
    name = "sim-roce" if fabric.sa is None else "sim-ib"
    if host is not None and host not in fabric.hosts:
        raise ValueError(f"host is {host!r}: this fabric has hosts 0..{len(fabric.hosts) - 1}")
    return SimBackend(fabric, name, None if host is None else frozenset({host}))


def _open(name: str, make: Callable[..., Fabric], **options: Any) -> Backend:
    """Make a fabric for this backend alone, and open it.

    The options are those of `Fabric.roce` or `.infiniband`.
    """
    return SimBackend(make(**options), name, owns_fabric=True)


def _provider(name: str, summary: str, make: Callable[..., Fabric]) -> Provider:
    return Provider(
        name,
        summary,
        status=lambda: Status(True, summary),
        open=partial(_open, name, make),
        testbed=partial(sim_testbed, name, make),
    )


def _served_testbed(make: Callable[..., Fabric]) -> AbstractContextManager[Testbed]:
    from mcast.backends.sim.served.testbed import served_testbed

    return served_testbed(make)


def _served(name: str, summary: str, make: Callable[..., Fabric], layer: LinkLayer) -> Provider:
    return Provider(
        name,
        summary,
        status=served_status,
        open=partial(attach, name, layer),
        testbed=partial(_served_testbed, make),
        shared=describe_served,
    )


ROCE = _provider("sim-roce", "simulated RoCEv2 fabric: IGMP, no SA", Fabric.roce)
"""Provider `sim-roce`: a RoCE fabric of one's own."""

INFINIBAND = _provider("sim-ib", "simulated InfiniBand fabric: SA, MLIDs, partitions", Fabric.infiniband)
"""Provider `sim-ib`: an InfiniBand fabric of one's own."""

SIM = ROCE._replace(name="sim", open=partial(open_sim, ROCE.open, "sim"), shared=describe_from_environment)
"""Provider `sim`: the served fabric that MCAST_SIM names, or else a RoCE fabric of one's own."""

SHARED_ROCE = _served("sim-shared", "served RoCEv2 fabric of many processes", Fabric.roce, LinkLayer.ETHERNET)
"""Provider `sim-shared`: a served RoCE fabric."""

SHARED_INFINIBAND = _served(
    "sim-shared-ib", "served InfiniBand fabric of many processes", Fabric.infiniband, LinkLayer.INFINIBAND
)
"""Provider `sim-shared-ib`: a served InfiniBand fabric."""
