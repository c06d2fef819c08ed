"""The contract's ids and queue pairs on these state machines: an errno of a call becomes an error.

The contract calls the hooks under the guard of the provider's objects. A provider's own classes derive from
these, and add how messages are sent and received, and what closing frees besides.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from ipaddress import IPv4Address, IPv6Address
from types import MappingProxyType
from typing import Any, Self

from mcast.api import (
    JOIN_MASK,
    CmEvent,
    CmId,
    Guard,
    JoinAttrEx,
    JoinFlag,
    LinkLayer,
    McastAddress,
    Phase,
    QpCounters,
    QpState,
    QpType,
    QueuePair,
    Refused,
    mcast_error,
)
from mcast.backends.model.cm import CmaId, QueuedEvent
from mcast.backends.model.qp import Qp
from mcast.errors.cause import Cause
from mcast.wire.addresses import Gid

_JOIN_MASK, _FULL_MEMBER = int(JOIN_MASK), JoinFlag.FULLMEMBER


def check(failed: int, call: str, phase: Phase, detail: str = "", **arguments: object) -> None:
    """Refuse a call with an errno; 0 is success."""
    if failed:
        raise Refused(mcast_error(failed, call, phase, arguments, detail))


def event_of(event: QueuedEvent, causes: tuple[Cause, ...] = ()) -> CmEvent:
    """Return the event for the program."""
    context = None if event.membership is None else event.membership.context
    return CmEvent(
        event.type, event.status, event.errno, context, event.id.owner, event.ud, event.detail, causes
    )


class ModelCmId(CmId):
    """An id. `siblings` are the ids of its channel, from which closing removes this one."""

    def __init__(self, core: CmaId, guard: Guard, siblings: MutableMapping[Self, None]) -> None:
        super().__init__()
        self._closed = False  # looking it up in the class takes three times as long
        self.core: CmaId = core
        core.owner = self
        self._guard = guard
        self._siblings: MutableMapping[Any, None] = siblings
        self._qp: QueuePair | None = None
        siblings[self] = None

    @property
    def device(self) -> str | None:
        return None if self.core.interface is None else self.core.interface.port.name

    @property
    def link_layer(self) -> LinkLayer | None:
        return None if self.core.interface is None else self.core.interface.port.link_layer

    @property
    def qp(self) -> QueuePair | None:
        return self._qp

    def _bind_addr(self, src: IPv4Address | IPv6Address) -> None:
        check(self.core.bind(src), "bind_addr", Phase.BIND, src=src)

    def _resolve_addr(self, dst: McastAddress, src: IPv4Address | IPv6Address | None, timeout: float) -> None:
        check(self.core.resolve(dst, src), "resolve_addr", Phase.RESOLVE, dst=dst, src=src)

    def forget_qp(self, qp: ModelQueuePair) -> None:
        """Detach a queue pair that closes from everything, and destroy it."""
        if self._qp is qp:
            if self._guard.was_broken:
                self.core.network.queue_pairs.forget(qp.core)
                self.core.qp = None
            else:
                self.core.destroy_qp()
            self._qp = None

    def _join_multicast_ex(self, attr: JoinAttrEx, context: object) -> None:
        mask, flags = int(attr.comp_mask), attr.join_flags
        self._join_multicast(attr.addr, context, "join_multicast_ex", mask, flags)

    def _join_multicast(
        self,
        addr: McastAddress,
        context: object,
        call: str = "join_multicast",
        mask: int = _JOIN_MASK,
        flags: int = _FULL_MEMBER,
    ) -> None:
        if failed := self.core.join(mask, flags, addr, context):
            check(failed, call, Phase.JOIN, addr=addr, join_flags=flags)

    def _leave_multicast(self, addr: McastAddress) -> None:
        if failed := self.core.leave(addr):
            check(failed, "leave_multicast", Phase.LEAVE, addr=addr)

    def _destroy(self) -> None:
        if self._guard.was_broken:
            self.core.abort()
        else:
            self.core.destroy()
        if self._qp is not None:
            self._qp._close()
        self._siblings.pop(self, None)


class ModelQueuePair(QueuePair):
    """The queue pair of an id."""

    def __init__(self, owner: ModelCmId, core: Qp) -> None:
        self.core: Qp = core
        self._owner: ModelCmId = owner
        self._guard = owner._guard
        self._closed = False  # looking it up in the class takes three times as long

    @property
    def link_layer(self) -> LinkLayer:
        return self.core.port.link_layer

    @property
    def qp_num(self) -> int:
        return self.core.number

    @property
    def qp_type(self) -> QpType:
        return self.core.type

    @property
    def state(self) -> QpState:
        self._require_open("state", Phase.MODIFY)
        return self.core.state

    @property
    def max_message_size(self) -> int:
        if self._closed:
            self._require_open("max_message_size", Phase.SEND)
        return self.core.port.mtu

    @property
    def attachments(self) -> Mapping[Gid, int]:
        return MappingProxyType(self.core.attached.copy())

    @property
    def counters(self) -> QpCounters:
        core, guard = self.core, self._guard
        if core.leases.ended:
            with guard.lock:
                if not guard.amid:  # else they stay as they were left
                    guard.amid = "counters"
                    core.reclaim()
                    guard.amid = ""
        return core.counters

    @property
    def has_port_events(self) -> bool:
        return bool(self.core.port_events)

    def _modify(self, state: QpState) -> None:
        check(self.core.modify(state), "modify", Phase.MODIFY, state=state.name)

    def _attach_mcast(self, gid: Gid, lid: int) -> None:
        failed = self._owner.core.network.queue_pairs.attach(self.core, gid, lid)
        check(failed, "attach_mcast", Phase.ATTACH, gid=gid, lid=f"{lid:#x}")

    def _detach_mcast(self, gid: Gid, lid: int) -> None:
        failed = self._owner.core.network.queue_pairs.detach(self.core, gid, lid)
        check(failed, "detach_mcast", Phase.DETACH, gid=gid, lid=f"{lid:#x}")

    def _require_no_messages(self, recv_slot: int) -> None:
        self.core.reclaim()  # `counters` does not, in the middle of a call
        super()._require_no_messages(recv_slot)
