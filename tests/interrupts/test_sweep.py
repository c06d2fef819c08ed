"""The sweep reaches what a signal reaches, and finds what it is made to find."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from . import sweep as harness
from .sweep import Kind, sweep

HERE = str(Path(__file__))


class World:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.amid = False


def change(world: World) -> None:
    """Python looks for signals where a function begins, and not at each line."""


def by_with(world: World) -> None:
    with world.lock:
        world.amid = True
        change(world)
        world.amid = False


def by_acquire(world: World) -> None:
    world.lock.acquire()
    try:
        world.amid = True
        change(world)
        world.amid = False
    finally:
        world.lock.release()


def state(world: World, error: BaseException | None) -> str:
    return "held" if world.lock.locked() else "amid" if world.amid else "whole"


def reached(call: Callable[[World], object], kind: Kind, *, opcodes: bool = True) -> set[object]:
    outcomes = sweep(World, call, state, kind, opcodes=opcodes, every=1, folder=HERE)
    assert outcomes[-1].error is None
    assert all(isinstance(one.error, kind.error) for one in outcomes[:-1])
    return set(harness.states(outcomes))


@pytest.mark.xfail(sys.version_info >= (3, 14), reason="gh-148874: a window in `with lock`", strict=True)
@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_with_leaks_no_lock(kind: Kind) -> None:
    assert "held" not in reached(by_with, kind)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_acquire_leaks_a_lock(kind: Kind) -> None:
    """A lock without `with` is found by the sweep."""
    assert "held" in reached(by_acquire, kind)


def test_lines_are_fewer_than_bytecodes() -> None:
    assert reached(by_with, Kind.CTRL_C, opcodes=False) <= {"whole", "amid"}


def test_swallowed_interrupt_is_a_failure() -> None:
    def swallow(world: World) -> None:
        try:
            by_with(world)
        except BaseException:
            world.amid = False

    with pytest.raises(AssertionError, match="CTRL_C at line"):
        sweep(World, swallow, state, every=1, folder=HERE)


def test_hang_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown with the stacks of all threads."""
    monkeypatch.setattr(harness, "BOUND", 0.1)
    world = World()

    def after(same: World, error: BaseException | None) -> None:
        with same.lock:
            pass

    with world.lock, pytest.raises(AssertionError, match=r"hangs\n(.*\n)+.*in after"):
        sweep(lambda: world, lambda _: None, after, every=1, folder=HERE)


def test_what_is_left_open_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_SETTLING", 0.1)
    opened = []

    def leak(world: World) -> None:
        opened.append(Path("/dev/null").open())  # noqa: SIM115

    with pytest.raises(AssertionError, match="descriptors are left"):
        sweep(World, leak, state, every=1, folder=HERE)
    for file in opened:
        file.close()


def test_interrupt_lost_in_a_finalizer_is_a_failure() -> None:
    class Finalized:
        def __del__(self) -> None:
            change(World())

    def finalize(world: World) -> None:
        Finalized()

    with pytest.raises(AssertionError, match="Interrupt"):
        sweep(World, finalize, state, Kind.ASYNCHRONOUS, every=1, folder=HERE)
