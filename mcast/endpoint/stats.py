"""Statistics of an endpoint and of its groups: frozen snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from mcast.wire.addresses import Gid


class _Snapshot(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, arbitrary_types_allowed=True, extra="forbid", defer_build=True
    )


class SourceStats(_Snapshot):
    """Counters of one stream, by its sequence headers. A sender starts a new stream with each join.

    source      the sender's GID
    qp_num      the sender's queue pair number; if the sender rejoins on another queue pair, that is a second
                stream
    stream      the stream's id, from the header
    received    messages delivered
    gaps        messages that are still missing
    late        messages that came after a later one, and closed a gap
    duplicates  messages that came again, and were not delivered
    """

    source: Gid
    qp_num: int
    stream: int
    received: int
    gaps: int
    late: int
    duplicates: int


class GroupStats(_Snapshot):
    """Counters of one group since it was joined. Bytes are payload bytes, without sequence headers.

    group      the address that was joined
    mgid       the group's MGID; None before the first join
    joined     False while the membership is lost
    sent, sent_bytes, sent_batches  messages, bytes and calls that sent to the group
    received, received_bytes        messages and bytes for the application, whichever call returned them
    queued     messages taken from the queue pair that wait for `recv`
    dropped    reason -> how many messages of the group were not delivered for that reason
    joins      joins that succeeded, those after a loss included
    rejoins    how often the membership was restored after a loss, by a join or by resetting the queue pair
    gaps, late, duplicates  sums over `sources` and the streams that were forgotten; None without sequence
               headers, because nobody can know
    sources    the streams that are remembered
    forgotten_sources       how many streams were forgotten because there were too many
    """

    group: str
    mgid: Gid | None
    joined: bool
    sent: int
    sent_bytes: int
    sent_batches: int
    received: int
    received_bytes: int
    queued: int
    dropped: Mapping[str, int]
    joins: int
    rejoins: int
    gaps: int | None
    late: int | None
    duplicates: int | None
    sources: tuple[SourceStats, ...]
    forgotten_sources: int


class EndpointStats(_Snapshot):
    """Counters of an endpoint since it was opened, over all its queue pairs. None: the provider cannot know.

    backend, device, port_num, qp_num  where the endpoint is; qp_num is None once it is closed
    sent, received        messages posted and received, probes included
    sent_bytes, received_bytes      payload bytes of the application's messages
    sent_batches, received_batches  calls that sent, and batches that were received
    receive_depth         the length of the receive queue
    receive_free          receives free now, of `receive_depth`
    receive_low_water     the fewest receives that were ever free
    receive_empty         how often the last free receive was found taken
    dropped               reason -> how many messages were lost or not delivered, those of the groups included
    probes                probes sent, answers included; none is delivered to the application
    joins                 joins that succeeded, those after a loss included
    lost, rejoins, gave_up          memberships lost, restored, given up
    events_dropped        events that were pushed out because `next_event` was not called in time
    gaps, late, duplicates          sums over all groups; None without sequence headers
    groups                the groups that were joined and not left
    port_counters         the device's own counters of the port, under the device's names
    """

    backend: str
    device: str | None
    port_num: int
    qp_num: int | None
    sent: int
    sent_bytes: int
    sent_batches: int
    received: int
    received_bytes: int
    received_batches: int
    receive_depth: int
    receive_free: int
    receive_low_water: int
    receive_empty: int | None
    dropped: Mapping[str, int]
    probes: int
    joins: int
    lost: int
    rejoins: int
    gave_up: int
    events_dropped: int
    gaps: int | None
    late: int | None
    duplicates: int | None
    groups: tuple[GroupStats, ...]
    port_counters: Mapping[str, int]
