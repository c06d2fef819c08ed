"""A receiver that was killed goes on with what is on its disk, and only with what is right there."""

from __future__ import annotations

from random import Random

import pytest

from mcast.cast.protocol.packets import (
    MAX_BLOCKS,
    STORED,
    UNKNOWN_SIZE,
    Ack,
    BlockInfo,
    Flush,
    Join,
    Seal,
    decode,
)
from mcast.cast.protocol.sender import ObjectSender
from mcast.cast.protocol.strategy import all_receivers

from .network import Case, Conditions, Network, described, number

BLOCK = 976 * 4
DATA = Random(5).randbytes(BLOCK * 40 + 100)
OTHER = Random(6).randbytes(len(DATA))
KEY = bytes(range(32))


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "closed"])
@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_blocks_stored_by_all_are_skipped(loss: float, key: bytes | None) -> None:
    disks = {1: DATA[: BLOCK * 30], 2: DATA}
    case = Case((DATA,), 2, window=6, disks=disks, key=key)
    network = Network(case, Conditions(loss=loss), seed=3)
    network.run()
    assert [receiver.got for receiver in network.receivers.values()] == [{0: DATA}] * 2
    block = network._abouts[0].segment * 4
    held = [len(disk) // block for disk in disks.values()]
    assert [receiver.compared for receiver in network.receivers.values()] == held
    (result,) = network.sender.results
    assert result.strategy_met
    assert result.segments == -(-len(DATA) // network._abouts[0].segment)
    # One window may have left before the sender has heard what the disks have.
    assert loss or result.skipped >= (held[0] - 6) * 4


LEFT = {
    "another object": OTHER,
    "another byte in the middle": DATA[: BLOCK * 9] + b"?" + DATA[BLOCK * 9 + 1 :],
    "a hole at the beginning": bytes(BLOCK) + DATA[BLOCK:],
    "more than the object": DATA + b"more" * BLOCK,
    "less than a block": DATA[: BLOCK - 1],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("left", LEFT)
def test_wrong_stored_blocks_are_received_anew(left: str, stream: bool) -> None:
    network = Network(
        Case((DATA,), 2, window=6, disks={1: LEFT[left]}, stream=stream), Conditions(loss=0.02), seed=4
    )
    network.run()
    assert [receiver.got for receiver in network.receivers.values()] == [{0: DATA}] * 2
    assert network.sender.results[0].strategy_met


@pytest.mark.parametrize(("seed", "killed"), [(0, 0.05), (6, 0.055), (4, 0.07)])
def test_a_restarted_receiver_joins_late(seed: int, killed: float) -> None:
    """The sender has only a window of blocks; earlier ones are stored, and their SEALs are sent again."""
    network = Network(
        Case((DATA * 4,), 2, window=6), Conditions(loss=0.05, kills={1: (killed, 0.004)}), seed=seed
    )
    network.run()
    receiver = network.receivers[1]
    assert receiver.compared >= 10
    assert receiver.got == {0: DATA * 4}


def test_more_stored_blocks_than_the_maximum() -> None:
    one = described(UNKNOWN_SIZE)
    one.resume(1 << 40, 0.0)
    packets = [decode(message) for message in one.messages(1.0)]
    assert [(ack.state, ack.base) for ack in packets if isinstance(ack, Ack)] == [(STORED, MAX_BLOCKS)]


def test_end_leaves_a_block_in_verification() -> None:
    """The stored prefix ends before a block that the driver verifies."""
    one = described(UNKNOWN_SIZE)
    one.resume(9, 0.0)
    one.on_packet(Seal(number(0), 0, 1, 0, 0, 1, 1000, (BlockInfo(1, 1, bytes(32)),) * 2), 0.0)
    one.on_packet(Flush(number(0), 0, 2, 2, 0, 0, 1, 1000, 1, bytes(32), 0, 0), 0.0)
    for block in range(2):
        assert [ready.block for ready in one.take_ready()] == [block]
        one.checked(block, True, 0.0)
    assert [ended.complete for ended in one.ended] == [True]


def test_skipped_blocks_cost_only_their_seals() -> None:
    session, now, blocks = number(0), 1.0, 1000
    sender = ObjectSender(session, "sender", 1024, now)
    sender.on_packet(Join(session, number(1), 4096, 1024, 1, 0, 0, 0, "r"), "b", now)
    sender.begin(now, all_receivers(), size=blocks, k=1)
    sender.on_packet(Ack(session, 0, number(1), blocks, 0, 0, STORED, ""), "b", now)
    while sender.outgoing is not None and not sender.outgoing.all_sent:
        while sender.blocks_wanted and sender.outgoing.offered < blocks:
            sender.offer(BlockInfo(1, 1, bytes(32)))
        if sender.outgoing.offered == blocks:
            sender.end(bytes(32))
        sender.messages(now)
        now = max(now, sender.due)
    assert sender.outgoing is not None
    assert sender.outgoing.skipped == blocks
    assert now == 1.0
