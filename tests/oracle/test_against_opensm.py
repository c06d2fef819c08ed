"""The model agrees with a real OpenSM, request by request, on sequences that hypothesis draws.

pytest tests/oracle                                   20 000 requests, the same ones every time
pytest tests/oracle --oracle-requests 2000000 --oracle-seed 7
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from mcast.backends.sim.core.sa import DEFAULT_PREFIX, Quirks, WellKnownGroup
from mcast.wire.addresses import ZERO_GID
from mcast.wire.mapping import ipoib_broadcast_mgid
from mcast.wire.mcmember import McMask, SaStatus

from . import opensm
from .comparison import Comparison, Difference
from .opensm import OpenSm, OracleError
from .requests import GET_TRACE_TABLE, Kind, Sequence, Step, Tweak, plain_mgid, sequences
from .topology import generate

LENGTH = 60
SEQUENCES = 40
"""Number of sequences that are drawn from one seed."""
PER_SUBNET, SUBNETS = 2500, 40
"""A subnet serves this many requests at least, and a long run is shared among this many subnets."""


@pytest.fixture(scope="module", autouse=True)
def _packages() -> None:
    if line := opensm.missing():
        pytest.fail(f"the oracle needs OpenSM on a simulated fabric: {line}", pytrace=False)


def compare_sequences(comparison: Comparison, number: int, length: int = LENGTH) -> None:
    """Draw sequences from this seed and take each on both sides, from an empty subnet to an empty subnet.

    Raises Difference with the shortest sequence found that shows one.
    """
    parted = False
    broken: OracleError | None = None

    @seed(number)
    @settings(
        max_examples=SEQUENCES,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
    )
    @given(drawn=sequences(length))
    def agree(drawn: Sequence) -> None:
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
            seeds = f"subnet of seed {comparison.topology.seed}, sequences of seed {number}"
            raise Difference(f"{seeds}:\n{Sequence(taken)}\n{error}") from None

    agree()


def test_the_model_agrees_with_opensm(
    pytestconfig: pytest.Config, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    wanted: int = pytestconfig.getoption("--oracle-requests")
    first: int = pytestconfig.getoption("--oracle-seed")
    started = time.monotonic()
    compared = subnets = 0
    number = first
    statuses: Counter[int | None] = Counter()
    while compared < wanted:
        directory = tmp_path / str(subnets)
        directory.mkdir()
        with OpenSm(generate(first + subnets), directory) as real:
            comparison = Comparison(real)
            while comparison.compared < min(max(PER_SUBNET, wanted // SUBNETS), wanted - compared):
                compare_sequences(comparison, number)
                number += 1
            comparison.check()
        compared += comparison.compared
        statuses += comparison.statuses
        subnets += 1
        if wanted > 100_000:
            print(f"\noracle: {compared} requests on {subnets} subnets agree so far", end="", flush=True)
    seconds = time.monotonic() - started
    record_property("oracle", f"{compared} requests, {subnets} subnets, {seconds:.0f} s")
    answers = ", ".join(
        f"{'silence' if status is None else SaStatus(status).name} {count}"
        for status, count in statuses.most_common()
    )
    print(f"\noracle: {compared} requests on {subnets} subnets agree, {seconds:.0f} s: {answers}")
    if wanted >= 20_000:
        assert statuses.keys() == {None, *SaStatus}, "silence and every status are among the answers"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenSm]:
    """A plain subnet on which every quirk can show: with a prefix of its own."""
    plain = replace(generate(0), subnet_prefix=bytes.fromhex("fec0000000000007"))
    hosts = tuple(replace(host, width=3, speed=1, pkeys=(0xFFFF,)) for host in plain.hosts)
    plain = replace(plain, hosts=hosts, ipoib=(WellKnownGroup(),), others=())
    with OpenSm(plain, tmp_path_factory.mktemp("quirks")) as started:
        yield started


@pytest.fixture(scope="module")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenSm]:
    """A subnet where H4 is the only port of a partition that has a group in the file, the second of three."""
    with OpenSm(replace(generate(2048), mlids=32), tmp_path_factory.mktemp("lonely")) as started:
        yield started


def step(kind: Kind, mask: int = 0, **options: Any) -> Step:
    """A step with one tweak: these values, and their mask bits `mask` set."""
    known = {name: options.pop(name) for name in Step._fields if name in options}
    return Step(kind, **known, tweaks=(Tweak(options, on=mask),))


CREATE = Step(Kind.CREATE)
QUIRKS_SHOWN_BY: dict[str, list[Step]] = {
    "drops_send_only_full": [step(Kind.CREATE, state=9), Step(Kind.LEAVE)],
    "reports_lost_bits": [step(Kind.CREATE, state=12), step(Kind.LEAVE, state=8)],
    "takes_unmasked": [step(Kind.CREATE, hop_limit=9)],
    "ignores_packet_life": [CREATE, step(Kind.JOIN, 3 << 10, packet_life=1, life_selector=2)],
    "ignores_scope_and_mlid": [CREATE, step(Kind.JOIN, int(McMask.MLID), mlid=0xC0FE)],
    "compares_lone_selector": [CREATE, step(Kind.JOIN, int(McMask.MTU_SELECTOR), mtu_selector=2)],
    "echoes_proxy_join": [step(Kind.CREATE, proxy_join=True)],
    "queries_creator": [
        CREATE,
        step(Kind.JOIN, host="H2", state=2),
        step(Kind.TABLE, int(McMask.MGID | McMask.JOIN_STATE), state=2, sm_key=0),
    ],
    "ignores_port_prefix": [CREATE, step(Kind.GET, 3, prefix=b"\xfe\x80\0\0\0\0\0\1")],
    "refuses_default_prefix": [step(Kind.CREATE, prefix=DEFAULT_PREFIX)],
    "skips_ipoib_flags": [Step(Kind.CREATE, mgid=bytes.fromhex("fff2401bffff").ljust(16, b"\1"))],
    "counter_over_prefix": [Step(Kind.CREATE, mgid=ZERO_GID)],
    "knows_no_ndr_rates": [step(Kind.GET, 3 << 8, rate=24)],
    "purges_empty_partitions": [Step(Kind.DOWN, host="H4"), CREATE],
    "silent_on_unknown_method": [Step(Kind.UNKNOWN_METHOD, method=GET_TRACE_TABLE)],
}
LONELY_MGID = ipoib_broadcast_mgid(0x8001)
DOWN, UP = Step(Kind.DOWN, host="H4"), Step(Kind.UP)
MADE = step(Kind.CREATE, mgid=LONELY_MGID, pkey=0xFFFF)
UNMADE = Step(Kind.LEAVE, mgid=LONELY_MGID)
COUNTED_FOR_EVER = [
    Step(Kind.JOIN, "H4", mgid=LONELY_MGID, state=9),
    Step(Kind.LEAVE, "H4", mgid=LONELY_MGID),
]


@pytest.mark.parametrize("quirk", [field.name for field in fields(Quirks)])
def test_opensm_has_the_quirk(request: pytest.FixtureRequest, quirk: str) -> None:
    """Steps agree with the quirk and differ without it."""
    real: OpenSm = request.getfixturevalue("lonely" if quirk == "purges_empty_partitions" else "real")
    for quirks in (Quirks.OPENSM_3_3, replace(Quirks.OPENSM_3_3, **{quirk: False})):
        comparison = Comparison(real, quirks)
        comparison.begin_anew()
        *before, last = QUIRKS_SHOWN_BY[quirk]
        for each in before:
            comparison.take(each)
        if getattr(quirks, quirk):
            comparison.take(last)
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(real, "answer_seconds", 2)  # in one of the cases no answer comes
                with pytest.raises(Difference):
                    comparison.take(last)


SWEPT: dict[str, tuple[list[Step], tuple[int, bool] | None]] = {
    "unused": ([DOWN, CREATE], None),
    "back": ([DOWN, CREATE, UP], (0xC003, True)),
    "counted": ([*COUNTED_FOR_EVER, DOWN, CREATE], (0xC001, False)),
    "counted and back": ([*COUNTED_FOR_EVER, DOWN, CREATE, UP], (0xC001, True)),
    "made by a port": ([DOWN, CREATE, MADE, UP, UNMADE], (0xC003, True)),
    "made by a port, and kept": ([DOWN, MADE, UP, DOWN, CREATE], (0xC001, False)),
    "made by a port, without a full member": (
        [DOWN, MADE, UP, UNMADE, step(Kind.JOIN, mgid=LONELY_MGID, state=2), DOWN, CREATE],
        None,
    ),
    "restarted": ([DOWN, Step(Kind.RESTART), CREATE], None),
    "waiting for an MLID": (
        [DOWN, Step(Kind.FILL), UP, Step(Kind.LEAVE, mgid=plain_mgid(0x10000)), Step(Kind.DOWN, host="H5")],
        (0xC001, True),
    ),
}
"""Incident -> the MLID of the group of the partition file, and whether it is still the file's."""


@pytest.mark.parametrize("case", SWEPT)
def test_opensm_reads_the_partition_file_in_every_sweep(lonely: OpenSm, case: str) -> None:
    steps, expected = SWEPT[case]
    comparison = Comparison(lonely)
    comparison.begin_anew()
    for each in steps:
        comparison.take(each)
    group = comparison.model.group(LONELY_MGID)
    assert (group and (group.mlid, group.well_known)) == expected
    comparison.check()


@pytest.mark.parametrize("steps", [COUNTED_FOR_EVER, [DOWN, MADE]], ids=["counted", "made by a port"])
def test_a_sequence_ends_with_the_empty_subnet(lonely: OpenSm, steps: list[Step]) -> None:
    """Whatever differs is then found again from the seed alone."""
    comparison = Comparison(lonely)
    comparison.begin_anew()
    empty = comparison.groups()
    for each in steps:
        comparison.take(each)
    comparison.clear()
    assert comparison.groups() == empty
    comparison.check()


def test_difference_is_shrunk(real: OpenSm) -> None:
    """A difference is shrunk to the steps that show it."""
    comparison = Comparison(real, replace(Quirks.OPENSM_3_3, echoes_proxy_join=False))
    comparison.begin_anew()
    with pytest.raises(Difference) as found:  # noqa: PT012
        for number in range(20):
            compare_sequences(comparison, number, length=15)
    heading, *steps = str(found.value).split("\nrequest ")[0].splitlines()
    assert re.fullmatch(r"subnet of seed 0, sequences of seed \d+:", heading)
    assert len(steps) == 1, "a single request as a proxy, or with the bit set, shows it"
    assert re.match(r"  (create: target=|.*'proxy_join': True)", steps[0])
