"""The communication id: bound to a port, in groups, with at most one queue pair."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TypeVar

from mcast.contract.closing import OnPort
from mcast.contract.queue_pair import QueuePair
from mcast.contract.values import JoinAttrEx, QpInit
from mcast.errors.cause import Phase
from mcast.errors.tree import AlreadyJoined, McastError
from mcast.interrupts import made_or_undone, uninterrupted
from mcast.wire.addresses import McastAddress, Mgid

J = TypeVar("J")


class CmId(OnPort):
    """rdma_cm_id: bound to a device, joins and leaves groups, owns at most one QP."""

    def __init__(self) -> None:
        self._joined: dict[object, tuple[McastAddress]] = {}  # by group
        self.on_destroyed: Callable[[], None] = lambda: None
        """Called when the id has ended and its QP with it, in the thread that has ended it."""

    @property
    @abstractmethod
    def device(self) -> str | None:
        """Name of the device the id is bound to; None while it has none."""

    @property
    @abstractmethod
    def qp(self) -> QueuePair | None:
        """The QP made by create_qp; None before, and after it was destroyed."""

    def bind_addr(self, src: IPv4Address | IPv6Address | str) -> None:
        """rdma_bind_addr: take the device that has the address (JEX-12).

        0.0.0.0 and 127.0.0.1 succeed and leave the id without a device. Not local: EADDRNOTAVAIL.
        PortSpace.IPOIB on Ethernet: EINVAL (K-JOIN-13, K-JOIN-15).
        """
        source = _ip(src)
        with uninterrupted(), self._explained():
            self._require_open("bind_addr", Phase.BIND)
            self._bind_addr(source)

    def resolve_addr(
        self,
        dst: McastAddress | IPv4Address | IPv6Address | str,
        src: IPv4Address | IPv6Address | str | None = None,
        timeout: float = 2.0,
    ) -> None:
        """rdma_resolve_addr: take the device that the route to `dst`, or `src`, names (JEX-13).

        The id may join once ADDR_RESOLVED has been fetched. No route and no source: ENETUNREACH.
        """
        group, source = McastAddress.of(dst), None if src is None else _ip(src)
        with uninterrupted():
            self._require_open("resolve_addr", Phase.RESOLVE)
            self._resolve_addr(group, source, timeout)

    def create_qp(self, init: QpInit | None = None) -> QueuePair:
        """rdma_create_qp. A UD QP of a bound id is in RTS with its receives posted; RC and UC in INIT.

        A second QP on the id, RC or UC in PortSpace.UDP, UD in PortSpace.TCP, no device: EINVAL.
        block_loopback on a device that cannot: EOPNOTSUPP, or EINVAL from some drivers. A comp_vector that
        the device lacks: EINVAL. timestamps or moderation on a device that cannot: EOPNOTSUPP.
        """
        self._require_open("create_qp", Phase.CREATE_QP)
        return made_or_undone(partial(self._create_qp, init or QpInit()), lambda qp: qp.close())

    def join_multicast(
        self, addr: McastAddress | IPv4Address | IPv6Address | Mgid | str, context: object = None
    ) -> None:
        """rdma_join_multicast: as join_multicast_ex with FULLMEMBER (JM-1)."""
        address = McastAddress.of(addr)
        self._join_once(
            "join_multicast", self._group_of(address), address, self._join_multicast, address, context
        )

    def join_multicast_ex(self, attr: JoinAttrEx, context: object = None) -> None:
        """rdma_join_multicast_ex: start to join; the outcome is an event that carries `context` (JEX-17).

        Raises at once: EINVAL (id not bound, JEX-12; not UD; bad mask or flag, JEX-1, JEX-2), EOPNOTSUPP
        (reserved mask bit), 524 (IPv6 group or raw MGID on RoCEv2), EADDRNOTAVAIL (InfiniBand without the
        IPoIB broadcast group), ENXIO (device removed). `AlreadyJoined`: guard G-JOIN.
        After a MULTICAST_ERROR the membership still wants its leave (JEX-14).
        """
        address: object = attr.addr  # a model_construct may have anything
        group = self._group_of(address) if isinstance(address, McastAddress) else object()
        self._join_once("join_multicast_ex", group, attr.addr, self._join_multicast_ex, attr, context)

    def _join_once(
        self,
        call: str,
        group: object,
        address: McastAddress,
        join: Callable[[J, object], None],
        what: J,
        context: object,
    ) -> None:
        """Guard G-JOIN: the group is claimed before it is joined, so of two threads one is refused."""
        claim = (address,)

        with self._whole:
            if self._closed:
                self._require_open(call, Phase.JOIN)
            claimed = self._joined.setdefault(group, claim)
            if claimed is not claim:
                raise AlreadyJoined(call, *claimed)
            try:
                join(what, context)
            except BaseException as error:
                self._joined.pop(group, None)
                if isinstance(error, McastError):
                    error.link_layer = self.link_layer
                raise

    def leave_multicast(self, addr: McastAddress | IPv4Address | IPv6Address | Mgid | str) -> None:
        """rdma_leave_multicast: leave and detach the id's QP (LV-1); never blocks on an event.

        Before the join is complete, or its event fetched, it cancels: that event never comes (LV-2).
        What was received stays readable (LV-3). Not joined with this address and port: EADDRNOTAVAIL
        (LV-5). Device removed: ENXIO.
        """
        address = McastAddress.of(addr)
        with self._whole:
            if self._closed:
                self._require_open("leave_multicast", Phase.LEAVE)
            try:
                self._leave_multicast(address)
            except McastError as error:
                error.link_layer = self.link_layer
                raise
            self._joined.pop(self._group_of(address), None)

    def destroy(self) -> None:
        """rdma_destroy_id, after leaving all groups (LV-4) and destroying the QP. Idempotent."""
        with uninterrupted():
            if not self._closed:
                self._closed = True
                self._joined.clear()
                try:
                    self._destroy()
                finally:
                    self.on_destroyed()

    def close(self) -> None:
        """The same as destroy."""
        self.destroy()

    def _group_of(self, address: McastAddress) -> object:
        """What all addresses of one group have in common (guard G-JOIN).

        That is the address without its port, or the MGID where the provider knows it.
        """
        return address.key

    @abstractmethod
    def _bind_addr(self, src: IPv4Address | IPv6Address) -> None: ...

    @abstractmethod
    def _resolve_addr(
        self, dst: McastAddress, src: IPv4Address | IPv6Address | None, timeout: float
    ) -> None: ...

    @abstractmethod
    def _create_qp(self, init: QpInit) -> QueuePair: ...

    @abstractmethod
    def _join_multicast(self, addr: McastAddress, context: object) -> None: ...

    @abstractmethod
    def _join_multicast_ex(self, attr: JoinAttrEx, context: object) -> None: ...

    @abstractmethod
    def _leave_multicast(self, addr: McastAddress) -> None: ...

    @abstractmethod
    def _destroy(self) -> None: ...


def _ip(value: IPv4Address | IPv6Address | str) -> IPv4Address | IPv6Address:
    try:
        return ip_address(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a source address: give IPv4 or IPv6 text") from None
