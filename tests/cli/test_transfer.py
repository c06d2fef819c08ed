"""The file demo's parts: reassembly under loss, doubling and disorder; a transfer over a lossy fabric."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcast import McastAddress
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Delay, Drop, Duplicate, Messages, Reorder
from mcast.cli.filecast import HEADER, Reassembly, count_pieces, read_pieces
from mcast.cli.terminal import Failure
from mcast.cli.transfer import Receiver, Transfer

from ..commands import Run


def messages_of(data: bytes, piece: int, window: int) -> list[bytes]:
    return [message for window_ in read_pieces(io.BytesIO(data), piece, window) for message in window_]


@given(st.binary(max_size=400), st.integers(1, 50), st.integers(1, 9))
def test_pieces_make_the_file(data: bytes, piece: int, window: int) -> None:
    messages = messages_of(data, piece, window)
    file = Reassembly(len(data), piece, window)
    assert [file.add(memoryview(message)) for message in messages] == list(range(len(messages)))
    assert len(messages) == count_pieces(len(data), piece)
    assert (file.lost, file.bytes) == (0, len(data))
    assert file.digest == hashlib.sha256(data).hexdigest()


@given(st.data())
def test_disorder_and_doubles_do_no_harm_and_loss_is_counted(draw: st.DataObject) -> None:
    data = draw.draw(st.binary(min_size=1, max_size=200))
    messages = messages_of(data, 7, 4)
    numbers = draw.draw(st.lists(st.sampled_from(range(len(messages))), max_size=60))
    file = Reassembly(len(data), 7, len(messages))
    for number in numbers:
        file.add(memoryview(messages[number]))
    came = set(numbers)
    assert file.lost == len(messages) - len(came)
    assert file.bytes == sum(len(messages[number]) - HEADER.size for number in came)
    assert file.digest == (None if file.lost else hashlib.sha256(data).hexdigest())


def test_early_pieces_are_held_in_a_window_only() -> None:
    messages = messages_of(bytes(100), 10, 10)
    file = Reassembly(100, 10, window=3)
    for message in [*messages[1:], messages[0]]:
        file.add(memoryview(message))
    assert file.lost == 0
    assert file.digest is None


@pytest.mark.parametrize(
    "message",
    [b"", b"short", HEADER.pack(5) + bytes(10), HEADER.pack(100) + bytes(10), HEADER.pack(10) + bytes(9)],
    ids=["empty", "no header", "between pieces", "past the end", "wrong length"],
)
def test_what_is_no_piece_is_refused(message: bytes) -> None:
    file = Reassembly(100, 10, 4)
    assert file.add(memoryview(message)) is None
    assert file.lost == 10


DATA = Random(1).randbytes(200_000)


def cast(fabric: Fabric) -> list[Receiver]:
    """Three receivers after the transfer of DATA over the fabric."""
    with open_fabric(fabric) as backend, backend.event_channel() as channel:
        transfer = Transfer(backend, channel, McastAddress.of("239.1.1.1"), 3, io.BytesIO(DATA))
        assert list(transfer.run())[-1] == transfer.messages
    return transfer.receivers


@pytest.mark.parametrize("verdict", [Duplicate(2), Reorder(3), Delay(5_000_000)])
def test_disorder_on_the_way_is_mended(verdict: Duplicate | Reorder | Delay) -> None:
    fabric = Fabric.roce(4)
    with fabric.rules.when(Messages(rate=0.1), verdict):
        receivers = cast(fabric)
    assert [receiver.file.lost for receiver in receivers] == [0, 0, 0]
    assert {receiver.file.digest for receiver in receivers} == {hashlib.sha256(DATA).hexdigest()}


@pytest.mark.parametrize("nth", [20, 197], ids=["in the middle", "the last of all"])
def test_a_loss_is_counted_where_it_happened(nth: int) -> None:
    # The first message of all is the empty one that finds out who hears; DATA is 197 messages.
    fabric = Fabric.roce(4)
    with fabric.rules.when(Messages(target="roce2", nth=nth + 1), Drop()):
        receivers = cast(fabric)
    assert [receiver.file.lost for receiver in receivers] == [0, 1, 0]
    assert receivers[1].file.digest is None


def test_receivers_share_ports_when_there_are_too_few() -> None:
    receivers = cast(Fabric.roce(2))
    assert {receiver.place.device.name for receiver in receivers} == {"roce1"}
    assert all(receiver.file.digest for receiver in receivers)


def test_a_deaf_receiver_is_named() -> None:
    fabric = Fabric.roce(4)
    with (
        fabric.rules.when(Messages(target="roce3"), Drop()),
        pytest.raises(Failure, match=r"roce3 \(10\.0\.0\.4\)"),
    ):
        cast(fabric)


LOSSY = """
from mcast.backends.sim import Fabric, ROCE, open_fabric
from mcast.backends.sim.faults import Drop, Messages

def open_lossy():
    fabric = Fabric.roce(4)
    fabric.loss = fabric.rules.when(Messages(target="roce2", nth=[5, 6]), Drop())
    fabric.loss.__enter__()
    return open_fabric(fabric)

PROVIDER = ROCE._replace(open=open_lossy)
"""


def test_a_copy_that_is_not_verified_is_status_1(
    mcast: Run, third_party: Callable[..., dict[str, str]]
) -> None:
    done = mcast("demo", "--backend", "acme", "--size", "100K", env=third_party(source=LOSSY))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "demo: 2/3 receivers verified, 101 messages each, 2 lost"
    assert "differs" in done.stdout
