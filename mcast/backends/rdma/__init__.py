"""The real librdmacm and libibverbs. Importing this works everywhere; `PROVIDER.status()` says the rest."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mcast.api import Backend, Finding, Identity, Provider, Status

if TYPE_CHECKING:
    from mcast.api import Testbed


def _status() -> Status:
    from mcast.backends.rdma.availability import gather, judge

    return judge(gather())


def _open() -> Backend:
    from mcast.backends.rdma.backend import RdmaBackend

    return RdmaBackend()


def _checks(listen: float) -> tuple[Finding, ...]:
    from mcast.backends.rdma.doctor.checks import examine

    return examine(listen)


def _testbed() -> AbstractContextManager[Testbed]:
    from mcast.backends.rdma.testbed import rdma_testbed

    return rdma_testbed()


def _identify() -> Identity:
    from mcast.backends.rdma.identity import identify

    return identify()


PROVIDER = Provider(
    "rdma",
    "RDMA devices of this host, through librdmacm and libibverbs",
    _status,
    _open,
    _testbed,
    _checks,
    identify=_identify,
)
