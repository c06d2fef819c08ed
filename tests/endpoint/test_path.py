"""The way of a join and of a message, from the application to the wire, down the rooms and never up again.

CONTRIBUTING.md names the steps of both ways in two tables. Here the calls of both are watched.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

import mcast
from mcast.api import Backend
from mcast.backends.sim.faults import Drop, Messages

from ..networks import KINDS, Network, SimNetwork, network_of

ROOT = Path(mcast.__file__).parent
PAGE = (ROOT.parent / "CONTRIBUTING.md").read_text("utf-8")
GROUP = "239.1.1.1"
DOWN = ("endpoint", "contract", "provider", "provider's parts", "wire")
"""The order of the rooms on the way. A provider imports the contract, but its methods call the provider."""
ASIDE = {"interrupts", "errors"}
"""Rooms that stand at the wayside: they call the function that was handed to them, or make an error."""


class Call(NamedTuple):
    """A function of the package: its file, without `.py`, from the package's folder on, and its name."""

    file: str
    name: str

    @property
    def depth(self) -> int:
        room, *rest = self.file.split("/")
        if room == "backends":
            return DOWN.index("provider" if len(rest) < 3 else "provider's parts")
        return DOWN.index({"api": "contract"}.get(room, room))


Chain = tuple[Call, ...]
"""A call, and those that it was made by: the first is the application's."""


@contextmanager
def watched() -> Iterator[list[Chain]]:
    """The chains of all calls of this thread into the package, in their order."""
    chains: list[Chain] = []

    def called(frame: FrameType | None) -> Iterator[Call]:
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and path.parts[len(ROOT.parts)] not in ASIDE:
                file = str(path.relative_to(ROOT).with_suffix(""))
                yield Call(file, frame.f_code.co_qualname)
            frame = frame.f_back

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            chains.append(tuple(called(frame))[::-1])

    sys.setprofile(profile)
    try:
        yield chains
    finally:
        sys.setprofile(None)


STEP = re.compile(r"`([\w.]+)` in `mcast/([\w/]+)\.py`")


def steps(way: str, network: Network) -> list[Call]:
    """What the page names for such a network, from the application on."""
    table = PAGE.partition(f"### The path of a {way}\n")[2].strip().partition("\n\n")[0]
    found: list[Call] = []
    for row in table.splitlines()[2:]:
        what, simulated, real = (cell.strip() for cell in row.strip("| ").split(" | "))
        layer = what.partition(":")[0]
        if layer in ("Ethernet", "InfiniBand") and (layer == "InfiniBand") is not network.is_infiniband:
            continue
        cell = simulated if isinstance(network, SimNetwork) or real == "the same" else real
        found += [Call(file, name) for name, file in STEP.findall(cell)]
    return found


def walked(way: str, network: Network, backend: Backend) -> list[Chain]:
    """The chains of calls of a join, or of a batch of messages that is sent and received."""
    if isinstance(network, SimNetwork):
        network.fabric.rules.when(Messages(target="nobody"), Drop())
    with (
        mcast.open_endpoint(backend, "10.0.0.1", busy_poll=60) as sender,
        mcast.open_endpoint(backend, "10.0.0.2", busy_poll=60) as member,
    ):
        if way == "join":
            with watched() as chains:
                member.join(GROUP)
            return chains
        member.join(GROUP)
        with sender.sender(GROUP) as group, watched() as chains:
            group.send_batch([b"x"])
            batch = member.recv_batch(1, 60)
        made = type(batch)  # perhaps by C
        batch.release()
        file = made.__module__.removeprefix("mcast.").replace(".", "/")
        return [*chains, (Call("endpoint/blocking", "Endpoint.recv_batch"), Call(file, made.__qualname__))]


def first(step: Call, chains: list[Chain]) -> int:
    """The number of the first call of a function, or of a method of a class."""
    there = (
        number
        for number, chain in enumerate(chains)
        if chain[-1].file == step.file and f"{chain[-1].name}.".startswith(f"{step.name}.")
    )
    return next(there, -1)


@pytest.fixture(params=KINDS)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """A network of each kind. On a simulated one the time is virtual: this thread does all."""
    made = network_of(request)
    yield made
    made.close()


@pytest.mark.parametrize("way", ["join", "message"])
def test_the_page_names_the_steps_in_their_order_and_none_goes_up(
    way: str, network: Network, backend: Backend
) -> None:
    named = steps(way, network)
    chains = walked(way, network, backend)
    at = {step: first(step, chains) for step in named}
    assert [step for step, number in at.items() if number < 0] == [], "they are called"
    assert list(at.values()) == sorted(at.values()), "in this order"
    rising = [
        f"{one} calls {other}"
        for number in at.values()
        for one, other in zip(chains[number], chains[number][1:], strict=False)
        if other.depth < one.depth
    ]
    assert rising == []
    assert chains[max(at.values())][0].file.startswith("endpoint/"), "all of it below the application's call"


def test_a_step_up_is_seen() -> None:
    down = [
        "endpoint/core",
        "api",
        "contract/cm_id",
        "backends/sim/backend",
        "backends/sim/core/cm",
        "wire/mad",
    ]
    depths = [Call(file, "f").depth for file in down]
    assert depths == sorted(depths)
    assert len(set(depths)) == len(DOWN)
