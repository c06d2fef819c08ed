"""Types of payloads, in one table for every call and provider; all refuse the rest with TypeError."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pickle import PickleBuffer
from typing import Any

import numpy as np
import pytest

import mcast
from mcast.api import Backend, HeaderBodyBatch, Message
from mcast.arguments.buffers import flat_bytes, writable_bytes

from ..buffers import DATA, PAYLOADS, REFUSED, OrObject, content
from ..card.ends import BOUND, GROUP, End
from ..card.one_implementation import one_implementation
from ..networks import CardNetwork, Network, network_of

Verdict = list[bytes] | type[Exception]
"""The messages that arrive, or the error."""

QP_CALLS: dict[str, Callable[[End, Any, Any], object]] = {
    "send": lambda end, to, thing: end.qp.send(to, [thing]),
    "send_one": lambda end, to, thing: end.qp.send_one(to, thing),
    "send_one with an immediate": lambda end, to, thing: end.qp.send_one(to, thing, 7),
}
GROUP_CALLS: dict[str, Callable[[mcast.Membership, Any], object]] = {
    "send": lambda group, thing: group.send(thing),
    "send_batch": lambda group, thing: group.send_batch([thing]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "numbered": {"sequence": True},
    "limited": {"max_message": 1000},
}

_NUMBERS, _OBJECTS = np.arange(6.0).reshape(2, 3), np.array([["text", None], [1, 2]], dtype=object)
ROWS: dict[str, tuple[memoryview, Verdict]] = {
    "bytes": (memoryview(DATA).cast("B", (2, 12)), [DATA[:12], DATA[12:]]),
    "numbers": (_NUMBERS.data, [row.tobytes() for row in _NUMBERS]),
    "records": (np.zeros((2, 1), "i4,f8").data, [bytes(12)] * 2),
    "none": (np.zeros((0, 3)).data, []),
    "empty": (np.zeros((2, 0)).data, [b"", b""]),
    "Fortran order": (np.asfortranarray(_NUMBERS).data, TypeError),
    "with a step": (_NUMBERS[:, ::2].data, TypeError),
    "objects": (_OBJECTS.data, TypeError),
    "no objects": (_OBJECTS[:0].data, TypeError),
    "objects with a step": (_OBJECTS[:, ::2].data, TypeError),
    "records with objects": (np.zeros((2, 1), "i4,O").data, TypeError),
}


@pytest.fixture(params=["roce", "shared-roce", "card-roce", "card-roce without fast calls"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Of each provider; of cards with the fast calls in C, and with the contract's own alone."""
    with ExitStack() as held:
        network: Network
        if request.param.endswith("without fast calls"):
            network = CardNetwork("roce", request.getfixturevalue("card"))
            held.enter_context(one_implementation())
        else:
            network = network_of(request, clock="wall")
        with network.open() as opened:
            yield opened
        assert network.leftovers() == ()
        network.close()


def judged(
    send: Callable[[], object], sent: Callable[[], int], receive: Callable[[], Message | None]
) -> Verdict:
    """Return the bytes that arrive, or the error of a call that has sent nothing."""
    before = sent()
    try:
        send()
    except Exception as error:
        assert sent() == before
        return type(error)
    messages = [receive() for _ in range(sent() - before)]
    return [bytes(message.payload) for message in messages if message is not None]


def table(judge: Callable[[Any], Verdict]) -> dict[str, Verdict | str]:
    """The verdict on each kind."""
    found: dict[str, Verdict | str] = {}
    for name, make in {**PAYLOADS, **REFUSED}.items():
        thing = make()
        verdict = judge(thing)
        as_it_is = name in PAYLOADS and verdict == [content(thing)]
        found[name] = "arrives as it is" if as_it_is else verdict
    return found


EXPECTED = dict.fromkeys(PAYLOADS, "arrives as it is") | dict.fromkeys(REFUSED, TypeError)


@pytest.mark.parametrize("call", QP_CALLS)
def test_a_queue_pair_sends_payloads_alone(backend: Backend, call: str) -> None:
    end = End(backend)
    to = end.join()
    send = QP_CALLS[call]
    found = table(
        lambda thing: judged(
            lambda: send(end, to, thing), lambda: end.qp.counters.sent, lambda: end.qp.recv_one(BOUND)
        )
    )
    assert found == EXPECTED


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(OrObject, TypeError, id="union with py_object"),
        pytest.param(lambda: np.asfortranarray(_NUMBERS), [_NUMBERS.T.tobytes()], id="Fortran order"),
    ],
)
def test_views_of_views_are_looked_through(
    backend: Backend, make: Callable[[], Any], expected: Verdict
) -> None:
    """They are not in the table: before 3.13 Python crashes if they are garbage in the cycle of an error."""
    end = End(backend)
    to = end.join()
    found = judged(
        lambda: end.qp.send_one(to, PickleBuffer(memoryview(make()))),
        lambda: end.qp.counters.sent,
        lambda: end.qp.recv_one(BOUND),
    )
    assert found == expected


def test_a_payload_is_registered_unless_it_is_empty(backend: Backend) -> None:
    def judge(thing: Any) -> Verdict:
        try:
            with end.qp.register(thing) as region:
                return [bytes(region.buffer)]
        except Exception as error:
            return type(error)

    end = End(backend)
    found = table(judge)
    empty = [name for name, make in PAYLOADS.items() if not content(make())]
    assert found == EXPECTED | dict.fromkeys(empty, ValueError)


def test_receive_memory_is_a_writable_payload(backend: Backend) -> None:
    """Receive memory is a payload that can be written."""
    end = End(backend)
    for wrong in (REFUSED["objects"](), REFUSED["union with py_object"](), PAYLOADS["read-only array"]()):
        with pytest.raises(TypeError):
            end.qp.register(wrong, recv_slot=8)
    array: Any = np.zeros((4, 4), order="F")
    region, to = end.qp.register(array, recv_slot=64), end.join()
    end.qp.send_one(to, DATA)
    with end.qp.recv(1, BOUND) as batch:
        assert bytes(batch[0].payload) == DATA
        assert DATA in array.tobytes("A")
    region.close()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("call", GROUP_CALLS)
def test_a_group_sends_payloads_alone(backend: Backend, call: str, options: str) -> None:
    send = GROUP_CALLS[call]
    with (
        mcast.open_endpoint(backend, "10.0.0.1", **OPTIONS[options]) as endpoint,
        endpoint.join(GROUP) as group,
    ):
        found = table(
            lambda thing: judged(
                lambda: send(group, thing), lambda: endpoint.stats().sent, lambda: group.recv(BOUND)
            )
        )
    assert found == EXPECTED


@pytest.mark.parametrize("kind", ROWS)
def test_rows_are_payloads(backend: Backend, kind: str) -> None:
    rows, expected = ROWS[kind]
    end = End(backend)
    to = end.join()
    found = judged(
        lambda: end.qp.send(to, rows), lambda: end.qp.counters.sent, lambda: end.qp.recv_one(BOUND)
    )
    assert found == expected
    for options in OPTIONS.values():
        with (
            mcast.open_endpoint(backend, "10.0.0.2", **options) as endpoint,
            endpoint.join("239.4.5.6") as group,
        ):
            found = judged(
                lambda: group.send_batch(rows),
                lambda: endpoint.stats().sent,
                lambda: group.recv(BOUND),
            )
            assert found == expected


def test_the_view_of_a_memoryview_may_be_garbage() -> None:
    """Of Fortran order, which needs a PickleBuffer. Python 3.12 crashed."""
    view = np.asfortranarray(_NUMBERS).data
    garbage: list[object] = [view, flat_bytes(view)]
    garbage.append(garbage)
    del view, garbage
    gc.collect()


def test_a_read_only_view_stays_read_only() -> None:
    """Of Fortran order, too, where the array behind it could be written."""
    for array in (_NUMBERS, np.asfortranarray(_NUMBERS)):
        view = array.data.toreadonly()
        assert flat_bytes(view).readonly
        with pytest.raises(TypeError, match="is read-only"):
            writable_bytes(view)


def test_both_parts_of_a_headed_batch_are_payloads() -> None:
    heads = memoryview(DATA).cast("B", (2, 12))
    for wrong, error in ((_OBJECTS.data, TypeError), (_OBJECTS[:, ::2].data, ValueError)):
        with pytest.raises(error):
            HeaderBodyBatch(heads, wrong)
        with pytest.raises(error):
            HeaderBodyBatch(wrong, heads)
    objects: Any = np.array([None] * 6, dtype=object)
    for place in (objects, bytes(48)):
        with pytest.raises(TypeError):
            HeaderBodyBatch(heads, heads).into(place)
    assert objects.tolist() == [None] * 6
