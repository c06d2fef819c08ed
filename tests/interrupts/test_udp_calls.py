"""Exceptions at each line of the calls of `udp`: not done, done, or the backend is broken.

Whatever the line, no lock stays held and nobody waits for ever, `close` closes, and no socket, no thread and
no membership is left of the backend after its close.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mcast import open_backend
from mcast.api import Backend
from mcast.backends.net import hostnet
from mcast.backends.udp.backend import UdpBackend, UdpQueuePair
from mcast.contract import poison

from ..own_network import CAN_MAKE_NAMESPACES, needs_namespaces, private_network
from .sim_world import AS_MEMBER, CALLS, ENDS, SHORT_CALLS, World, check, check_ended, prepared
from .sweep import Kind, states, sweep

# Python itself closes a socket that an interrupt has taken from who opened it, and warns.
pytestmark = [needs_namespaces, pytest.mark.filterwarnings("ignore::ResourceWarning")]
each_kind = pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)


class UdpWorld(World):
    """A backend on loopback, which has the addresses of two ports."""

    def __init__(self, joined: bool) -> None:
        self.begin(self.open_another(), joined)

    @property
    def is_broken(self) -> bool:
        assert isinstance(self.backend, UdpBackend)
        return self.backend._guard.broken

    @property
    def depth(self) -> int:
        assert isinstance(self.qp, UdpQueuePair)
        return self.qp.path.depth

    def open_another(self) -> Backend:
        return open_backend("udp")

    def close(self) -> None:
        for backend in (self.backend, *self.opened):
            backend.close()
            assert backend.closed
        assert hostnet.igmp_memberships() == {}


@pytest.fixture(scope="module", autouse=CAN_MAKE_NAMESPACES)
def network() -> Iterator[None]:
    """A network for all sweeps: each call leaves nothing of it."""
    with private_network():
        for address in ("10.0.0.1", "10.0.0.2"):
            hostnet.run("ip", "addr", "add", f"{address}/32", "dev", "lo")
        yield


@pytest.fixture(autouse=True)
def recheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that is pending when a wait begins is taken after it."""
    monkeypatch.setattr(poison, "MAX_SLEEP", 0.02)
    monkeypatch.setattr("mcast.backends.udp.backend.MAX_SLEEP", 0.02)


@each_kind
@pytest.mark.parametrize("name", [*CALLS, *AS_MEMBER, *ENDS])
def test_call(name: str, kind: Kind) -> None:
    call = (CALLS | AS_MEMBER | ENDS)[name]
    outcomes = sweep(prepared(name, UdpWorld), call, check_ended if name in ENDS else check, kind)
    assert set(states(outcomes)) <= {"usable", "broken"}
    assert outcomes[-1].state == "usable"


@each_kind
@pytest.mark.parametrize("name", SHORT_CALLS)
def test_short_call(name: str, kind: Kind) -> None:
    """At bytecodes: there the flag and the lock meet."""
    call = (CALLS | AS_MEMBER | ENDS)[name]
    sweep(prepared(name, UdpWorld), call, check_ended if name in ENDS else check, kind, opcodes=True)


@each_kind
@pytest.mark.parametrize("name", ["send", "send_one"])
def test_call_in_c(name: str, kind: Kind) -> None:
    """A second send to a destination passes no line of ours, and an exception leaves all whole."""

    def world() -> UdpWorld:
        made = prepared(name, UdpWorld)()
        made.qp.send_one(made.to, b"0")
        return made

    outcomes = sweep(world, AS_MEMBER[name], check, kind)
    assert set(states(outcomes)) == {"usable"}
    assert len(outcomes) <= 2
