"""Batches that are dropped: their receives come back, without Python code in a finalizer."""

from __future__ import annotations

import gc
import sys

import pytest

from mcast.api import Batch, QpInit, QueuePair
from mcast.backends.sim import Fabric, open_fabric

GROUP = "239.1.1.1"


def received(count: int, slot: int | None = None) -> tuple[QueuePair, Batch]:
    """A queue pair of four receives, and a batch of messages that it sent itself."""
    channel = open_fabric(Fabric.roce()).event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr("10.0.0.1")
    qp = cm_id.create_qp(QpInit(max_recv_wr=4))
    if slot is not None:
        qp.register(bytearray(4 * slot), recv_slot=slot)
    cm_id.join_multicast(GROUP)
    event = channel.get_event(1)
    assert event is not None
    assert event.ud is not None
    qp.send(event.ud.destination, [b"%d" % number for number in range(count)])
    return qp, qp.recv(4, 0)


@pytest.mark.parametrize("slot", [None, 64])
def test_dropped_batch_waits_for_its_payload(slot: int | None) -> None:
    """While another object uses a payload the receives stay leased; then they come back."""
    qp, batch = received(2, slot)
    used = memoryview(batch[0].payload)
    del batch
    gc.collect()
    assert qp.counters.recv_free == 2
    assert bytes(used) == b"0"
    del used
    assert qp.counters.recv_free == 4


def test_batch_is_leased_once() -> None:
    """Released, and then dropped, it gives its receives back once."""
    qp, batch = received(3)
    batch.release()
    batch.release()
    del batch
    gc.collect()
    assert qp.counters.recv_free == 4


def test_block_keeps_the_exception() -> None:
    """A payload that the traceback uses is no reason to replace the exception by BufferError."""
    qp, batch = received(1)
    used = memoryview(batch[0].payload)
    with pytest.raises(KeyboardInterrupt), batch:
        raise KeyboardInterrupt
    assert not batch.released
    del used
    batch.release()
    assert qp.counters.recv_free == 4


def test_cleanup_runs_no_python() -> None:
    """An exception of a signal in a finalizer would be dropped."""
    qp, batch = received(1)
    called: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del batch
    finally:
        sys.setprofile(before)
    assert called == []
    assert qp.counters.recv_free == 4
