"""The options of a fabric: their defaults, and what is allowed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from mcast.api import LinkLayer
from mcast.backends.model.port import Limits
from mcast.backends.sim.core.sa import Quirks
from mcast.wire.mcmember import MLID_FIRST, MLID_LAST
from mcast.wire.partition import DEFAULT_PKEY, PARTITION
from mcast.wire.units import MTU, RATE

PKEYS = range(1 << 16)


@dataclass(frozen=True)
class Options:
    """The options of every fabric. A wrong option raises ValueError.

    ports       how many ports; each is a device of its own
    hosts       how many hosts share the ports, in turn; by default every port has a host of its own
    switches    1, or a root (0) and leaves (1, 2, …), to which the ports are connected in turn
    mtu         in bytes: of every port, or a list with one for each port. A port drops messages that are
                larger than its MTU, and counts them (`oversized`)
    rate        of every port, in Gbit/s
    seed        the seed of all random numbers
    clock       "virtual" (from 0, moves while a call waits) or "wall" (real time, for threads and asyncio)
    trace       True: record everything that happens in `trace`
    limits      what each device can hold
    block_loopback  what devices do with QpInit.block_loopback: "honoured", "refused", "ignored"
    """

    link_layer: ClassVar[LinkLayer]

    ports: int = 4
    _: KW_ONLY
    hosts: int | None = None
    switches: int = 1
    mtu: int | Sequence[int] = 1024
    rate: float = 10
    seed: int = 0
    clock: str = "virtual"
    trace: bool = False
    limits: Limits | None = None
    block_loopback: str = "refused"

    def __post_init__(self) -> None:
        check("ports", self.ports, range(1, 65_000 + 1))
        check("switches", self.switches, range(1, 4_096))
        check("hosts", self.ports if self.hosts is None else self.hosts, range(1, self.ports + 1))
        given = self.mtu
        for mtu in given if isinstance(given, list | tuple) and given else (given,):
            check("mtu", mtu, MTU.code)
        if len(self.mtus) != self.ports:
            raise ValueError(
                f"mtu has {len(self.mtus)} numbers for {self.ports} ports: give one for each port, or one "
                "number for all"
            )
        if not isinstance(given, int):
            object.__setattr__(self, "mtu", self.mtus)  # which no caller changes any more
        check("seed", self.seed, range(-1 << 64, 1 << 64))
        check("rate", self.rate, RATE.code)
        check("block_loopback", self.block_loopback, ("honoured", "refused", "ignored"))

    @property
    def mtus(self) -> tuple[int, ...]:
        """Return the MTU of each port, in bytes."""
        return (self.mtu,) * self.ports if isinstance(self.mtu, int) else tuple(self.mtu)


@dataclass(frozen=True)
class RoceOptions(Options):
    """A RoCEv2 fabric: switches with IGMP snooping, and a querier."""

    link_layer = LinkLayer.ETHERNET


@dataclass(frozen=True, kw_only=True)
class InfinibandOptions(Options):
    """An InfiniBand fabric with its SA.

    Above 49 151 ports there are more than a subnet has unicast LIDs; nothing depends on them.

    partitions  P_Key -> the indices of the ports that have it (0x8001 full, 0x0001 limited); each P_Key gives
                its ports an IPoIB interface `10.<n>.<port>` beside the default partition's `10.0.<port>`
    ipoib       False: the IPoIB interfaces are down, so that no join finds its broadcast group
    quirks      where the SA differs from the specification; by default nowhere
    max_mlid    the last MLID that the switches can hold, 0xC000..0xFFFE
    """

    link_layer = LinkLayer.INFINIBAND

    mtu: int | Sequence[int] = 2048
    rate: float = 40
    partitions: Mapping[int, Iterable[int]] | None = None
    ipoib: bool = True
    quirks: Quirks | None = None
    max_mlid: int = MLID_LAST
    block_loopback: str = "honoured"

    def __post_init__(self) -> None:
        super().__post_init__()
        check("max_mlid", self.max_mlid, range(MLID_FIRST, MLID_LAST + 1))
        partitions = {pkey: tuple(indices) for pkey, indices in (self.partitions or {}).items()}
        for pkey in partitions:
            check("P_Key", pkey, PKEYS)
            check("P_Key & 0x7FFF", pkey & PARTITION, range(1, PARTITION + 1))
        object.__setattr__(self, "partitions", partitions)
        check("number of partitions", len(self.pkey_bases), range(1, 257))
        for indices in partitions.values():
            for index in indices:
                check("port index", index, range(self.ports))

    @property
    def pkey_bases(self) -> list[int]:
        """The P_Keys of the partitions without the bit of full members, the default partition first."""
        others = (pkey & PARTITION for pkey in self.partitions or ())
        return list(dict.fromkeys([DEFAULT_PKEY & PARTITION, *others]))


def check(name: str, value: object, allowed: Collection[object]) -> None:
    """Raise ValueError unless the value of the option of that name is allowed."""
    whole = isinstance(allowed, range)
    if not isinstance(value, int | float | str) or (whole and type(value) is not int) or value not in allowed:
        shown = f"{allowed[0]}..{allowed[-1]}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
        raise ValueError(f"{name} is {value!r}: allowed are {shown}")
