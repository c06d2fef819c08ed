"""The part of endpoints and memberships that never waits.

Calls that block and calls that are awaited share it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Generic, TypeVar

from mcast.api import (
    Backend,
    Destination,
    DeviceInfo,
    Guard,
    Handle,
    McastError,
    PortInfo,
    Refused,
    TimestampClock,
    open_at,
)
from mcast.endpoint.core import EndpointCore
from mcast.endpoint.membership import EndpointGroup, GroupState
from mcast.endpoint.policy import LoopbackReport
from mcast.endpoint.ports import choose
from mcast.endpoint.settings import OpenArguments, Settings
from mcast.endpoint.stats import EndpointStats, GroupStats
from mcast.wire.addresses import Gid, LocalAddress, McastAddress, Mgid

logger: logging.Logger = logging.getLogger("mcast")

GroupLike = McastAddress | IPv4Address | IPv6Address | Mgid | str
M = TypeVar("M", bound="SenderBase")
N = TypeVar("N", bound="SenderBase")
S = TypeVar("S")


class EndpointBase(Handle, Generic[M]):
    """The part of an endpoint that never waits."""

    def __init__(self, opening: OpenArguments) -> None:
        """Open the endpoint; `open_endpoint` calls this."""
        self._prepare(opening)
        self._owned: Backend | None = None
        self._members: dict[McastAddress, M] = {}
        self._guard = Guard("endpoint")
        try:
            self._open(opening)
        except Refused as refused:
            self._close_after_failure()
            raise refused.error from refused.error.__cause__
        except BaseException:  # what is not freed here goes with the backend
            self._close_after_failure()
            raise

    def _close_after_failure(self) -> None:
        try:
            self._close_owned()
        except McastError as error:
            logger.warning("the backend of an endpoint that could not be opened: %s", error)

    def _open(self, opening: OpenArguments) -> None:
        backend, device, port_num = opening.backend, opening.device, opening.port_num
        if isinstance(backend, str):
            backend = self._owned = open_at(backend, opening.bind, opening.options or {})
        elif not isinstance(backend, Backend):
            raise TypeError(
                f"backend is {backend!r}: give the name of a provider, or what open_backend returned"
            )
        elif opening.options:
            raise ValueError(
                f"options are {dict(opening.options)}, and the backend is open: only one that is "
                "opened by name takes options; give them to open_backend"
            )
        local_port = choose(backend, opening.bind, device, port_num)
        address = local_port.address if device is None else None
        find_again = partial(choose, backend, address, device, port_num)
        self._core = EndpointCore(backend, local_port, find_again, opening, self._clock or backend.now)

    _clock: Callable[[], float] | None = None
    """The clock of timeouts, where it is not the backend's."""

    def _prepare(self, settings: Settings) -> None:
        """Check the settings, and prepare the driver before anything is opened.

        ValueError for a setting that cannot be.
        """

    @property
    def backend(self) -> Backend:
        """The open backend that the endpoint is on."""
        return self._core.resources.backend

    @property
    def device(self) -> DeviceInfo:
        """The device, as it was when the endpoint was opened, or when its device was last found again."""
        return self._core.resources.local_port.device

    @property
    def port(self) -> PortInfo:
        """The port, as it was when the endpoint was opened, or when its device was last found again."""
        return self._core.resources.local_port.port

    @property
    def address(self) -> LocalAddress:
        """The local IP address that the endpoint is bound to."""
        return self._core.resources.local_port.address

    @property
    def qp_num(self) -> int:
        """The number of the queue pair. After the device was lost it is that of a new queue pair."""
        return self._core.resources.qp.qp_num

    @property
    def timestamp_clock(self) -> TimestampClock | None:
        """The clock of `Message.timestamp`; None where messages have no time stamp."""
        return self._core.resources.qp.timestamp_clock

    @property
    def max_message_size(self) -> int:
        """Maximum payload in bytes that this port carries.

        A group on InfiniBand may allow less: see `Sender.max_message_size`. On RoCE the ports of receivers
        and the switches may carry less, and lose what is larger in silence: their MTUs are not known here.
        """
        return self._core.resources.max_message_size

    @property
    def loopback(self) -> LoopbackReport:
        """Loopback policy, and the means that keep the endpoint's own messages away now."""
        return self._core.probing.loopback_report()

    @property
    def groups(self) -> tuple[M, ...]:
        """The memberships and senders that were joined and not left, in the order of joining.

        None once the endpoint is closed.
        """
        return () if self.closed else tuple(self._members.values())

    @property
    def closed(self) -> bool:
        """True after `close`, or when the backend was closed.

        Calls that send or receive then raise Closed.
        """
        return self._core.resources.is_closed

    def now(self) -> float:
        """Seconds on the clock by which the endpoint's timeouts run."""
        return self._core.waiting.now()

    def stats(self) -> EndpointStats:
        """Everything that was counted so far, as a frozen snapshot. May be called from any thread."""
        return self._shown(self._core.snapshot)

    def _shown(self, make: Callable[[], S]) -> S:
        """Return what `make` returns, under the lock; of a broken endpoint, what is there."""
        with self._guard.lock:
            return make()

    def __repr__(self) -> str:
        if "_core" not in vars(self):  # in the traceback of a failed open
            return f"<{type(self).__name__}: not open>"
        groups = ", ".join(map(str, tuple(self._members))) or "no group"
        state = "closed" if self.closed else groups
        return f"<{type(self).__name__} {self.backend.name} {self.address}: {state}>"

    def _entered(self, make: Callable[[Any, EndpointGroup], N], group: EndpointGroup) -> N:
        """Make the member of a group that is joined, and show it in `groups`."""
        member = make(self, group)
        self._members[group.address] = member  # type: ignore[assignment]
        return member

    def _forget(self, group: EndpointGroup) -> None:
        """Show the group in `groups` no more.

        Another one with the same address may have been joined since.
        """
        member = self._members.get(group.address)
        if member is not None and member._group is group:
            del self._members[group.address]

    def _free(self) -> None:
        """Free all that the endpoint owns; called with the lock held.

        Called again if an earlier call was interrupted, and also when the endpoint is broken.
        """
        try:
            self._members.clear()
            self._core.resources.close()
        finally:
            self._close_owned()

    def _close_owned(self) -> None:
        if self._owned is not None:
            self._owned.close()


class SenderBase(Handle):
    """The part of a sender and of a membership that never waits."""

    _endpoint: EndpointBase[Any]
    _group: EndpointGroup
    _hold: Callable[[], Any] | None = None
    """Returns the hold of the end that has the membership to itself (`mcast.cast`), None once it is gone."""

    @property
    def endpoint(self) -> EndpointBase[Any]:
        """The endpoint that joined."""
        return self._endpoint

    @property
    def group(self) -> McastAddress:
        """The address that was joined."""
        return self._group.address

    @property
    def destination(self) -> Destination:
        """The destination of messages to the group, from the last join."""
        assert self._group.destination is not None
        return self._group.destination

    @property
    def mgid(self) -> Gid:
        """The group's MGID."""
        return self.destination.gid

    @property
    def mlid(self) -> int:
        """The group's MLID on InfiniBand, 0 on Ethernet."""
        return self.destination.dlid

    @property
    def max_message_size(self) -> int:
        """Maximum payload in bytes to this group: what the own port carries, and on InfiniBand the group.

        On RoCE nothing tells the MTUs of the receivers' ports and of the switches. A message that one of them
        cannot take is lost there in silence, and smaller ones arrive: give all ports and switches of a
        network one MTU. `mcast ping -S BYTES` shows which size arrives (docs/pitfalls.md, 5).
        """
        resources = self._endpoint._core.resources
        return resources.max_message_to(resources.qp, self.destination)

    @property
    def joined(self) -> bool:
        """True while the group is joined; False while the membership is lost, and after `leave`."""
        return self._group.state is GroupState.JOINED and not self._endpoint.closed

    def stats(self) -> GroupStats:
        """Return the counters of this group, as a frozen snapshot. May be called from any thread."""
        return self._endpoint._shown(self._group.snapshot)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.group} {self._group.state.value}>"
