"""The fast calls in C beside the one implementation: what they refuse has its errors."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any

import pytest

from benchmarks.rdma.fast_calls import USES
from mcast.api import Batch, Destination, McastError, QpState

from ..profiled import profiled
from . import ends
from .card import Card
from .one_implementation import FAST, fast_calls, one_implementation
from .provider import CardBackend

RECEIVES_POSTED = 16
NAMES = sorted(frozenset[str]().union(*map(fast_calls, FAST)))


class End(ends.End):
    """An id with its queue pair, and the group that it is a member of."""

    def __init__(self, backend: CardBackend) -> None:
        super().__init__(backend)
        self.group: Destination = self.join()
        self.qp.send_one(self.group, b"")  # from here on the address handle is known
        assert self.qp.recv_one(ends.BOUND) is not None

    def batch(self) -> Batch:
        """Two messages."""
        self.qp.send(self.group, [b"one", b"two"])
        return self.qp.recv(2, ends.BOUND)

    def state(self) -> tuple[int, int | None]:
        """Number of messages sent, and of free receives."""
        return self.qp.counters.sent, self.qp.counters.recv_free


@pytest.fixture
def end(card: Card, backend: CardBackend) -> End:
    card.ethernet(1)
    return End(backend)


def outcome(call: Callable[[], object]) -> tuple[object, ...]:
    """Of a call that is refused: all that its error says."""
    with pytest.raises(Exception) as caught:
        call()
    error = caught.value
    attributes = vars(error) if isinstance(error, McastError) else {}
    return type(error), str(error), {name: str(value) for name, value in attributes.items()}


# --- what is refused ---


def closed(end: End) -> None:
    end.qp.close()


def in_error(end: End) -> None:
    end.qp.modify(QpState.ERR)


def onto_a_device(end: End) -> None:
    memory = os.memfd_create("device")
    os.ftruncate(memory, 4096)
    end.qp.register_dmabuf(memory, 4096, recv_slot=1024)
    os.close(memory)


def nothing(end: End) -> None:
    """All is in order but for the arguments."""


SENDS: dict[str, tuple[Callable[[End], None], tuple[Any, ...], dict[str, Any]]] = {
    "closed": (closed, (b"x",), {}),
    "in ERR": (in_error, (b"x",), {}),
    "too long": (nothing, (bytes(1025),), {}),
    "no buffer": (nothing, ("text",), {}),
    "an immediate of 33 bits": (nothing, (b"x", 1 << 32), {}),
    "a negative immediate": (nothing, (b"x", -1), {}),
    "no immediate": (nothing, (b"x", "imm"), {}),
    "no payload": (nothing, (), {}),
    "no such argument": (nothing, (b"x",), {"times": 2}),
    "twice the same": (nothing, (b"x",), {"destination": None}),
    "too many": (nothing, (b"x", None, None, None), {}),
    "no time": (nothing, (b"x", None, "soon"), {}),
    "not a number": (nothing, (b"x", None, float("nan")), {}),
}
RECEIVES: dict[str, tuple[Callable[[End], None], tuple[Any, ...], dict[str, Any]]] = {
    "closed": (closed, (), {"timeout": 0}),
    "in ERR": (in_error, (), {"timeout": 0}),
    "no such argument": (nothing, (), {"times": 2}),
    "too many": (nothing, (1, 0, 0, 0), {}),
    "no time": (nothing, (), {"timeout": "soon"}),
    "not a number": (nothing, (), {"timeout": float("nan")}),
}
SIZES: dict[str, tuple[Callable[[End], None], tuple[Any, ...], dict[str, Any]]] = {
    "none": (nothing, (0,), {}),
    "less than none": (nothing, (-1,), {}),
    "no number": (nothing, ("max",), {}),
}
REFUSED = [
    *(
        ("send", what, before, ([one[0]], *one[1:]) if one else (), named)
        for what, (before, one, named) in SENDS.items()
    ),
    ("send", "one buffer", nothing, (b"x",), {}),
    ("send", "rows that are too long", nothing, (memoryview(bytes(2050)).cast("B", (2, 1025)),), {}),
    ("send", "rows of a closed queue pair", closed, (memoryview(bytes(2)).cast("B", (2, 1)),), {}),
    ("send", "rows of rows", nothing, (memoryview(bytes(8)).cast("B", (2, 2, 2)),), {}),
    ("send", "rows that lie apart", nothing, (memoryview(bytes(8)).cast("B", (4, 2))[::2],), {}),
    *(("send_one", what, *rest) for what, rest in SENDS.items()),
    *(("recv", what, *rest) for what, rest in (RECEIVES | SIZES).items()),
    *(("recv_one", what, *rest) for what, rest in RECEIVES.items()),
    ("recv_one", "onto a device", onto_a_device, (0,), {}),
]


@pytest.mark.parametrize(
    ("name", "before", "given", "named"),
    [pytest.param(name, *rest, id=f"{name}-{what}") for name, what, *rest in REFUSED],
)
def test_fast_call_has_the_contracts_errors(
    end: End, name: str, before: Callable[[End], None], given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """A refusal of the fast call has the error of the contract's implementation."""
    before(end)
    state = end.state() if before is nothing else None
    arguments = (end.group, *given) if name.startswith("send") else given
    fast = outcome(lambda: getattr(end.qp, name)(*arguments, **named))
    with one_implementation(name):
        assert outcome(lambda: getattr(end.qp, name)(*arguments, **named)) == fast
    assert state is None or end.state() == state


def view(batch: Batch) -> memoryview:
    return memoryview(batch[1].payload)


def part(batch: Batch) -> memoryview:
    return batch[1].payload[1:]


def ended(batch: Batch) -> None:
    batch.release()


def part_of_a_message(batch: Batch) -> memoryview:
    return next(iter(batch)).payload[1:]


def leave(batch: Batch) -> None:
    with batch:
        pass


BATCHES: dict[str, tuple[Callable[[Batch], object], ...]] = {
    "release": (Batch.release, view, part, part_of_a_message),
    "__exit__": (leave, view, part, part_of_a_message),
    "__iter__": (list, ended),
}


@pytest.mark.parametrize(
    ("name", "call", "before"),
    [
        pytest.param(name, calls[0], before, id=f"{name}-{before.__name__}")
        for name, calls in BATCHES.items()
        for before in calls[1:]
    ],
)
def test_batch_has_the_contracts_errors(
    end: End, name: str, call: Callable[[Batch], object], before: Callable[[Batch], object]
) -> None:
    """A refusal of a batch has the error of the contract's implementation."""
    batch = end.batch()
    used = before(batch)
    state = end.state()
    call = (lambda batch: batch.release()) if name == "release" else call  # looked up anew
    fast = outcome(lambda: call(batch))
    with one_implementation(name):
        assert outcome(lambda: call(batch)) == fast
    assert end.state() == state
    del used
    batch.release()
    assert batch.released
    assert end.state()[1] == RECEIVES_POSTED


def failing(batch: Batch, kept: list[memoryview]) -> None:
    with batch:
        kept.append(view(batch))
        raise KeyError


@pytest.mark.parametrize("names", [("__exit__",), ()], ids=["one implementation", "fast"])
def test_an_error_of_the_block_is_not_hidden(end: End, names: tuple[str, ...]) -> None:
    """By the BufferError of a payload that the traceback may be what uses."""
    batch, kept = end.batch(), list[memoryview]()
    with one_implementation(*names) if names else nullcontext(), pytest.raises(KeyError):
        failing(batch, kept)
    assert not batch.released
    kept.clear()
    batch.release()


# --- what is fast ---


def frames(call: Callable[[], object]) -> list[str]:
    """The Python functions that are entered in the call."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            seen.append(frame.f_code.co_qualname)

    profiled(note, call)
    return seen


IN_ORDER: dict[str, Callable[[End], Callable[[], object]]] = {
    "send": lambda end: partial(end.qp.send, end.group, [b"x", bytearray(8)], 7, 0),
    "send_one": lambda end: partial(end.qp.send_one, end.group, b"x"),
    "recv": lambda end: partial(end.qp.recv, 1, 0),
    "recv_one": lambda end: partial(end.qp.recv_one, timeout=0),
    "release": lambda end: end.batch().release,
    "__enter__": lambda end: end.batch().__enter__,
    "__exit__": lambda end: partial(end.batch().__exit__, None, None, None),
    "__iter__": lambda end: partial(list, end.batch()),
}


def test_every_fast_call_is_tried_and_measured() -> None:
    assert sorted(IN_ORDER) == NAMES
    assert {name for names in USES for name in names} == set(NAMES)
    refusing = {name for name, *_ in REFUSED} | BATCHES.keys()
    assert refusing == set(NAMES) - {"__enter__"}, "it refuses nothing"


def test_a_collection_is_no_part_of_a_call() -> None:
    def collects(phase: str, info: object) -> None:
        """Somebody's callback, as hypothesis has one."""

    before = gc.get_threshold()
    gc.callbacks.append(collects)
    try:
        gc.set_threshold(1)
        entered = frames(lambda: [[] for _ in range(100)])
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collects)
    assert not [name for name in entered if "collects" in name]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_in_order_enters_no_function_of_python(end: End, name: str) -> None:
    end.qp.send(end.group, [b"waits to be received"])
    assert frames(IN_ORDER[name](end)) == []


@pytest.mark.parametrize("provider", FAST, ids=lambda provider: provider.__name__)
def test_the_switch_lets_the_contract_serve(provider: type) -> None:
    fast, contract = FAST[provider]
    names = fast_calls(provider)
    for chosen in ((), names):
        with one_implementation(*chosen):
            assert all(getattr(provider, name) is getattr(contract, name) for name in names)
        assert all(getattr(provider, name) is getattr(fast, name) for name in names)
