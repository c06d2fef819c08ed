"""An open provider, and its event channels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from time import monotonic

from mcast.arguments.checks import check_int, check_type
from mcast.arguments.seconds import MAX_SECONDS, NUMBERS, check_seconds
from mcast.contract.client_process import ClientProcess
from mcast.contract.closing import Closeable
from mcast.contract.cm_id import CmId
from mcast.contract.enums import Capability
from mcast.contract.groups import GroupTable
from mcast.contract.values import CmEvent, DeviceInfo, UnusableDevice
from mcast.errors.cause import Cause, Phase
from mcast.wire.kinds import PortSpace


class Backend(Closeable):
    """An open provider.

    Closing the backend closes its channels, leaves every group and frees all resources.
    """

    name: str
    capabilities: frozenset[Capability]
    virtual_time: bool = False
    """True if time passes only while a call waits, as on most simulated fabrics: nobody else acts then."""

    def now(self) -> float:
        """Seconds on the monotonic clock by which timeouts run.

        The clock of a simulated fabric may be virtual.
        """
        return monotonic()

    def new_seed(self) -> int | None:
        """The seed for an endpoint's random numbers; None: the endpoint takes one from the operating system.

        A simulated fabric draws the seeds of its endpoints from its own seed, so that a run can be repeated.
        """
        return None

    def why_isolated(self) -> str:
        """Return why nobody else can be heard here, and what to do; "" where others may be there."""
        return ""

    def suspicions(self, quiet: float = 0.0) -> tuple[Cause, ...]:
        """Return what may keep others from being heard although all seems well.

        With `quiet` return nothing unless queue pairs have been open for that many seconds without a message.
        Raises TypeError and ValueError for what is no number of seconds.
        """
        return self._suspicions(check_seconds(quiet, "quiet"))

    def _suspicions(self, quiet: float) -> tuple[Cause, ...]:
        return ()

    @abstractmethod
    def devices(self) -> tuple[DeviceInfo, ...]:
        """The devices that are there now, each with its limits and its ports: MTU, link layer, GIDs."""

    def unusable_devices(self) -> tuple[UnusableDevice, ...]:
        """The devices of this host that `devices` leaves out, each with the reason and what to do."""
        return ()

    def port_counters(self, device: str, port_num: int = 1) -> Mapping[str, int]:
        """Return the counters that the device keeps of the port, under the device's names.

        Empty where there are none.
        """
        check_type(device, str, "device", "the name of a device, as `devices()` has it")
        number = check_int(port_num, "port_num", 1, 255, "ports are numbered from 1 to 255")
        self._require_open("port_counters", Phase.OPEN)
        return self._port_counters(device, number)

    def _port_counters(self, device: str, port_num: int) -> Mapping[str, int]:
        return {}

    def client_processes(self) -> tuple[ClientProcess, ...]:
        """Return the processes that share the network with this one, and this one itself.

        Empty where that is not known.
        """
        return ()

    @abstractmethod
    def event_channel(self) -> EventChannel:
        """Make a new event channel. The ids that are made on the channel report to it."""

    def groups(self) -> GroupTable:
        """The groups that exist and their members now, as far as this host can see.

        A provider that cannot see other members lacks Capability.GROUP_TABLE; `GroupTable.unseen` says so in
        words.
        """
        self._require_open("groups", Phase.OPEN)
        return GroupTable((), (f"any group: the provider {self.name!r} does not say which there are",))


class EventChannel(Closeable):
    """rdma_event_channel: queue of the connection manager's events, oldest first."""

    @abstractmethod
    def fileno(self) -> int:
        """A real file descriptor for poll, select and asyncio: readable while an event waits."""

    @property
    @abstractmethod
    def pending(self) -> bool:
        """True if an event waits. Reading this takes no time, not even on the clock of a simulated fabric."""

    def create_id(self, port_space: PortSpace = PortSpace.UDP) -> CmId:
        """rdma_create_id: make an unbound id that reports to this channel.

        No id is without a channel (K-JOIN-23).
        """
        check_type(port_space, PortSpace, "port_space", "a PortSpace, such as PortSpace.UDP")
        return self._change("create_id", Phase.OPEN, self._create_id, port_space)

    def get_event(self, timeout: float | None = None) -> CmEvent | None:
        """rdma_get_cm_event and rdma_ack_cm_event: return the next event.

        None when `timeout` seconds have passed.

        Fetching the MULTICAST_JOIN of a full member attaches the id's queue pair (JEX-15, JM-2). If the
        device refuses to attach, the event is a MULTICAST_ERROR with status -1 and the errno of the attach
        (K-JOIN-7).
        """
        if timeout is not None and (timeout.__class__ not in NUMBERS or not 0.0 <= timeout <= MAX_SECONDS):
            timeout = check_seconds(timeout)
        if self._closed:
            self._require_open("get_event", Phase.EVENT)
        return self._get_event(timeout)

    @abstractmethod
    def _create_id(self, port_space: PortSpace) -> CmId: ...

    @abstractmethod
    def _get_event(self, timeout: float | None) -> CmEvent | None:
        """Fetch the next event: wait outside of the guard, and take the event under it."""
