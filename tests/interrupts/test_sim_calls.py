"""Exceptions at each line of the calls on a simulated fabric: not done, done, or the fabric is broken.

Whatever the line, no lock stays held and nobody waits for ever, `close` closes, and nothing is left of the
backend after its close.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mcast.backends.sim import Fabric
from mcast.backends.sim.clock import VirtualClock
from mcast.contract import poison

from .sim_world import AS_MEMBER, CALLS, ENDS, GROUP, SHORT_CALLS, World, check, check_ended, made
from .sweep import Kind, states, sweep


@pytest.fixture(autouse=True)
def recheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that is pending when a wait begins is taken after it."""
    monkeypatch.setattr(poison, "MAX_SLEEP", 0.02)


each_fabric = pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband], ids=["roce", "infiniband"])
each_kind = pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)


@each_kind
@pytest.mark.parametrize("clock", ["virtual", "wall"])
@each_fabric
@pytest.mark.parametrize("name", [*CALLS, *AS_MEMBER, *ENDS])
def test_call(name: str, make: Callable[..., Fabric], clock: str, kind: Kind) -> None:
    call = (CALLS | AS_MEMBER | ENDS)[name]
    outcomes = sweep(made(name, make, clock), call, check_ended if name in ENDS else check, kind)
    assert set(states(outcomes)) <= {"usable", "broken"}
    assert outcomes[-1].state == "usable"


@each_kind
@each_fabric
@pytest.mark.parametrize("name", SHORT_CALLS)
def test_short_call(name: str, make: Callable[..., Fabric], kind: Kind) -> None:
    """At bytecodes: there the flag and the lock meet."""
    call = (CALLS | AS_MEMBER | ENDS)[name]
    after = check_ended if name in ENDS else check
    sweep(made(name, make, "virtual"), call, after, kind, opcodes=True, every=None)


@each_kind
def test_advance(kind: Kind) -> None:
    """Between two steps the call that waits is interrupted, and nothing else."""

    def advance(world: World) -> None:
        world.id.join_multicast(GROUP)
        assert isinstance(world.fabric.clock, VirtualClock)
        world.fabric.clock.advance(10)

    sweep(lambda: World(Fabric.infiniband, "virtual"), advance, check, kind)
