"""A sender and its receivers in one process, over fabrics that lose, double and delay."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from mcast import McastAddress, open_endpoint
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Delay, Drop, Duplicate, Messages, Reorder
from mcast.cast.drive import DEPTH, ReceivingParty, SendingParty
from mcast.cast.files import Nowhere, Source
from mcast.cast.sender import Fate
from mcast.cast.together import Ends, ends
from mcast.cast.together import run as run_together

GROUP = McastAddress.of("239.1.1.1")
DATA = Random(1).randbytes(200_000)
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return str(path)


def cast(fabric: Fabric, file: str, receivers: int = 3) -> Ends:
    """All ends after a transfer of DATA over the fabric."""
    with (
        open_fabric(fabric) as backend,
        closing(Source(file)) as source,
        ends(backend, GROUP, receivers, source, wait=30.0, silence=10.0) as (sender, takers),
    ):
        run_together(sender, takers, lambda: None)
    return sender, takers


def fates(sender: SendingParty, takers: list[ReceivingParty]) -> list[Fate]:
    return [sender.core.peers[taker.number].fate for taker in takers]


@pytest.mark.parametrize("verdict", [Drop(), Duplicate(2), Reorder(3), Delay(5_000_000)])
@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_every_copy_is_whole(make: Callable[[int], Fabric], verdict: Drop, file: str) -> None:
    fabric = make(4)
    with fabric.rules.when(Messages(rate=0.1), verdict):
        sender, takers = cast(fabric, file)
    assert fates(sender, takers) == [Fate.VERIFIED] * 3
    assert {taker.core.digest for taker in takers} == {SHA256}


def test_a_loss_is_counted_where_it_happened(file: str) -> None:
    fabric = Fabric.roce(4)
    with fabric.rules.when(Messages(target="roce2", nth=100), Drop()):
        sender, takers = cast(fabric, file)
    assert [sender.core.peers[taker.number].repaired for taker in takers] == [0, 1, 0]
    assert sender.core.repeated == 1


def test_the_cost_is_linear_in_the_receivers(file: str) -> None:
    """Counted in messages that a queue pair is given, which no other load on the machine changes."""

    def deliveries(receivers: int) -> int:
        fabric = Fabric.roce(receivers + 1)
        with (
            open_fabric(fabric) as backend,
            closing(Source(file)) as source,
            ends(backend, GROUP, receivers, source, 30.0, 10.0) as (sender, takers),
        ):
            run_together(sender, takers, lambda: None)
            assert fates(sender, takers) == [Fate.VERIFIED] * receivers
            return sum(qp.received for qp in fabric.qps)

    assert deliveries(40) < 4.4 * deliveries(10)


def test_receivers_share_ports_when_there_are_too_few(file: str) -> None:
    sender, takers = cast(Fabric.roce(2), file)
    assert {taker.endpoint.device.name for taker in takers} == {"roce1"}
    assert fates(sender, takers) == [Fate.VERIFIED] * 3


def test_all_share_the_only_port(file: str) -> None:
    sender, takers = cast(Fabric.roce(1), file)
    assert {party.device.name for party in (sender.endpoint, takers[0].endpoint)} == {"roce0"}
    assert fates(sender, takers) == [Fate.VERIFIED] * 3


def test_more_receivers_than_one_address_may_have_are_refused(file: str) -> None:
    with pytest.raises(ValueError, match="17 receivers are too many for the ports here: at most 16"):
        cast(Fabric.roce(2), file, 17)


def test_a_deaf_receiver_is_not_welcome(file: str) -> None:
    fabric = Fabric.roce(4)
    with fabric.rules.when(Messages(target="roce3"), Drop()):
        sender, takers = cast(fabric, file)
    assert sender.core.failure == "2 of 3 receivers joined within 30 s"
    assert [taker.number in sender.core.peers for taker in takers] == [True, True, False]


def test_nobody_else_takes_part(file: str) -> None:
    """Another's receiver gets no file that was not meant for it, and another's sender takes no receiver."""
    with (
        open_fabric(Fabric.roce(6)) as backend,
        open_endpoint(backend, "10.0.0.6", receive_depth=DEPTH) as one,
        open_endpoint(backend, "10.0.0.5", receive_depth=DEPTH) as other,
        closing(Source(file)) as source,
        closing(Source(file)) as another,
        ends(backend, GROUP, 3, source, wait=30.0, silence=10.0) as (sender, takers),
    ):
        hears = ReceivingParty(one, GROUP, Nowhere(), silence=10.0)
        offers = SendingParty(other, GROUP, another, wanted=2)

        def strangers() -> None:
            hears.turn(0.0)
            offers.turn(0.0)

        run_together(sender, takers, strangers)
    assert fates(sender, takers) == [Fate.VERIFIED] * 3
    assert set(sender.core.peers) == {taker.number for taker in takers}
    assert set(offers.core.peers) == {hears.number}
    assert (hears.core.address, hears.core.pieces) == ("10.0.0.5", 0)
