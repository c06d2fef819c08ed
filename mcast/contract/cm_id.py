"""The communication id: an object that is bound to a port, joins groups, and owns at most one queue pair."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NoReturn, TypeVar

from mcast.arguments.checks import check_int, check_type
from mcast.arguments.seconds import check_seconds
from mcast.contract.closing import OnPort
from mcast.contract.poison import Refused
from mcast.contract.queue_pair import QueuePair
from mcast.contract.values import JoinAttrEx, QpInit
from mcast.errors.cause import Phase
from mcast.errors.tree import AlreadyJoined, McastError
from mcast.wire.addresses import McastAddress, Mgid

J = TypeVar("J")


class CmId(OnPort):
    """rdma_cm_id: an object that is bound to a port of a device, and joins and leaves groups.

    It owns at most one queue pair.
    """

    _keys_are_groups = False
    """True if each address's own key names its group, so that `_group_of` need not be called."""

    def __init__(self) -> None:
        self._joined: dict[object, McastAddress] = {}  # group, as `_group_of` says -> its address
        self.on_destroying: Callable[[], None] = lambda: None
        """Called before the id and its queue pair are destroyed, in the thread that destroys them.

        Called once more if that was interrupted. The counters of the queue pair can still be read.
        """
        self.on_destroyed: Callable[[], None] = lambda: None
        """Called when the id and its queue pair are destroyed, in the thread that destroys them.

        Called once more if that was interrupted.
        """

    @property
    @abstractmethod
    def device(self) -> str | None:
        """The name of the device that the id is bound to; None while the id is not bound to one."""

    @property
    @abstractmethod
    def qp(self) -> QueuePair | None:
        """The queue pair made by create_qp; None before that, and after the queue pair was destroyed."""

    def bind_addr(self, src: IPv4Address | IPv6Address | str) -> None:
        """rdma_bind_addr: bind the id to the port that has the local address `src` (JEX-12).

        0.0.0.0 and 127.0.0.1 succeed, and leave the id without a device. Errors: EADDRNOTAVAIL (no port has
        the address), EINVAL (PortSpace.IPOIB on Ethernet: K-JOIN-13, K-JOIN-15).
        """
        self._change("bind_addr", Phase.BIND, self._bind_addr, _ip(src))

    def resolve_addr(
        self,
        dst: McastAddress | IPv4Address | IPv6Address | str,
        src: IPv4Address | IPv6Address | str | None = None,
        timeout: float = 2.0,
    ) -> None:
        """rdma_resolve_addr: bind the id to a port (JEX-13).

        The port that `src` names, or that the route to `dst` leaves by.

        The outcome is an event within `timeout` seconds; the id may join once ADDR_RESOLVED was fetched.
        Errors: ENETUNREACH (no route to `dst`, and no `src`).
        """
        group, source = McastAddress.of(dst), None if src is None else _ip(src)
        timeout = check_seconds(timeout)
        self._change("resolve_addr", Phase.RESOLVE, self._resolve_addr, group, source, timeout)

    def create_qp(self, init: QpInit | None = None) -> QueuePair:
        """rdma_create_qp: make the id's queue pair.

        A UD queue pair is in RTS with its receives posted, RC and UC in INIT.

        Errors: EINVAL (the id has a queue pair, or no device; RC or UC in PortSpace.UDP; UD in PortSpace.TCP;
        a comp_vector that the device lacks), EOPNOTSUPP (timestamps or moderation on a device that cannot),
        EOPNOTSUPP or EINVAL, depending on the driver (block_loopback on a device that cannot).
        """
        init = (
            QpInit()
            if init is None
            else check_type(init, QpInit, "init", "a QpInit, or None for the usual one")
        )
        return self._change("create_qp", Phase.CREATE_QP, self._make_qp, init)

    def _make_qp(self, init: QpInit) -> QueuePair:
        qp = self._create_qp(init)
        qp._depth = init.max_recv_wr
        return qp

    def join_multicast(
        self, addr: McastAddress | IPv4Address | IPv6Address | Mgid | str, context: object = None
    ) -> None:
        """rdma_join_multicast: start to join as a full member (JM-1).

        Equal to `join_multicast_ex` with FULLMEMBER.
        """
        address = McastAddress.of(addr)
        group = address.key if self._keys_are_groups else self._group_of(address)
        self._join_once("join_multicast", group, address, self._join_multicast, address, context)

    def join_multicast_ex(self, attr: JoinAttrEx, context: object = None) -> None:
        """rdma_join_multicast_ex: start to join. The outcome is an event that carries `context` (JEX-17).

        Errors that are raised at once: EINVAL (the id is not bound, JEX-12; not UD; a bad mask or flag,
        JEX-1, JEX-2), EOPNOTSUPP (a reserved mask bit), errno 524 (an IPv6 group or raw MGID on RoCEv2),
        EADDRNOTAVAIL (InfiniBand without the IPoIB broadcast group), ENXIO (the device was removed),
        `AlreadyJoined` (guard G-JOIN). After a MULTICAST_ERROR the program still has to leave the group
        (JEX-14).
        """
        if type(attr) is not JoinAttrEx:
            check_type(attr, JoinAttrEx, "attr", "a JoinAttrEx, such as JoinAttrEx.full_member(address)")
        for name in ("comp_mask", "join_flags"):  # model_construct lets anything be there
            check_int(getattr(attr, name), name, 0, 0xFFFFFFFF, "it has 32 bits")
        address: object = attr.addr  # an attr made by model_construct may have any value there
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
        """Guard G-JOIN: note the group before joining, so that of two threads that join it one is refused."""
        if not self._strict:
            join = partial(self._if_open, call, Phase.JOIN, join)
        guard, refused = self._guard, None
        try:  # as `Guard.run` does it, without its cost
            with guard.lock:
                if guard.amid:
                    guard.refuse(call, Phase.JOIN)
                if self._closed:
                    self._require_open(call, Phase.JOIN)
                if group in self._joined:
                    raise AlreadyJoined(call, self._joined[group])
                guard.amid = call
                self._joined[group] = address
                try:
                    join(what, context)
                except Refused as error:
                    self._joined.pop(group, None)  # a close of a served fabric does not wait for this call
                    refused = error.error
                guard.amid = ""
                if guard.after_change is not None:
                    guard.after_change(call)
        finally:
            if guard.deferred:
                guard.run_deferred_closes()
        if refused is not None:
            try:
                self._raise(refused)
            finally:
                del refused  # as in `Guard.run`

    def leave_multicast(self, addr: McastAddress | IPv4Address | IPv6Address | Mgid | str) -> None:
        """rdma_leave_multicast: leave the group and detach the id's queue pair (LV-1).

        Does not wait for an event.

        Leaving before the join is complete, or before its event was fetched, cancels the join: its event
        never comes (LV-2). Messages already received stay readable (LV-3). Errors: EADDRNOTAVAIL (the id has
        not joined with this address and port, LV-5), ENXIO (the device was removed).
        """
        address = McastAddress.of(addr)
        guard, refused = self._guard, None
        try:  # as `Guard.run` does it, without its cost
            with guard.lock:
                if guard.amid:
                    guard.refuse("leave_multicast", Phase.LEAVE)
                if self._closed:
                    self._require_open("leave_multicast", Phase.LEAVE)
                guard.amid = "leave_multicast"
                try:
                    if self._strict:
                        self._leave_multicast(address)
                    else:
                        self._if_open("leave_multicast", Phase.LEAVE, self._leave_multicast, address)
                    self._joined.pop(address.key if self._keys_are_groups else self._group_of(address), None)
                except Refused as error:
                    refused = error.error
                guard.amid = ""
                if guard.after_change is not None:
                    guard.after_change("leave_multicast")
        finally:
            if guard.deferred:
                guard.run_deferred_closes()
        if refused is not None:
            try:
                self._raise(refused)
            finally:
                del refused  # as in `Guard.run`

    def _raise(self, refused: BaseException) -> NoReturn:
        """Raise the error of a change; it says the port's link layer."""
        if isinstance(refused, McastError):
            refused.link_layer = self.link_layer
        try:
            raise refused from refused.__cause__
        finally:
            del refused

    def destroy(self) -> None:
        """rdma_destroy_id: leave all groups (LV-4), destroy the queue pair, then the id. As `close`."""
        self.close()

    def _close(self) -> None:
        if self._freed:
            return
        refused: Exception | None = None
        if not self._closed:
            self.on_destroying()
            self._closed = True
        self._joined.clear()
        try:
            self._destroy()
        except Refused as error:
            refused = error
        except McastError as error:
            if self._strict:
                raise
            refused = error
        self.on_destroyed()
        self._freed = True
        if refused is not None:
            try:
                raise refused
            finally:
                del refused

    def _group_of(self, address: McastAddress) -> object:
        """A value that is equal for all addresses of one group (guard G-JOIN).

        That is the address without its port, or the MGID where the provider knows the MGID.
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
    if isinstance(value, IPv4Address | IPv6Address):
        return value
    try:  # `ip_address` takes numbers and bytes, too
        return ip_address(check_type(value, str, "src", "an IPv4 or IPv6 address, as text or from ipaddress"))
    except ValueError:
        raise ValueError(f"{value!r} is not a source address: give IPv4 or IPv6 text") from None
