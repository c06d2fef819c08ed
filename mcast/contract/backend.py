"""A provider, opened, and its event channels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from time import monotonic

from mcast.contract.closing import Closeable
from mcast.contract.cm_id import CmId
from mcast.contract.enums import Capability
from mcast.contract.groups import GroupTable
from mcast.contract.values import CmEvent, DeviceInfo
from mcast.errors.cause import Phase
from mcast.interrupts import made_or_undone
from mcast.wire.kinds import PortSpace


class Backend(Closeable):
    """One provider, opened. Closing it closes its channels, leaves every group and frees everything."""

    name: str
    capabilities: frozenset[Capability]

    def now(self) -> float:
        """Seconds on the monotonic clock that timeouts run on; a simulated fabric's may be virtual."""
        return monotonic()

    def new_seed(self) -> int | None:
        """A seed for what an endpoint draws at random; None: from the system. A simulated fabric has its own,
        so that a run can be repeated."""
        return None

    @abstractmethod
    def devices(self) -> tuple[DeviceInfo, ...]:
        """The devices that are there now, with limits, MTU, link layer and GIDs."""

    def port_counters(self, device: str, port_num: int = 1) -> Mapping[str, int]:
        """The port's own counters by the device's names for them; empty where there are none."""
        return {}

    @abstractmethod
    def event_channel(self) -> EventChannel:
        """A new channel; its ids report to it."""

    def groups(self) -> GroupTable:
        """Which groups exist and who is in them now, as far as this host can see.

        A provider need not know (Capability.GROUP_TABLE); the table then says so.
        """
        self._require_open("groups", Phase.OPEN)
        return GroupTable((), (f"any group: the provider {self.name!r} does not say which there are",))


class EventChannel(Closeable):
    """rdma_event_channel: the queue of communication events, in the order in which they happened."""

    @abstractmethod
    def fileno(self) -> int:
        """A real file descriptor: readable (poll, select, asyncio) while an event waits."""

    @property
    @abstractmethod
    def pending(self) -> bool:
        """Whether an event waits. Asking takes no time, not even a simulated fabric's."""

    def create_id(self, port_space: PortSpace = PortSpace.UDP) -> CmId:
        """rdma_create_id. A new, unbound id. There is none without a channel (K-JOIN-23)."""
        self._require_open("create_id", Phase.OPEN)
        return made_or_undone(partial(self._create_id, port_space), CmId.destroy)

    def get_event(self, timeout: float | None = None) -> CmEvent | None:
        """rdma_get_cm_event and rdma_ack_cm_event: the next event, or None when `timeout` s have passed.

        Retrieving a MULTICAST_JOIN of a full member attaches the id's QP (JEX-15, JM-2); if the attach
        fails the event is a MULTICAST_ERROR with status -1 and the attach's errno (K-JOIN-7).
        """
        with self._whole:
            if self._closed:
                self._require_open("get_event", Phase.EVENT)
            return self._get_event(timeout)

    @abstractmethod
    def _create_id(self, port_space: PortSpace) -> CmId: ...

    @abstractmethod
    def _get_event(self, timeout: float | None) -> CmEvent | None:
        """Waits inside `interruptible`; what was taken from the queue is returned."""
