"""Exceptions at any moment of the calls that send and receive objects: the membership is free afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from mcast import Endpoint, Membership, cast, open_endpoint
from mcast.backends.sim import Fabric, open_fabric

from ...interrupts.sweep import EVERY, Kind, states, sweep, works

GROUP = "239.1.2.3"


class World:
    """Two members of a group, on the clock of the fabric, which is virtual."""

    def __init__(self) -> None:
        self.fabric = Fabric.roce(ports=2)
        self.backend = open_fabric(self.fabric)
        self.ends: list[Endpoint] = [open_endpoint(self.backend, f"10.0.0.{n}") for n in (1, 2)]
        self.group: Membership = self.ends[0].join(GROUP)
        self.ends[1].join(GROUP)
        self.opens = False


def sends(world: World) -> None:
    cast.send(world.group, b"to nobody", receivers=0)


def hashes(world: World) -> None:
    """With a thread, which is gone afterwards (`sweep`)."""
    cast.send(world.group, bytes(1 << 18), receivers=0, threads=1)


def opens(world: World) -> None:
    world.opens = True
    with cast.open_session(world.group) as session:
        session.wait_for_receivers(0)


def publishes(world: World) -> None:
    world.opens = True
    with cast.open_session(world.group) as session:
        session.publish(bytearray(b"1"), version=1)
        session.publish(b"2", version=2)


def receives(world: World) -> None:
    assert list(cast.receive(world.group, timeout=0.001)) == []


def after(world: World, error: BaseException | None) -> str:
    try:
        usable = works(lambda: cast.send(world.group, b"again", receivers=0))
        return "usable" if usable else "broken"
    except RuntimeError:
        # A `with` of a session is cut off before its `__exit__` begins, and the traceback has the session.
        if not world.opens:
            raise
        return "open"
    finally:
        for end in world.ends:
            end.close()
            assert end.closed
        world.backend.close()
        world.fabric.close()
        gc.collect()


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
@pytest.mark.parametrize("call", [sends, hashes, opens, publishes, receives])
def test_interrupted_call(call: Callable[[World], None], kind: Kind) -> None:
    outcomes = sweep(World, call, after, kind, every=1 if EVERY == 1 else 83)
    print(call.__name__, kind.name, dict(states(outcomes)))
    assert outcomes


class Interrupt(BaseException):
    """Exception of a signal handler."""


def test_session_goes_on_after_an_error_of_the_program() -> None:
    """An exception of the program's iterator, or an interrupt in it, ends only the object."""

    def raises(error: BaseException) -> Iterator[bytes]:
        yield b"x"
        raise error

    world = World()
    with cast.open_session(world.group) as session:
        for error in (ValueError("mine"), Interrupt()):
            with pytest.raises(type(error)):
                session.send(raises(error))
        assert session.send(b"x").size == 1
    for end in world.ends:
        end.close()
