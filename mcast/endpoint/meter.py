"""What an endpoint receives, by group and source: rates and losses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from mcast.api import Batch
from mcast.endpoint.sequence import SOURCES_MAX, Sources
from mcast.wire.addresses import Gid


class Counts:
    """Messages and bytes, in all and since the last look."""

    def __init__(self) -> None:
        self.messages = self.bytes = 0
        self._before = (0, 0)

    def add(self, size: int) -> None:
        self.messages += 1
        self.bytes += size

    def look(self, seconds: float) -> dict[str, Any]:
        """The totals, and the rates over the `seconds` since the last look."""
        messages, size = self._before
        self._before = (self.messages, self.bytes)
        return {
            "messages": self.messages,
            "bytes": self.bytes,
            "messages_per_second": (self.messages - messages) / seconds,
            "bytes_per_second": (self.bytes - size) / seconds,
        }


class GroupMeter:
    """What is received in one group. Sequence headers are read where messages have them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts = Counts()
        self._by_source: OrderedDict[tuple[Gid, int], Counts] = OrderedDict()
        self._forgotten = 0
        self._sequences = Sources()

    def add(self, source: Gid, qp_num: int, payload: memoryview) -> None:
        self.counts.add(payload.nbytes)
        self._of_source((source, qp_num)).add(payload.nbytes)
        self._sequences.take(source, qp_num, payload)

    def _of_source(self, key: tuple[Gid, int]) -> Counts:
        """The counts of one source.

        A new source beyond SOURCES_MAX replaces the one that was silent for longest.
        """
        known = self._by_source.get(key)
        if known is not None:
            self._by_source.move_to_end(key)
            return known
        if len(self._by_source) >= SOURCES_MAX:
            self._by_source.popitem(last=False)
            self._forgotten += 1
        made = self._by_source[key] = Counts()
        return made

    def look(self, seconds: float) -> dict[str, Any]:
        """The counts of the group, as `Counts.look`, and those of each source.

        gaps, late and duplicates are None where no message had a sequence header.
        """
        sequences: dict[tuple[Gid, int], dict[str, int]] = {}
        for one in self._sequences.snapshot():
            counts = sequences.setdefault((one.source, one.qp_num), dict.fromkeys(SEQUENCE, 0))
            for name in SEQUENCE:
                counts[name] += getattr(one, name)
        return {
            "group": self.name,
            **self.counts.look(seconds),
            **{name: self._sequences.total(name) if sequences else None for name in SEQUENCE},
            "sources": [
                {
                    "source": str(source.ipv4 or source),
                    "qp_num": qp_num,
                    **counts.look(seconds),
                    **sequences.get((source, qp_num), dict.fromkeys(SEQUENCE)),
                }
                for (source, qp_num), counts in self._by_source.items()
            ],
            "forgotten_sources": self._forgotten,
        }


SEQUENCE = ("gaps", "late", "duplicates")


class Meter:
    """What an endpoint receives, by group and source. `groups` maps an MGID to the name to show."""

    def __init__(self, groups: Mapping[Gid, str]) -> None:
        self._groups = {mgid: GroupMeter(name) for mgid, name in groups.items()}

    def take(self, batch: Batch) -> None:
        for message in batch:
            meter = self._groups.get(message.group)
            if meter is not None:
                meter.add(message.source, message.src_qp, message.payload)

    def look(self, seconds: float) -> list[dict[str, Any]]:
        return [meter.look(seconds) for meter in self._groups.values()]
