"""Buffers as objects, and as destinations of objects: the table of tests/buffers.py."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from mcast import cast
from mcast.backends.sim import Fabric
from mcast.cast import Offered

from ...buffers import PAYLOADS, REFUSED, content
from .test_objects import BOUND, body, gets, member, others, roce

__all__ = ["roce"]


def test_each_payload_is_an_object(roce: Fabric) -> None:
    infos = [make() for make in PAYLOADS.values()]
    with (
        others(lambda: gets(roce, 1, len(infos))) as ends,
        member(roce, 0) as group,
        cast.open_session(group) as session,
    ):
        session.wait_for_receivers(1, BOUND)
        for info in infos:
            assert session.send(info).strategy_met
        got = ends[0].result(BOUND)
    found = dict(zip(PAYLOADS, map(body, got), strict=True))
    assert found == {name: content(info) for name, info in zip(PAYLOADS, infos, strict=True)}


def test_an_iterable_gives_payloads(roce: Fabric) -> None:
    parts = [make() for make in PAYLOADS.values()]
    with others(lambda: gets(roce, 1, 1)) as ends, member(roce, 0) as group:
        assert cast.send(group, iter(parts), timeout=BOUND).strategy_met
        (got,) = ends[0].result(BOUND)
    assert body(got) == b"".join(map(content, parts))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_payload_is_not_sent(roce: Fabric, kind: str) -> None:
    info = REFUSED[kind]()
    with member(roce, 0) as group, cast.open_session(group) as session:
        for data in (info, [info]):
            with pytest.raises(TypeError):
                session.send(data)


def test_each_payload_that_can_be_written_is_filled(roce: Fabric) -> None:
    targets = {name: make() for name, make in PAYLOADS.items()}
    targets = {name: target for name, target in targets.items() if not memoryview(target).readonly}
    data = [bytes(1 + at % 255 for at in range(len(content(target)))) for target in targets.values()]
    numbers = list(targets.values())

    def into(offered: Offered) -> Any:
        return numbers[offered.number]

    with (
        others(lambda: gets(roce, 1, len(targets), into)) as ends,
        member(roce, 0) as group,
        cast.open_session(group) as session,
    ):
        session.wait_for_receivers(1, BOUND)
        assert all(session.send(one).strategy_met for one in data)
        ends[0].result(BOUND)
    found = {name: content(target) for name, target in targets.items()}
    assert found == dict(zip(targets, data, strict=True))


FIXED = [name for name, make in PAYLOADS.items() if memoryview(make()).readonly]


@pytest.mark.parametrize("kind", [*FIXED, *(name for name in REFUSED if name != "None")])
def test_no_object_goes_elsewhere(roce: Fabric, kind: str) -> None:
    """Into what is no payload, or cannot be written."""
    target = (PAYLOADS | REFUSED)[kind]()
    with member(roce, 0) as group, pytest.raises(TypeError), closing(cast.receive(group, target)) as objects:
        next(objects)


@pytest.mark.parametrize("kind", ["objects", "structured with objects", "array of unions with py_object"])
def test_no_sender_chooses_what_objects_are(roce: Fabric, kind: str) -> None:
    """The target is refused even where only a function says it, when an object is offered."""
    target = REFUSED[kind]()
    before = bytes(target)
    with (
        others(lambda: offers(roce, len(before))),
        member(roce, 1) as group,
        pytest.raises(TypeError, match="has Python objects as items"),
    ):
        next(cast.receive(group, lambda offered: target))
    assert bytes(target) == before


def offers(fabric: Fabric, size: int) -> None:
    with member(fabric, 0) as group, cast.open_session(group) as session:
        session.wait_for_receivers(1, BOUND)
        assert not session.send(b"A" * size).strategy_met
