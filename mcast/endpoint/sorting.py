"""Which of the messages that arrive are the user's: not probes, not duplicates, and not own messages that are
filtered."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mcast.api import Batch, Message
from mcast.endpoint import sequence
from mcast.endpoint.membership import EndpointGroup
from mcast.endpoint.numbering import missing
from mcast.endpoint.policy import MessagesMissing
from mcast.endpoint.probing import ECHOES_MAX, Prober
from mcast.wire import probe
from mcast.wire.addresses import Gid
from mcast.wire.probe import PROBE_SIZES

logger: logging.Logger = logging.getLogger("mcast")


_OWN = "own message"


class CountDrops(Protocol):
    """Counts messages that the user does not get."""

    def __call__(self, group: EndpointGroup | None, reason: str, messages: int = 1, /) -> None: ...


def _has_one(batch: Batch) -> bool:
    """Whether one queue pair has sent all messages of the batch, which costs less to find out than a look at
    each."""
    first = batch[0]
    return batch.count_from(first.source, first.src_qp) == len(batch)


class Sorter:
    """Sorts messages; probes are answered here.

    by_mgid    MGID -> group, for the groups that are joined
    filtering  True if own messages are kept from the user
    sequenced  True if messages have sequence headers, None if they may have: these are delivered with theirs
    drop       counts messages that the user does not get, with their group (None: of no group) and the reason
    tell       takes an event for the user
    """

    def __init__(
        self,
        by_mgid: Mapping[Gid, EndpointGroup],
        prober: Prober,
        filtering: bool,
        sequenced: bool | None,
        drop: CountDrops,
        tell: Callable[[MessagesMissing], None],
    ) -> None:
        self._by_mgid, self._prober, self._drop, self._tell = by_mgid, prober, drop, tell
        self.filtering: bool = filtering
        self.sequenced: bool = bool(sequenced)
        self._told = sequenced is None
        """Whether nothing is left to say of a sender that differs from this end in its headers."""
        self._stray_sources = sequence.Sources()
        self.judges: bool = filtering or self.sequenced
        """Whether each message must be looked at."""

    def filter_own(self, filtering: bool) -> None:
        """Begin or end to keep own messages from the user."""
        self.filtering = filtering
        self.judges = filtering or self.sequenced

    def wanted(self, batch: Batch) -> tuple[Sequence[int], list[Message]]:
        """The places of the messages of the batch that are the user's, and these with the user's payloads."""
        self._prober.echoes_left = ECHOES_MAX
        lengths = batch.lengths
        if not self.judges_in(batch, lengths):
            return range(len(lengths)), list(batch)
        if not self.sequenced and PROBE_SIZES.isdisjoint(lengths) and batch[0].from_self and _has_one(batch):
            for mgid, own in Counter(batch.groups).items():
                self._drop(self._by_mgid.get(mgid), _OWN, own)
            return (), []
        judged = [self._judge(message) for message in batch]
        places = [place for place, kept in enumerate(judged) if kept is not None]
        return places, [kept for kept in judged if kept is not None]

    def answer(self, batch: Batch) -> None:
        """Answer the probes in the batch, and do nothing with the other messages."""
        self._prober.echoes_left = ECHOES_MAX
        if PROBE_SIZES.isdisjoint(batch.lengths):
            return
        for message in batch:
            if (found := probe.parse(message.payload)) is not None:
                self._prober.take(found, message)

    def judges_in(self, batch: Batch, lengths: Sequence[int]) -> bool:
        """Whether each message of a batch that is not empty, with payloads of these lengths, must be looked
        at."""
        if self.sequenced or not PROBE_SIZES.isdisjoint(lengths):
            return True
        return self.filtering and (batch[0].from_self or not _has_one(batch))

    def look(self, message: Message) -> None:
        """Say once that a sender has sequence headers, which an endpoint without them delivers as payload."""
        if self.sequenced or self._told:
            return
        if isinstance(sequence.parse(message.payload), sequence.SequenceHeader):
            self._told = True
            logger.warning(
                "%s: %s sends to %s with sequence headers, and this endpoint has sequence=False: each "
                "payload begins with a header of %d bytes. Open both ends with sequence=True, or both "
                "without",
                self._prober.whose,
                message.source,
                message.group,
                sequence.HEADER_SIZE,
            )

    def _judge(self, message: Message) -> Message | None:
        """The message as the user shall see it, or None if it is not the user's. A probe is answered here."""
        probed = probe.parse(message.payload)
        group = self._by_mgid.get(message.group)
        if probed is not None:
            self._prober.take(probed, message)
            return None
        if self.filtering and message.from_self:
            self._drop(group, _OWN)
            return None
        if not self.sequenced:
            return message
        sources = self._stray_sources if group is None else group.sources
        found = sources.take(message.source, message.src_qp, message.payload)
        if isinstance(found, sequence.Refusal):
            self._drop(group, found.value)
            if found in (sequence.Refusal.SHORT, sequence.Refusal.MAGIC) and not self._told:
                self._told = True
                logger.warning(
                    "%s: %s sends to %s without sequence headers, and this endpoint has sequence=True: such "
                    "messages are not delivered. Open both ends with sequence=True, or both without",
                    self._prober.whose,
                    message.source,
                    message.group,
                )
            return None
        if found.missing and group is not None:
            for gap in missing(group.address, message, found):
                self._tell(gap)
        return message._replace(payload=message.payload[sequence.HEADER_SIZE :], number=found.number)
