"""Server side of one client of a served fabric: its requests and its open objects.

A request is carried out in the fabric's lock and never waits. The session's end is what the kernel does when
a process ends: every group is left, every object destroyed.

A slow client holds nobody up, because nothing is sent to it but answers: messages wait in the receives of
their queue pair, and without a free receive they are lost and counted, as on any other fabric. A receive is
free again when the client gives it back.
"""

from __future__ import annotations

import errno as E
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple, TypeVar

from mcast.api import Cause, ClientProcess, McastError, Phase, QpError, QpState, Refused, mcast_error
from mcast.backends.model.cm import QueuedEvent
from mcast.backends.model.qp import Burst
from mcast.backends.model.times import NS
from mcast.backends.net.readiness import Readiness
from mcast.backends.sim.backend import (
    ASK_WHY_SECONDS,
    SimBackend,
    SimCmId,
    SimEventChannel,
    SimQueuePair,
)
from mcast.backends.sim.core.groups import group_table
from mcast.backends.sim.fabric import Fabric
from mcast.backends.sim.lease import PackedPayloads, Slices
from mcast.backends.sim.served import frames
from mcast.backends.sim.served.control import Control
from mcast.backends.sim.served.tap import TapWriter
from mcast.backends.sim.trace.events import Entry, Trace

T = TypeVar("T", SimEventChannel, SimCmId, SimQueuePair)


class DeferredAnswer(NamedTuple):
    """An answer that is not there yet: `begin` is called with what to call with it."""

    begin: Callable[[Callable[[object], None]], None]


class AnswerWithData(NamedTuple):
    """An answer with more than its value: a descriptor, which the server closes once it is sent; payloads."""

    value: object
    fd: int | None = None
    tail: bytes = b""


class ReadySocket(Readiness):
    """A byte lies in the client's socket while something is there to ask for.

    The server has both ends, so that it can take the byte back; the client has another descriptor of its end.
    """

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self._poll = is_ready
        self.shown: bool = False
        try:
            self.fd: int = self._theirs.dup().detach()  # closed by whoever sends it
        except OSError:
            self.close()
            raise

    def _mark(self, readable: bool) -> None:
        try:
            if readable:
                self._ours.send(b"\1")
            else:
                self._theirs.recv(1)
        except OSError:  # the client has read it, or shut it down, or it is closed
            pass

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class _Qp:
    """State of the session for one queue pair."""

    def __init__(self, flag: ReadySocket) -> None:
        self.flag = flag
        self.answered = 0
        """Number of receives answered with messages, or with none."""
        self.last: Slices = []
        """The messages of the last one, which the client may not have read."""


class ClientSession:
    """One client: a backend on its hosts, and numbers for all that it opens."""

    def __init__(
        self,
        fabric: Fabric,
        name: str,
        hosts: frozenset[int],
        control: Control,
        guests: Callable[[], tuple[ClientProcess, ...]],
    ) -> None:
        self.fabric: Fabric = fabric
        self.hosts: frozenset[int] = hosts
        self.backend: SimBackend = SimBackend(fabric, name, hosts)
        self._control, self._guests = control, guests
        self._numbers = count(1)
        self._open: dict[int, SimEventChannel | SimCmId | SimQueuePair] = {}
        """By number. None is used again: a late request must not meet the next object."""
        self._number_of: dict[SimCmId, int] = {}
        self._answers: dict[SimQueuePair, _Qp] = {}
        self._tap: TapWriter | None = None

    def handle(self, name: str, arguments: tuple[Any, ...], tail: bytes) -> object:
        """Carry out a request; return the value of its answer, `AnswerWithData`, or `DeferredAnswer`.

        Raises McastError, and ValueError for what no client of this package sends.
        """
        try:
            with self.fabric.clock:
                return getattr(self, f"_do_{name}")(*arguments, *([tail] if name == "send" else []))
        except Refused as refused:
            raise refused.error from None

    def close(self) -> None:
        """Destroy everything, leave every group."""
        with self.fabric.clock:
            self.backend._close()
            self._do_untap()
            for kept in (self._open, self._number_of, self._answers):
                kept.clear()

    _do_bye = close

    # --- the backend -------------------------------------------------------------------------

    def _do_devices(self) -> object:
        return self.backend.devices()

    def _do_groups(self) -> object:
        return group_table(self.fabric.core, self.hosts)

    def _do_new_seed(self) -> object:
        return self.backend.new_seed()

    def _do_guests(self) -> object:
        return self._guests()

    def _do_ctl(self, words: list[str]) -> object:
        return self._control.execute(words)

    def _do_port_counters(self, device: str, port_num: int) -> object:
        return self.backend.port_counters(device, port_num)

    def _do_introduction(self) -> object:
        return str(Trace(Entry(0, event) for event in self.fabric.core.introduction()))

    def _do_tap(self) -> AnswerWithData:
        if self._tap is not None:
            raise mcast_error(
                E.EBUSY,
                "tap",
                Phase.OPEN,
                None,
                "this process already has a tap of the fabric: close that first",
            )
        with _descriptors("tap", Phase.OPEN):
            self._tap = TapWriter(self.fabric.clock)
        self.fabric.core.listen(self._tap.note)
        return AnswerWithData(None, self._tap.open_reader())

    def _do_untap(self) -> int:
        """Return how many packets had no room."""
        tap, self._tap = self._tap, None
        if tap is None:
            return 0
        self.fabric.core.unlisten(tap.note)
        tap.close()
        return tap.lost

    # --- channels, ids and queue pairs -----------------------------------------------------------

    def _get(self, kind: type[T], number: int) -> T:
        found = self._open.get(number)
        if not isinstance(found, kind) or found.closed:
            raise mcast_error(E.EBADF, "request", Phase.OPEN, None, "it is closed")
        return found

    def _put(self, made: SimEventChannel | SimCmId | SimQueuePair) -> int:
        number = next(self._numbers)
        self._open[number] = made
        return number

    def _do_close(self, number: int) -> None:
        closed = self._open.pop(number, None)
        if closed is not None:
            closed._close()
        if isinstance(closed, SimCmId):
            self._number_of.pop(closed, None)
        elif isinstance(closed, SimQueuePair):
            self._answers.pop(closed, None)

    def _do_event_channel(self) -> AnswerWithData:
        channel = self.backend.event_channel()
        assert isinstance(channel, SimEventChannel)
        with _descriptors("event_channel", Phase.OPEN, channel):
            flag = ReadySocket(lambda: bool(channel.unread))
        channel.attach_readiness(flag)
        return AnswerWithData(self._put(channel), flag.fd)

    def _do_get_event(self, number: int) -> object:
        """Return the next event. If the SA has refused, the answer waits for the reason that it gives."""
        event = self._get(SimEventChannel, number).take()
        if event is None:
            return None
        answers: list[tuple[Cause, ...]] = []

        def begin(answer: Callable[[object], None]) -> None:
            def once(found: tuple[Cause, ...]) -> None:
                if not answers:
                    answers.append(found)
                    answer(self._fetched(event, found))

            if not event.errno or not event.id.query_refusal(event, once):
                once(())
            elif not answers:
                self.fabric.clock.call_later(round(ASK_WHY_SECONDS * NS), lambda: once(()))

        return DeferredAnswer(begin)

    def _fetched(self, event: QueuedEvent, found: tuple[Cause, ...]) -> frames.FetchedEvent:
        context: Any = None if event.membership is None else event.membership.context
        owner: Any = event.id.owner
        number = self._number_of.get(owner, 0)
        return frames.FetchedEvent(
            event.type, event.status, event.errno, context, number, event.ud, event.detail, found
        )

    def _do_create_id(self, channel: int, port_space: Any) -> int:
        cm_id = self._get(SimEventChannel, channel)._create_id(port_space)
        assert isinstance(cm_id, SimCmId)
        number = self._number_of[cm_id] = self._put(cm_id)
        return number

    def _place_of(self, cm_id: SimCmId) -> frames.IdBinding:
        interface = cm_id.core.interface
        return frames.IdBinding(cm_id.device, cm_id.link_layer, None if interface is None else interface.pkey)

    def _do_bind_addr(self, number: int, src: Any) -> frames.IdBinding:
        cm_id = self._get(SimCmId, number)
        cm_id._bind_addr(src)
        return self._place_of(cm_id)

    def _do_resolve_addr(self, number: int, dst: Any, src: Any) -> frames.IdBinding:
        cm_id = self._get(SimCmId, number)
        cm_id._resolve_addr(dst, src, 0)
        return self._place_of(cm_id)

    def _do_join(self, number: int, call: str, mask: int, flags: int, addr: Any, context: int) -> None:
        self._get(SimCmId, number)._join_multicast(addr, context, call, mask, flags)

    def _do_leave_multicast(self, number: int, addr: Any) -> None:
        self._get(SimCmId, number)._leave_multicast(addr)

    def _do_create_qp(self, number: int, init: Any) -> AnswerWithData:
        qp = self._get(SimCmId, number)._create_qp(init)
        assert isinstance(qp, SimQueuePair)
        core = qp.core
        with _descriptors("create_qp", Phase.CREATE_QP, qp):
            flag = ReadySocket(lambda: core.readable or core.port_changed)
        qp.attach_readiness(flag)
        self._answers[qp] = _Qp(flag)
        answer = frames.CreatedQp(self._put(qp), core.number, core.port.mtu, core.depth, core.stamps)
        return AnswerWithData(answer, flag.fd)

    def _do_query_qp(self, number: int) -> object:
        core = self._get(SimQueuePair, number).core
        return core.state, core.counters

    def _do_attachments(self, number: int) -> object:
        return tuple(self._get(SimQueuePair, number).attachments.items())

    def _do_port_events(self, number: int) -> object:
        return self._get(SimQueuePair, number).port_events()

    def _do_modify(self, number: int, state: QpState) -> None:
        qp = self._get(SimQueuePair, number)
        qp._modify(state)
        self._answers[qp].last = []

    def _do_attach_mcast(self, number: int, gid: Any, lid: int) -> None:
        self._get(SimQueuePair, number)._attach_mcast(gid, lid)

    def _do_detach_mcast(self, number: int, gid: Any, lid: int) -> None:
        self._get(SimQueuePair, number)._detach_mcast(gid, lid)

    def _do_send(self, number: int, to: str, lengths: list[int], imm: int | None, tail: bytes) -> None:
        qp = self._get(SimQueuePair, number)
        if sum(lengths) != len(tail):
            raise ValueError(f"the lengths of the payloads sum to {sum(lengths)} bytes, but {len(tail)} came")
        if (longest := max(lengths, default=0)) > qp.core.port.mtu:
            raise mcast_error(E.EMSGSIZE, "send", Phase.SEND, {"bytes": longest})
        payloads: Any = [tail] if len(lengths) == 1 else PackedPayloads(tail, lengths)
        qp._send(frames.destination_of(to), payloads, imm, 0, longest)

    def _do_recv(self, number: int, limit: int, got: int) -> AnswerWithData:
        """Return the next messages; the last ones again if the client has not got their answer."""
        qp = self._get(SimQueuePair, number)
        core, known = qp.core, self._answers[qp]
        if got == known.answered:
            known.last = core.lease(limit)
            if not known.last and core.error is not None:
                raise QpError(core.error, "recv", Phase.RECV)
            known.answered += 1
        core.port_changed = core.port_changed and bool(known.last)
        known.flag.show()
        messages = [_messages(core.is_own(one[0].header), *one) for one in known.last]
        tail = b"".join(_payloads(*one) for one in known.last)
        return AnswerWithData(frames.Received(messages, bool(core.port_events)), tail=tail)

    def _do_give_back(self, number: int, count: int) -> None:
        core = self._get(SimQueuePair, number).core
        core.free = min(core.depth, core.free + count)

    def _do_register(self, number: int, receives: tuple[int, int] | None) -> None:
        qp = self._get(SimQueuePair, number)
        if receives is None:
            qp.post_default()
        else:
            qp.post(*receives)
        self._answers[qp].last = []


def _messages(own: bool, burst: Burst, start: int, stop: int) -> frames.Messages:
    source, src_qp, group, _, _, _, slid = burst.header
    payloads = burst.payloads
    lengths = (
        payloads.lengths if isinstance(payloads, PackedPayloads) else [len(payload) for payload in payloads]
    )
    return frames.Messages(
        str(source), str(group), src_qp, slid, burst.imm, own, burst.at, list(lengths[start:stop])
    )


def _payloads(burst: Burst, start: int, stop: int) -> bytes | memoryview:
    payloads = burst.payloads
    return (
        payloads.part(start, stop) if isinstance(payloads, PackedPayloads) else b"".join(payloads[start:stop])
    )


def refusal_of(error: McastError) -> frames.Refusal:
    """Return the answer to a call that failed."""
    status = error.status if isinstance(error, QpError) else None
    return frames.Refusal(error.errno or E.EIO, error.detail, status)


@contextmanager
def _descriptors(
    call: str, phase: Phase, made: SimEventChannel | SimQueuePair | None = None
) -> Iterator[None]:
    """Refuse the call, and close what was made for it, if the block gets no descriptor."""
    try:
        yield
    except OSError as error:
        if made is not None:
            made._close()
        detail = f"the server has no file descriptor left (ulimit -n): {os.strerror(error.errno or E.EMFILE)}"
        raise mcast_error(error.errno or E.EMFILE, call, phase, None, detail) from None
