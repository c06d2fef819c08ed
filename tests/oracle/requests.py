"""Steps on a subnet, as hypothesis strategies of small values; the comparison fills in the state.

A step names hosts, groups and deviations by index. Index 0 is always the plainest, so that a shrunk
sequence is readable; `Kind.NOTHING` stands where the shrinker has taken a step away.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from mcast.backends.sim.core.sa import DEFAULT_PREFIX
from mcast.wire.addresses import ZERO_GID
from mcast.wire.mapping import ipoib_broadcast_mgid
from mcast.wire.mcmember import McMask, McMemberRecord, SaMethod
from mcast.wire.units import RATE

from .topology import HOSTS, SITE_MGID


class Kind(Enum):
    NOTHING = "nothing"
    CREATE = "create"
    JOIN = "join"
    LEAVE = "leave"
    GET = "get"
    TABLE = "table"
    WILD = "wild"
    UNKNOWN_METHOD = "unknown method"
    FILL = "fill the MLIDs"
    CHECK = "check everything"
    DOWN = "port down"
    UP = "port up"
    RESTART = "restart the SM"


WEIGHTS = {
    Kind.NOTHING: 4,
    Kind.CREATE: 100,
    Kind.JOIN: 110,
    Kind.LEAVE: 100,
    Kind.GET: 30,
    Kind.TABLE: 40,
    Kind.WILD: 24,
    Kind.UNKNOWN_METHOD: 4,
    Kind.FILL: 2,
    Kind.CHECK: 2,
    Kind.DOWN: 2,
    Kind.UP: 3,
    Kind.RESTART: 1,
}
METHODS = {
    Kind.CREATE: SaMethod.SET,
    Kind.JOIN: SaMethod.SET,
    Kind.LEAVE: SaMethod.DELETE,
    Kind.GET: SaMethod.GET,
    Kind.TABLE: SaMethod.GET_TABLE,
}
GET_MULTI, GET_TRACE_TABLE = 0x14, 0x13
HELD, LOWEST_HELD, HIGHEST_HELD = 16, 17, 18
"""In place of a JoinState: the bits that the port holds at this point, or the lowest or highest of them."""
LAST_ASSIGNED = b"assigned"
"""In place of an MGID: the one that the SA assigned last."""


def plain_mgid(number: int) -> bytes:
    return bytes.fromhex("ff12 4001 ffff 0000 0000 0000") + number.to_bytes(4)


MGIDS = (
    *(plain_mgid(number) for number in range(1, 9)),
    ZERO_GID,
    LAST_ASSIGNED,
    plain_mgid(0x10000),  # the first that `Kind.FILL` makes
    ipoib_broadcast_mgid(),
    ipoib_broadcast_mgid(0x8001),
    ipoib_broadcast_mgid(0x8002),
    ipoib_broadcast_mgid(scope=5),
    SITE_MGID,
    *(
        bytes.fromhex(text).ljust(16, b"\1")
        for text in (
            *("ff12401bffff", "ff12601bffff", "ff12401b8001", "ff12601b8001"),
            *("ff15401bffff", "ff02401bffff", "fff2401bffff", "ff124001ffff", "ff12600100"),
            *("ff02", "ff22", "ff82", "ff12a01b", "ff15a01b", "ff1ea01b", "ff10", "ff1f", "fe80", "00", "ff"),
        )
    ),
)
TARGETS = ("itself", *HOSTS, "the SM's", "unknown", "zero")
STATES = (1, *(1, 2, 4, 8), *(HELD, HELD, LOWEST_HELD, HIGHEST_HELD), *(9, 9, 9, 5, 12, 3), *range(16))


class Tweak(NamedTuple):
    """A deviation: other values, and mask bits forced to 1 or to 0."""

    values: Mapping[str, Any] = MappingProxyType({})
    on: int = 0
    off: int = 0


def tweaks(field: str, *values: Any) -> list[Tweak]:
    bit = int(McMask[field.upper()])
    return [Tweak({field: value}, *bits) for bits, value in product(((bit, 0), (0, 0), (0, bit)), values)]


def selected(field: str, selector: str, *values: int) -> list[Tweak]:
    value_bit, selector_bit = int(McMask[field.upper()]), int(McMask[selector.upper()])
    both = value_bit | selector_bit
    return [
        Tweak({field: value, selector: how}, on, both & ~on)
        for on, how, value in product((both, both, value_bit, selector_bit), range(4), values)
    ]


TWEAKS: tuple[list[Tweak], ...] = (
    tweaks("pkey", 0xFFFF, 0x7FFF, 0x8001, 0x0001, 0x8002, 0x0002, 0x8003, 0, 0x8000),
    tweaks("qkey", 0x01234567, 0xB1B, 0x1234, 7, 0),
    selected("mtu", "mtu_selector", *range(8), 63),
    selected("rate", "rate_selector", *RATE.value, *tuple(RATE.value)[:6], 0, 1, 25, 26, 63),
    selected("packet_life", "life_selector", 0, 1, 18, 62, 63),
    tweaks("mlid", 0, 0xBFFF, *range(0xC000, 0xC008), 0xC01F, 0xC020, 0xC03F, 0xC040, 0xC400, 0xFFFF),
    tweaks("tclass", 0, 3, 255),
    tweaks("sl", 0, 1, 15),
    tweaks("flow_label", 0, 9, 0xFFFFF),
    tweaks("hop_limit", 0, 1, 64, 255),
    tweaks("scope", *range(16)),
    tweaks("proxy_join", True, False),
    [Tweak(off=1 << at) for at in range(18)],
    [Tweak(on=(1 << 18) - 1), Tweak(on=1 << 40), Tweak(off=int(McMask.CREATE & ~McMask.JOIN))],
    [Tweak({"prefix": prefix}) for prefix in (DEFAULT_PREFIX, bytes(8), b"\xff\x12\x40\x01\xff\xff\0\0")],
    [Tweak({"sm_key": key}) for key in (0, 1, 2)],
)

QUERY_MASKS = (
    *(McMask.MGID,) * 4,
    McMask.MGID | McMask.PORT_GID,
    McMask.MGID | McMask.PORT_GID | McMask.JOIN_STATE,
    McMask.MGID | McMask.JOIN_STATE,
    McMask.PORT_GID,
    McMask.JOIN_STATE,
    McMask(0),
)


class Step(NamedTuple):
    """One thing that happens; `method`, `mask`, `wild` and `whole` are for the kinds that draw them."""

    kind: Kind
    host: str = HOSTS[0]
    target: str = TARGETS[0]
    mgid: bytes = MGIDS[0]
    state: int = 1
    tweaks: tuple[Tweak, ...] = ()
    method: int = 0
    mask: int = 0
    wild: McMemberRecord = McMemberRecord()
    whole: bool = False  # the wild record's own MGID and PortGID, too

    def __str__(self) -> str:
        shown = {
            name: value for name, value in self._asdict().items() if value != self._field_defaults.get(name)
        }
        del shown["kind"]
        return f"{self.kind.value}: " + ", ".join(f"{name}={value!r}" for name, value in shown.items())


_KIND = st.sampled_from([kind for kind, weight in WEIGHTS.items() for _ in range(weight)])
_HOST = st.sampled_from(HOSTS)
_TARGET = st.sampled_from((TARGETS[0],) * 18 + TARGETS)
_MGID = st.sampled_from(MGIDS[:8] * 6 + MGIDS[8:16] * 2 + MGIDS[16:])
_STATE = st.sampled_from(STATES)
_HOW_MANY = st.sampled_from((0, 0, 0, 1, 1, 2, 3))
_FIELD = st.sampled_from([st.sampled_from(choices) for choices in TWEAKS])
_QUERY_MASK = st.sampled_from(QUERY_MASKS)
_UNKNOWN_METHOD = st.sampled_from((GET_MULTI, GET_TRACE_TABLE))
_WILD_METHOD = st.sampled_from(tuple(SaMethod))
_WILD_MASK = st.integers(0, 2**18 - 1)
_WILD_RECORD = st.binary(min_size=52, max_size=52).map(McMemberRecord.unpack)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    kind = draw(_KIND)
    if kind in (Kind.NOTHING, Kind.CHECK, Kind.RESTART):
        return Step(kind)
    host = draw(_HOST)
    if kind in (Kind.DOWN, Kind.UP, Kind.FILL):
        return Step(kind, host)
    step = Step(kind, host, draw(_TARGET), draw(_MGID), draw(_STATE))
    if kind is Kind.WILD:
        mask = draw(_WILD_MASK) | (McMask.JOIN if draw(st.booleans()) else 0)
        return step._replace(
            method=draw(_WILD_METHOD), mask=mask, wild=draw(_WILD_RECORD), whole=draw(st.booleans())
        )
    if kind is Kind.UNKNOWN_METHOD:
        step = step._replace(method=draw(_UNKNOWN_METHOD))
    if kind in (Kind.GET, Kind.TABLE):
        step = step._replace(mask=int(draw(_QUERY_MASK)))
    return step._replace(tweaks=tuple(draw(draw(_FIELD)) for _ in range(draw(_HOW_MANY))))


class Sequence(tuple[Step, ...]):
    """Steps one after the other; in short they are counted, in full one is a line."""

    def __repr__(self) -> str:
        return f"<{sum(step.kind is not Kind.NOTHING for step in self)} steps>"

    def __str__(self) -> str:
        return "\n".join(f"  {step}" for step in self if step.kind is not Kind.NOTHING)


def sequences(length: int) -> st.SearchStrategy[Sequence]:
    """Sequences of exactly `length` steps, some of them nothing."""
    return st.lists(steps(), min_size=length, max_size=length).map(Sequence)
