"""Ctrl-C at every line of what sends and receives objects: the membership is free again, no file is left."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcast import Endpoint, Membership, cast, open_endpoint
from mcast.backends.sim import ROCE

from ..cast.objects.alone import Alone
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
    members: tuple[Membership, Membership], call: Callable[[Membership], None], long: bool
) -> None:
    group, _ = members

    def check(returned: bool) -> None:
        gc.collect()
        assert cast.send(group, b"again", receivers=0).size == 5

    assert interrupted_everywhere(lambda: call(group), check, every=1 if long else 83) > 100
    if call is receives:  # whose lines between two turns take Ctrl-C
        assert interrupted_everywhere(lambda: call(group), check, "cast/objects/turns.py", every=1) > 30
        assert interrupted_everywhere(lambda: call(group), check, "cast/objects/receiving.py", every=5) > 30


def test_a_receive_that_is_cut_off_leaves_no_file(tmp_path: Path) -> None:
    alone = Alone(tmp_path / "file", 5000)
    assert len(list(tmp_path.iterdir())) == 1
    del alone
    gc.collect()
    assert list(tmp_path.iterdir()) == []
