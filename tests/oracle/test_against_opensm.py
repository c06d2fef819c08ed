"""The model agrees with a real OpenSM, request by request, on sequences that hypothesis draws.

pytest tests/oracle                                   20 000 requests, always the same ones
pytest tests/oracle --oracle-requests 2000000 --oracle-seed 7
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from mcast.backends.sim.sa import SaStatus

from . import opensm
from .comparison import Comparison, Difference
from .opensm import OpenSm, OracleError
from .requests import Kind, Step, sequences
from .topology import generate

LENGTH = 60
SEQUENCES = 40  # of one seed
PER_SUBNET = 2500
SUBNETS = 40


@pytest.fixture(autouse=True)
def _tools() -> None:
    if line := opensm.missing():
        pytest.fail(f"the oracle needs OpenSM and ibsim: {line}", pytrace=False)


def compare_sequences(comparison: Comparison, number: int, sequences_wanted: int) -> None:
    """Draw sequences from this seed and take each on both sides, from an empty subnet to an empty subnet."""
    parted = False
    broken: OracleError | None = None

    @seed(number)
    @settings(
        max_examples=sequences_wanted,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        verbosity=Verbosity.quiet,
    )
    @given(drawn=sequences(LENGTH))
    def agree(drawn: list[Step]) -> None:
        nonlocal parted, broken
        if broken:
            raise broken
        if parted:
            comparison.begin_anew()
            parted = False
        taken: list[Step] = []
        try:
            for step in drawn:
                taken.append(step)
                comparison.take(step)
            comparison.clear()
        except OracleError as error:
            broken = error
            raise
        except Difference as error:
            parted = True
            lines = "\n".join(f"  {step}" for step in taken if step.kind is not Kind.NOTHING)
            subnet = comparison.topology.seed
            raise Difference(
                f"on the subnet of seed {subnet}, sequences of seed {number}:\n{lines}\n\n{error}"
            ) from None

    agree()


def test_the_model_agrees_with_opensm(
    pytestconfig: pytest.Config, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    wanted: int = pytestconfig.getoption("--oracle-requests")
    first: int = pytestconfig.getoption("--oracle-seed")
    started = time.monotonic()
    compared, subnets = 0, 0
    statuses: Counter[int | None] = Counter()
    number = first
    while compared < wanted:
        directory = tmp_path / str(subnets)
        directory.mkdir()
        with OpenSm(generate(first + subnets), directory) as real:
            comparison = Comparison(real)
            while comparison.compared < min(max(PER_SUBNET, wanted // SUBNETS), wanted - compared):
                compare_sequences(comparison, number, SEQUENCES)
                number += 1
            comparison.check()
        compared += comparison.compared
        statuses.update(comparison.statuses)
        subnets += 1
    seconds = time.monotonic() - started
    record_property("oracle", {"requests": compared, "subnets": subnets, "seconds": round(seconds, 1)})
    print(f"\noracle: {compared} requests on {subnets} subnets agree, {seconds:.0f} s, {dict(statuses)}")
    assert statuses.keys() >= {None, *SaStatus}, "not every status, and silence, has been seen"
