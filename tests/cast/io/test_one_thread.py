"""A sender and its receivers in one thread, over fabrics that lose, double and delay."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from blake3 import blake3

from mcast import McastAddress, TimedOut, cast, open_endpoint
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Delay, Drop, Duplicate, Messages, Reorder
from mcast.cast.io.driver import DEFAULT_MEMORY, exclusive
from mcast.cast.io.one_thread import End, ReceivingEnd, SendingEnd, ends, run
from mcast.cast.io.sending import SendingSession
from mcast.cast.protocol.strategy import all_receivers

GROUP = McastAddress.of("239.1.1.1")
DATA = Random(1).randbytes(200_000)

Ends = tuple[SendingEnd, list[ReceivingEnd]]


def carried_out(fabric: Fabric, count: int = 3) -> Ends:
    """All ends after a transfer of DATA over the fabric."""
    with (
        open_fabric(fabric) as backend,
        ends(backend, GROUP, count, DATA, wait=30.0, peer_timeout=10.0) as (sender, receivers),
    ):
        run(sender, receivers, lambda: None)
    return sender, receivers


def all_have_it(sender: SendingEnd, receivers: list[ReceivingEnd]) -> bool:
    digests = {receiver.received.digest for receiver in receivers if receiver.received is not None}
    accounts = [sender.report_of(receiver) for receiver in receivers]
    return digests == {blake3(DATA).digest()} and all(one is not None and one.complete for one in accounts)


@pytest.mark.parametrize("verdict", [Drop(), Duplicate(2), Reorder(3), Delay(5_000_000)])
@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_every_copy_is_whole(make: Callable[[int], Fabric], verdict: Drop) -> None:
    fabric = make(4)
    with fabric.rules.when(Messages(rate=0.1), verdict):
        assert all_have_it(*carried_out(fabric))


def test_nothing_is_sent_twice_without_loss() -> None:
    sender, receivers = carried_out(Fabric.infiniband(4))
    assert all_have_it(sender, receivers)
    assert sender.result is not None
    assert sender.result.repairs == 0


def test_a_loss_is_counted_where_it_happened() -> None:
    fabric = Fabric.roce(4)
    with fabric.rules.when(Messages(target="roce2", nth=100), Drop()):
        sender, receivers = carried_out(fabric)
    accounts = [sender.report_of(receiver) for receiver in receivers]
    assert [one.requested for one in accounts if one is not None] == [0, 1, 0]
    assert sender.result is not None
    assert sender.result.repairs == 1


@pytest.mark.parametrize("ports", [1, 2])
def test_receivers_share_ports_when_there_are_too_few(ports: int) -> None:
    sender, receivers = carried_out(Fabric.roce(ports))
    assert {receiver.group.endpoint.device.name for receiver in receivers} == {f"roce{ports - 1}"}
    assert all_have_it(sender, receivers)


def test_too_many_receivers_are_refused() -> None:
    """One address may have a limited number of receivers."""
    with pytest.raises(ValueError, match="65 receivers are too many for the ports here: at most 64"):
        carried_out(Fabric.roce(2), 65)


def test_a_deaf_receiver_takes_no_part() -> None:
    fabric = Fabric.roce(4)
    with (
        fabric.rules.when(Messages(target="roce3"), Drop()),
        open_fabric(fabric) as backend,
        ends(backend, GROUP, 3, DATA, wait=30.0, peer_timeout=10.0) as (sender, receivers),
    ):
        with pytest.raises(TimedOut, match="2 of 3 receivers are in the session after 30 s"):
            run(sender, receivers, lambda: None)
        assert [sender.has_member(receiver) for receiver in receivers] == [True, True, False]


def test_nobody_else_takes_part() -> None:
    """Another's receiver gets nothing that was not meant for it, and another's sender takes no receiver."""
    with (
        open_fabric(Fabric.roce(6)) as backend,
        open_endpoint(backend, "10.0.0.6") as one,
        open_endpoint(backend, "10.0.0.5") as other,
        one.join(GROUP) as hears,
        other.join(GROUP) as offers,
        exclusive(hears, "a test") as stranger,
        exclusive(offers, "a test") as liar,
        ends(backend, GROUP, 3, DATA, wait=30.0, peer_timeout=10.0) as (sender, receivers),
    ):
        taking = ReceivingEnd(hears, stranger, 10.0)
        casting = SendingSession(liar, DEFAULT_MEMORY, 1e6, 10.0, None)
        strangers: list[End[None] | End[cast.ObjectReport]] = [
            taking,
            End(offers, liar, casting.send(b"lie", all_receivers(), "lie", b"")),
        ]
        everybody = {end.peer for end in (sender, *receivers, *strangers)}

        def watch() -> None:
            for end in strangers:
                if not end.finished:
                    end.step(everybody)

        run(sender, receivers, watch)
        assert all_have_it(sender, receivers)
        assert not any(sender.has_member(end) for end in strangers if isinstance(end, ReceivingEnd))
        assert not {member.number for member in casting.receivers} & {
            receiver.context.number for receiver in receivers
        }
