"""Statistics of an endpoint and of its groups: frozen snapshots."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from mcast.wire.addresses import Gid


class _Snapshot(BaseModel):
    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True, extra="forbid")


class SourceStats(_Snapshot):
    """What the sequence headers of one stream say.

    qp_num      the queue pair that it comes from; after a rejoin on another one it goes on as a second stream
    gaps        messages that are missing still
    late        messages that came after a later one, and closed a gap
    duplicates  messages that came again; they are not delivered
    """

    source: Gid
    qp_num: int
    stream: int
    received: int
    gaps: int
    late: int
    duplicates: int


class GroupStats(_Snapshot):
    """One group since it was joined. Bytes are payload bytes, headers of ours not counted.

    queued    messages read from the queue pair that wait for `recv`
    dropped   why messages of the group were not delivered -> how many
    joins     joins that succeeded, the first one and each rejoin
    rejoins   of these, after a loss
    received  messages for the application, whichever call took them
    gaps, late, duplicates   sums over `sources`, and those forgotten
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
    gaps: int
    late: int
    duplicates: int
    sources: tuple[SourceStats, ...]
    forgotten_sources: int


class EndpointStats(_Snapshot):
    """An endpoint since it was opened, over all queue pairs that it has had. None: the provider cannot know.

    sent, received        messages posted and taken, probes included; bytes, batches: of applications alone
    receive_free          receives free now, of `receive_depth`
    receive_low_water     the fewest receives that were ever free
    receive_empty         how often the last free receive was seen taken
    dropped               why messages were lost or not delivered -> how many, the groups' included
    probes                probes sent and answered, never delivered
    lost, rejoins, gave_up   memberships lost, restored, given up
    events_dropped        events that nobody fetched with `next_event` and that had no room any more
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
    gaps: int
    late: int
    duplicates: int
    groups: tuple[GroupStats, ...]
    port_counters: Mapping[str, int]
