"""Ctrl-C at every line of what sends and receives objects: the membership is free again, no file is left."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcast import Endpoint, Membership, cast, open_endpoint
from mcast.api import Message
from mcast.backends.sim import ROCE
from mcast.cast.nack.header import number_at
from mcast.cast.nack.messages import Admit, Describe, Offer, Spoken, packed
from mcast.cast.objects.receiving import ObjectsIn
from mcast.cast.objects.turns import Seat
from mcast.wire.addresses import Gid

from .. import interleave
from ..interleave import interrupted_everywhere, nothing_left

GROUP = "239.1.2.3"


@pytest.fixture
def members() -> Iterator[tuple[Membership, Membership]]:
    """Of two hosts, on the clock of the fabric, which is virtual."""
    gc.collect()
    with ROCE.testbed() as made, nothing_left():
        ends: list[Endpoint] = [open_endpoint(made.backend, port) for port in made.ports[:2]]
        yield ends[0].join(GROUP), ends[1].join(GROUP)
        for end in ends:
            end.close()
        made.backend.close()
        assert made.observer.leftovers() == ()


def sends(group: Membership) -> None:
    cast.send(group, b"to nobody", receivers=0)


def opens(group: Membership) -> None:
    with cast.open_session(group) as session:
        session.gather(0)


def receives(group: Membership) -> None:
    assert list(cast.receive(group, timeout=0.001)) == []


@pytest.mark.parametrize("call", [sends, opens, receives])
def test_a_call_that_ctrl_c_ends_frees_its_membership(
    members: tuple[Membership, Membership],
    call: Callable[[Membership], None],
    monkeypatch: pytest.MonkeyPatch,
    long: bool,
) -> None:
    if not long:  # a call has thousands of lines
        monkeypatch.setattr(interleave, "EVERY", 41)
    group, _ = members

    def check(returned: bool) -> None:
        gc.collect()
        assert cast.send(group, b"again", receivers=0).size == 5

    assert interrupted_everywhere(lambda: call(group), check) > 100


def half_way(path: Path) -> ObjectsIn:
    """A receiver that has made its file."""
    seat = Seat(number_at("10.0.0.9", 1), "me", 1024, lambda: 1.0)
    receiving = ObjectsIn(seat, path, None, 1000, 1000, 10.0, None, None)
    session = number_at("10.0.0.3", 1)
    turns = receiving.next(None)
    next(turns)

    def hears(spoken: Spoken) -> None:
        source = Gid("::ffff:10.0.0.3")
        turns.send([Message(memoryview(packed(spoken)), source, 7, Gid("ff0e::1"), None, False)])

    hears(Offer(session, 0, 1, 1, 1000, 0, "sender"))
    hears(Admit(session, {seat.number: (0, receiving.sessions[session].core.who.nonce)}))
    hears(Describe(session, 0, 5000, 976, 4, 0, "thing", b""))
    return receiving


def test_a_receive_that_is_cut_off_leaves_no_file(tmp_path: Path) -> None:
    receiving = half_way(tmp_path / "file")
    assert len(list(tmp_path.iterdir())) == 1
    del receiving
    gc.collect()
    assert list(tmp_path.iterdir()) == []
