"""Costs of a transfer, which do not grow with the number of receivers: `mcast sim cast`."""

from __future__ import annotations

import json
from random import Random
from typing import cast

import pytest

from mcast.cast.protocol.receiver import ObjectReceiver
from mcast.cast.protocol.repairs import SegmentRange
from mcast.cast.protocol.strategy import Strategy, quorum
from mcast.testing import transfer
from mcast.testing.transfer import SimulatedTransfer, TransferSetup

from ..commands import Run as Command


@pytest.mark.parametrize(("loss", "transmissions", "requests"), [(0.001, 1.05, 0.05), (0.01, 1.15, 0.2)])
def test_costs_do_not_grow_with_the_receivers(loss: float, transmissions: float, requests: float) -> None:
    """Neither transmissions nor NACKs per segment do."""
    costs = SimulatedTransfer(TransferSetup(300, loss, 4_000_000)).run()
    assert (costs.verified, costs.left_behind, costs.strategy_met) == (300, 0, True)
    assert costs.transmissions_per_segment <= transmissions
    assert costs.nacks / costs.segments <= requests
    assert costs.acks <= 310, "one for each receiver, but for those that got lost"


@pytest.mark.long
@pytest.mark.parametrize(("loss", "transmissions", "feedback"), [(0.001, 1.05, 0.1), (0.01, 1.15, 0.3)])
def test_a_thousand_receivers_of_64_megabytes(loss: float, transmissions: float, feedback: float) -> None:
    costs = SimulatedTransfer(TransferSetup(1000, loss, 64_000_000)).run()
    assert costs.verified == 1000
    assert costs.transmissions_per_segment <= transmissions
    assert costs.feedback_per_segment <= feedback


def test_losses_that_slow_the_sender_down_end() -> None:
    assert SimulatedTransfer(TransferSetup(20, 0.2, 2_000_000)).run().verified == 20


@pytest.mark.parametrize("size", [0, 1])
def test_a_lossless_fabric_costs_no_request(size: int) -> None:
    costs = SimulatedTransfer(TransferSetup(5, 0.0, size * 1_000_000)).run()
    assert (costs.verified, costs.nacks, costs.acks) == (5, 0, 5)


def test_only_lost_segments_are_missing() -> None:
    taken: list[tuple[int, int, int]] = []

    class End:
        def on_data(self, _object: int, block: int, segments: int, messages: int, _now: float) -> int:
            taken.append((block, segments, messages))
            return 0

    made = SimulatedTransfer(TransferSetup(1, 0.0, 0))
    made._receive(cast(ObjectReceiver, End()), SegmentRange(3, 10, 9), [1, 2, 6], 0.0)
    made._receive(cast(ObjectReceiver, End()), SegmentRange(3, 10, 1), [0], 0.0)
    assert taken == [(3, 0b110111001 << 10, 6)]


def test_a_transfer_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_MAX_SECONDS", 3.0)  # before a silent receiver is given up
    with pytest.raises(RuntimeError, match=r"^not all receivers could join$"):
        SimulatedTransfer(TransferSetup(1, 1.0, 9)).run()
    cut = SimulatedTransfer(TransferSetup(1, 0.0, 9))
    gather = cut._gather

    def gathers() -> float:
        now = gather()
        cut._losses = [transfer._Losses(Random(1), 1.0) for _ in cut._losses]
        return now

    monkeypatch.setattr(cut, "_gather", gathers)
    with pytest.raises(RuntimeError, match=r"^the transfer has not ended in 3 s of virtual time$"):
        cut.run()


def test_without_parity_segments_are_repeated() -> None:
    costs = SimulatedTransfer(TransferSetup(20, 0.01, 1_000_000, parity=False)).run()
    assert (costs.verified, costs.parity) == (20, False)


@pytest.mark.parametrize("strategy", [quorum(3), Strategy(seconds=0.0005)])
def test_a_strategy_leaves_receivers_behind(strategy: Strategy) -> None:
    costs = SimulatedTransfer(TransferSetup(10, 0.3, 1_000_000, strategy)).run()
    assert costs.strategy_met
    assert costs.left_behind > 0


def test_the_command_prints_the_costs(here: Command) -> None:
    done = here(
        "sim", "cast", "--receivers", "9", "--loss", "0.01", "--size", "256K", "--seed", "4", "--json"
    )
    costs = json.loads(done.stdout)
    assert (costs["receivers"], costs["verified"], costs["segments"]) == (9, 9, 65)
    assert costs.keys() >= {
        "transmissions_per_segment",
        "feedback_per_segment",
        "sender_cpu_us_per_segment",
        "seconds",
    }
    text = here(
        "sim", "cast", "--receivers", "2", "--size", "9", "--strategy", "quorum:1", "--no-parity"
    ).stdout
    assert "repeating segments" in text
    assert f"{'strategy met':26}{'yes':>12}\n" in text


@pytest.mark.parametrize(
    ("arguments", "says", "status"),
    [
        (("--strategy", "some"), "'some' is not a strategy: use all, quorum:K", 2),
        (("--strategy", "quorum:0"), "a quorum of 0 receivers: at least 1", 2),
        (("--receivers", "2", "--size", "9", "--strategy", "quorum:3"), "", 1),
    ],
)
def test_a_broken_promise_has_an_exit_status(
    here: Command, arguments: tuple[str, ...], says: str, status: int
) -> None:
    done = here("sim", "cast", *arguments)
    assert done.returncode == status
    assert says in done.stderr
