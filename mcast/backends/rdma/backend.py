"""The real stack, opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mcast.api import (
    Backend,
    BackendUnavailable,
    Capability,
    DeviceInfo,
    EventChannel,
    GroupTable,
    Guard,
    LinkLayer,
    Phase,
    Refused,
    UnavailableReason,
    UnusableDevice,
)
from mcast.backends.net.groups import group_table
from mcast.backends.rdma import native
from mcast.backends.rdma.availability import gather, judge
from mcast.backends.rdma.devices import netdevs_of, read_devices, read_port_counters, survey
from mcast.backends.rdma.error_collector import ErrorCollector
from mcast.backends.rdma.pds import ProtectionDomains
from mcast.backends.rdma.process import OwnedByProcess, Process

if TYPE_CHECKING:
    from mcast.backends.rdma.channel import RdmaChannel

_SHOWN_BY = {
    LinkLayer.ETHERNET: frozenset({Capability.IGMP, Capability.GROUP_TABLE}),
    LinkLayer.INFINIBAND: frozenset(
        {Capability.SA, Capability.MLID, Capability.IPV6_GROUP, Capability.RAW_MGID}
    ),
}
"""Link layer -> what can be seen and done on a port of that layer."""


class RdmaBackend(OwnedByProcess, Backend):
    name = "rdma"

    def __init__(self) -> None:
        facts = gather()
        status = judge(facts)
        if not status.available:
            reason = status.reason or UnavailableReason.BROKEN
            raise BackendUnavailable(self.name, reason, status.detail, status.fix)
        self._set_up()
        layers = {port.link_layer for device in facts.devices for port in device.ports}
        shown = (_SHOWN_BY[layer] for layer in layers)
        self.capabilities: frozenset[Capability] = frozenset({Capability.CONNECTED_QP}).union(*shown)

    def _set_up(self) -> None:
        self._guard = Guard("backend")
        self.process: Process = Process()
        self._native = native.load()
        self._pds = ProtectionDomains(self._native)
        self._channels: set[RdmaChannel] = set()
        self._removed = False

    def devices(self) -> tuple[DeviceInfo, ...]:
        self._require_open("devices", Phase.OPEN)
        return read_devices(self._native)

    def unusable_devices(self) -> tuple[UnusableDevice, ...]:
        self._require_open("unusable_devices", Phase.OPEN)
        return survey(self._native).unusable

    def groups(self) -> GroupTable:
        self._require_open("groups", Phase.OPEN)
        return group_table(read_devices(self._native), netdevs_of)

    def _port_counters(self, device: str, port_num: int) -> Mapping[str, int]:
        is_name = "/" not in device and "\0" not in device and device not in ("", ".", "..")
        return read_port_counters(device, port_num) if is_name else {}  # it becomes part of a path

    def event_channel(self) -> EventChannel:
        from mcast.backends.rdma.channel import RdmaChannel  # needs the extension

        removal, closed = self._note_removal, self._channels.discard
        channel = RdmaChannel(self._native, self.process, self._pds, removal, closed)
        try:
            with self._guard.lock:  # a close beside it comes before or after
                self._require_whole("event_channel", Phase.OPEN)
                self._channels.add(channel)
                channel.make()
        except Refused as refused:
            self._channels.discard(channel)
            raise refused.error from None
        return channel

    def _note_removal(self) -> None:
        self._removed = True

    def _close(self) -> None:
        """Close every channel, and with it every id, queue pair and membership.

        A close that failed is tried again.
        """
        if self._freed:
            return
        self._closed = True
        if self.process.is_here:
            errors = ErrorCollector()
            for channel in list(self._channels):
                errors.attempt(channel._guard.close, channel._close)
            errors.attempt(self._pds.sweep)
            if self._removed:
                errors.attempt(self._native.guarded.sync_devices)
            errors.done()
        self._freed = True
