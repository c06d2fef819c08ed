"""The C core with types: the one module that uses cffi's `ffi` and `lib`.

Handles are opaque. A call that fails raises the `McastError` of its errno; C itself only returns -errno. The
calls of `Native.guarded` raise the same inside a `Refused`, for code that changes something under a guard
(mcast/contract/poison.py).

C writes each handle that it makes to memory (`HandleRef`) that a Python object owns before the call, and
clears it there when it frees the handle. So an exception between two lines of Python cannot leak a handle.
"""

from __future__ import annotations

import errno as E
import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, NewType, NoReturn, cast

from mcast.api import Guard, QpCounters, Refused
from mcast.errors.cause import Phase
from mcast.errors.tree import Closed, McastError, UnavailableReason, mcast_error

if TYPE_CHECKING:
    from mcast.backends.rdma._native import Lib

NativeChannel = NewType("NativeChannel", object)
NativeId = NewType("NativeId", object)
NativeQp = NewType("NativeQp", object)
Pd = NewType("Pd", object)
Mr = NewType("Mr", object)
Context = NewType("Context", object)
HandleRef = NewType("HandleRef", object)
"""Where C writes a handle that it makes: what `Native.id_ref` and its like return."""
Pointer = Any
"""A cffi pointer to one of the structs of cdefs.h."""
Arguments = Mapping[str, object] | None
"""The caller's arguments, for the error's text."""


class Unusable(Exception):
    """The extension or a library is not there; `reason` and `detail` say which and why."""

    def __init__(self, reason: UnavailableReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason: UnavailableReason = reason
        self.detail: str = detail


NativeEvent = tuple[int, int, int, int, int, bytes]
"""One communication event: type, status, errno, token of the id, token of the join, packed rdma_ud_param."""

EVENT = Struct("=iii4xQQ37s3x")
"""struct mcast_event."""


class Ud(NamedTuple):
    """The rdma_ud_param of a multicast event."""

    qp_num: int
    qkey: int
    flow_label: int
    dlid: int
    sl: int
    port_num: int
    is_global: int
    sgid_index: int
    hop_limit: int
    traffic_class: int
    static_rate: int
    dgid: bytes

    @classmethod
    def unpack(cls, raw: bytes) -> Ud:
        """Unpack the last field of a NativeEvent."""
        return cls._make(_UD.unpack(raw))


_UD = Struct("=IIIHBBBBBBB16s")


class NativeFailure(NamedTuple):
    """Reason why a QP is in ERR.

    ibv_wc_status; 0, or the asynchronous event plus 1, GONE or IMPOSSIBLE; number of sends lost by it.
    """

    status: int
    reason: int
    unsent: int


GONE = 1000
"""The reason of a QP whose device is gone."""

IMPOSSIBLE = 1001
"""The reason of a QP whose driver has reported a completion that cannot be true."""


class EventBuffer(NamedTuple):
    """A struct mcast_event, and its memory."""

    pointer: Pointer
    buffer: Any


class RefusedFeature(IntEnum):
    """An optional feature of a queue pair that the device refused."""

    NOTHING = 0
    TIMESTAMPS = 1
    MODERATION = 2


class QpPlan(NamedTuple):
    """The numbers of struct mcast_qp_init: depths, rooms, strides and offsets in bytes; flags.

    The fields from `comp_vector` on are for the completion queues; `busy_poll` is in nanoseconds.
    """

    qp_type: int
    send_depth: int
    send_room: int
    send_stride: int
    send_offset: int
    recv_depth: int
    recv_room: int
    recv_stride: int
    recv_offset: int
    grh_stride: int
    block_loopback: bool
    is_ethernet: bool
    comp_vector: int = 0
    moderation_count: int = 0
    moderation_period: int = 0
    timestamps: bool = False
    busy_poll: int = 0


_FIRST_DEVICES = 128
"""Twice as many names are asked for first."""
_MAX_ADDRESSES = 4096
_MAX_GIDS = 2000
"""The most GIDs of one device, because the answer to a query is at most 64 KiB of 32-byte entries."""


class Native:
    """The loaded libraries. Every method is one call into C, which releases the GIL while it runs."""

    def __init__(self, ffi: Any, lib: Lib, is_guarded: bool = False) -> None:
        self._ffi, self._lib = ffi, lib
        self._failure: Callable[[McastError], Exception] = Refused if is_guarded else _as_it_is
        self.guarded: Native = self if is_guarded else Native(ffi, lib, True)
        """These calls, for code under a guard."""
        self.null: Pointer = ffi.NULL
        # without a frame for what goes well: these return -errno, for `check_join` and so on
        self.join: Callable[[NativeId, Pointer, int], int] = lib.mcast_join
        self.leave: Callable[[NativeId, Pointer], int] = lib.mcast_leave
        self.take_event: Callable[[NativeChannel, Pointer], int] = lib.mcast_take_event
        """Read, copy and ack the next event: 1; 0 when there is none. Never waits.

        Until `forget_event` the same event is taken again.
        """
        self.close_device: Callable[[HandleRef], None] = lib.mcast_close_device
        """Close what is open there, in a `finally`: without a line of Python that an exception may end."""

    @property
    def has_join_ex(self) -> bool:
        """True if this librdmacm has rdma_join_multicast_ex."""
        return bool(self._lib.mcast_has_join_ex())

    def verbs_library(self) -> str:
        """The file that libibverbs was loaded from; "" if it is not known."""
        return self._text(self._lib.mcast_verbs_library())

    # --- devices ---

    def device_names(self) -> tuple[str, ...]:
        room = count = _FIRST_DEVICES
        while count == room:  # there may be more: hundreds of virtual functions, say
            room *= 2
            names = self._ffi.new("char[][64]", room)
            count = self._check(self._lib.mcast_device_names(names, room), "devices", Phase.OPEN)
        return tuple(self._text(names[index]) for index in range(count))

    def device_ref(self) -> HandleRef:
        return cast(HandleRef, self._ffi.new("struct ibv_context **"))

    def open_device(self, name: str, ref: HandleRef) -> Context:
        """Open a device; the caller closes it in a `finally`."""
        result = self._lib.mcast_open_device(os.fsencode(name), ref)
        self._check(result, "open_device", Phase.OPEN, {"device": name})
        return cast(Context, cast(Any, ref)[0])

    def query_device(self, context: Context) -> Pointer:
        out = self._ffi.new("struct mcast_device *")
        self._check(self._lib.mcast_query_device(context, out), "query_device", Phase.OPEN)
        return out

    def comp_vectors(self, context: Context) -> int:
        """Return the number of completion vectors of the device: 1 or more."""
        return self._lib.mcast_comp_vectors(context)

    def query_port(self, context: Context, port: int) -> Pointer:
        out = self._ffi.new("struct mcast_port *")
        self._check(self._lib.mcast_query_port(context, port, out), "query_port", Phase.OPEN, {"port": port})
        return out

    def query_gid(self, context: Context, port: int, index: int) -> bytes:
        out = self._ffi.new("uint8_t[16]")
        result = self._lib.mcast_query_gid(context, port, index, out)
        self._check(result, "query_gid", Phase.OPEN, {"port": port, "index": index})
        return bytes(self._ffi.buffer(out))

    def query_gids(self, context: Context) -> list[tuple[int, int, int, bytes]]:
        """(port, table index, index of the network interface or 0, GID) of every GID that is set."""
        out = self._ffi.new("struct mcast_gid[]", _MAX_GIDS)
        count = self._check(self._lib.mcast_query_gids(context, out, _MAX_GIDS), "query_gids", Phase.OPEN)
        return [
            (one.port, one.index, one.ifindex, bytes(self._ffi.buffer(one.gid)))
            for one in (out[index] for index in range(count))
        ]

    def netdev_addresses(self) -> list[tuple[str, bytes]]:
        """(interface, packed IPv4 or IPv6 address) of this host."""
        out = self._ffi.new("struct mcast_netdev_address[]", _MAX_ADDRESSES)
        count = self._check(self._lib.mcast_netdev_addresses(out, _MAX_ADDRESSES), "getifaddrs", Phase.OPEN)
        return [
            (self._text(one.netdev), bytes(self._ffi.buffer(one.address, one.bytes)))
            for one in (out[index] for index in range(count))
        ]

    def sync_devices(self) -> None:
        """Let librdmacm close the contexts of removed devices that no id holds any more."""
        self._lib.mcast_sync_devices()

    # --- channels and ids ---

    def channel_ref(self) -> HandleRef:
        return cast(
            HandleRef, self._ffi.gc(self._ffi.new("struct mcast_channel **"), self._lib.mcast_free_channel)
        )

    def is_made(self, ref: HandleRef) -> bool:
        """False before a handle is made there, and when it is freed."""
        return bool(cast(Any, ref)[0] != self.null)

    def channel(self, ref: HandleRef) -> NativeChannel:
        return cast(NativeChannel, cast(Any, ref)[0])

    def open_channel(self, ref: HandleRef) -> None:
        self._check(self._lib.mcast_open_channel(ref), "event_channel", Phase.OPEN)

    def channel_fd(self, channel: NativeChannel) -> int:
        return self._check(self._lib.mcast_channel_fd(channel), "fileno", Phase.EVENT)

    def close_channel(self, channel: NativeChannel, has_ids: bool) -> None:
        """End the calls that wait for an event, and free the channel, unless an id of it is left."""
        self._lib.mcast_close_channel(channel, has_ids)

    def has_event(self, channel: NativeChannel) -> bool:
        return bool(self._check(self._lib.mcast_has_event(channel), "get_event", Phase.EVENT))

    def event_buffer(self) -> EventBuffer:
        """Memory that `take_event` copies each event into."""
        out = self._ffi.new("struct mcast_event *")
        return EventBuffer(out, self._ffi.buffer(out))

    def forget_event(self, event: Pointer) -> None:
        event.is_taken = 0

    def check_take(self, result: int) -> None:
        self._check(result, "get_event", Phase.EVENT)

    def id_ref(self) -> HandleRef:
        return cast(HandleRef, self._ffi.gc(self._ffi.new("struct mcast_id **"), self._lib.mcast_free_id))

    def id(self, ref: HandleRef) -> NativeId:
        return cast(NativeId, cast(Any, ref)[0])

    def create_id(self, channel: NativeChannel, token: int, port_space: int, ref: HandleRef) -> None:
        result = self._lib.mcast_create_id(channel, token, port_space, ref)
        self._check(result, "create_id", Phase.OPEN, {"port_space": port_space})

    def destroy_id(self, id: NativeId) -> None:
        self._check(self._lib.mcast_destroy_id(id), "destroy", Phase.DESTROY)

    def bind_addr(self, id: NativeId, address: bytes, arguments: Arguments = None) -> None:
        self._check(self._lib.mcast_bind_addr(id, address), "bind_addr", Phase.BIND, arguments)

    def resolve_addr(
        self,
        id: NativeId,
        source: bytes | None,
        destination: bytes | None,
        timeout_ms: int,
        arguments: Arguments = None,
    ) -> None:
        result = self._lib.mcast_resolve_addr(id, source or self.null, destination or self.null, timeout_ms)
        self._check(result, "resolve_addr", Phase.RESOLVE, arguments)

    def check_join(self, result: int, addr: object) -> None:
        self._check(result, "join_multicast", Phase.JOIN, {"addr": addr})

    def join_ex(
        self, id: NativeId, mask: int, flags: int, address: bytes | None, token: int, addr: object
    ) -> None:
        """Join. `addr` is the caller's address, for the error's text."""
        result = self._lib.mcast_join_ex(id, mask, flags, address or self.null, token)
        if not result:
            return
        arguments = {"comp_mask": mask, "join_flags": flags, "addr": addr}
        detail = ""
        if result == -E.ENOSYS and not self.has_join_ex:
            detail = (
                "this librdmacm has no rdma_join_multicast_ex (RDMACM_1.1): upgrade rdma-core to 17 or newer"
            )
        self._check(result, "join_multicast_ex", Phase.JOIN, arguments, detail)

    def check_leave(self, result: int, addr: object) -> None:
        self._check(result, "leave_multicast", Phase.LEAVE, {"addr": addr})

    def id_device(self, id: NativeId) -> str | None:
        name = self._lib.mcast_id_device(id)
        return None if name == self.null else self._text(name)

    def id_context(self, id: NativeId) -> Context | None:
        """The verbs context of the device the id is bound to; equal ones hash alike."""
        context = self._lib.mcast_id_context(id)
        return None if context == self.null else context

    def id_port(self, id: NativeId) -> int:
        return self._lib.mcast_id_port(id)

    # --- QPs ---

    def id_pkey(self, id: NativeId) -> int:
        """The P_Key of the interface that the id is bound to. It has no meaning on Ethernet."""
        return self._lib.mcast_id_pkey(id)

    def pd_ref(self) -> HandleRef:
        return cast(HandleRef, self._ffi.new("struct ibv_pd **"))

    def pd(self, ref: HandleRef) -> Pd:
        return cast(Pd, cast(Any, ref)[0])

    def alloc_pd(self, id: NativeId, ref: HandleRef) -> None:
        self._check(self._lib.mcast_alloc_pd(id, ref), "create_qp", Phase.CREATE_QP)

    def dealloc_pd(self, ref: HandleRef) -> None:
        self._check(self._lib.mcast_dealloc_pd(ref), "dealloc_pd", Phase.CLOSE)

    def create_qp(
        self,
        id: NativeId,
        pd: Pd,
        plan: QpPlan,
        slab: Any,
        ref: int,
        why: Callable[[RefusedFeature, int], str] = lambda refused, error: "",
        arguments: Arguments = None,
    ) -> NativeQp:
        """Create a queue pair. The caller keeps `slab`, a writable buffer, alive as long as the queue pair.

        `place` is the address that `Calls._arm` returned. `why` gives the error's detail, from what the
        device refused and the errno.
        """
        memory = self._ffi.from_buffer(slab)
        init = self._ffi.new("struct mcast_qp_init *", plan._asdict())
        init.slab, init.slab_bytes = memory, len(memory)
        refused = self._ffi.new("int *")
        result = self._lib.mcast_create_qp(id, pd, init, self._ffi.cast("struct mcast_qp **", ref), refused)
        if result:
            self._check(
                result, "create_qp", Phase.CREATE_QP, arguments, why(RefusedFeature(refused[0]), -result)
            )
        return self.qp(ref)

    def qp(self, ref: int) -> NativeQp:
        """Return the queue pair that was made there; None before."""
        return cast(NativeQp, self._ffi.cast("struct mcast_qp **", ref)[0])

    def clock(self, qp: NativeQp) -> int:
        """Of the time stamps: STAMPS_NONE and so on of cdefs.h."""
        return self._lib.mcast_clock(qp)

    def close_qp(self, qp: NativeQp, linger: float) -> None:
        """End all calls on the queue pair, and free everything.

        The device has `linger` seconds for sends that are posted.

        A step that fails is tried again the next time. The struct itself is freed with `Calls`.
        """
        self._check(self._lib.mcast_close_qp(qp, int(linger * 1e9)), "close", Phase.DESTROY)

    def drain(self, qp: NativeQp, budget: float) -> bool:
        """Wait until no send is under way, whatever signals come; False if `budget` seconds have passed."""
        return self._lib.mcast_drain(qp, int(budget * 1e9)) != 0

    def qp_num(self, qp: NativeQp) -> int:
        return self._lib.mcast_qp_num(qp)

    def query_qp(self, qp: NativeQp) -> int:
        """The ibv_qp_state now."""
        return self._check(self._lib.mcast_query_qp(qp), "query_qp", Phase.MODIFY)

    def modify_qp(
        self, qp: NativeQp, state: int, arguments: Arguments = None, keeps_failure: bool = False
    ) -> None:
        """A reset forgets why the queue pair was in ERR, or keeps that for when it comes back there."""
        result = self._lib.mcast_modify_qp(qp, state, keeps_failure)
        self._check(result, "modify", Phase.MODIFY, arguments)

    def attach(self, qp: NativeQp, gid: bytes, lid: int, arguments: Arguments = None) -> None:
        self._check(self._lib.mcast_attach(qp, gid, lid), "attach_mcast", Phase.ATTACH, arguments)

    def detach(self, qp: NativeQp, gid: bytes, lid: int, arguments: Arguments = None) -> None:
        self._check(self._lib.mcast_detach(qp, gid, lid), "detach_mcast", Phase.DETACH, arguments)

    def try_to_detach(self, qp: NativeQp, gid: bytes, lid: int) -> None:
        """Detach; no error tells of what cannot be detached."""
        self._lib.mcast_detach(qp, gid, lid)

    def detach_late(self, qp: NativeQp, gid: bytes, lid: int) -> None:
        """Detach a queue pair that `close_qp` could not destroy. Not being attached is no error."""
        self._lib.mcast_detach_late(qp, gid, lid)

    def mr_ref(self) -> HandleRef:
        return cast(HandleRef, self._ffi.new("struct ibv_mr **"))

    def mr(self, ref: HandleRef) -> Mr:
        return cast(Mr, cast(Any, ref)[0])

    def register(
        self, pd: Pd, buffer: memoryview, relaxed: bool, ref: HandleRef, arguments: Arguments = None
    ) -> None:
        memory = self._ffi.from_buffer(buffer)
        result = self._lib.mcast_register(pd, memory, len(memory), not buffer.readonly, relaxed, ref)
        self._check(result, "register", Phase.REGISTER, arguments)

    def register_dmabuf(
        self,
        pd: Pd,
        fd: int,
        size: int,
        offset: int,
        iova: int,
        writable: bool,
        relaxed: bool,
        ref: HandleRef,
        arguments: Arguments = None,
    ) -> None:
        """Register. `iova` is the address that the memory has for the device."""
        result = self._lib.mcast_register_dmabuf(pd, fd, offset, size, iova, writable, relaxed, ref)
        if result == -E.EBADF:  # the program's descriptor is closed, not one of mcast's objects
            error = mcast_error(E.EBADF, "register_dmabuf", Phase.REGISTER, arguments, "fd is not open")
            raise self._failure(error)
        detail = ""
        if result == -E.ENOSYS and not self._lib.mcast_has_dmabuf():
            detail = (
                "this libibverbs has no ibv_reg_dmabuf_mr (IBVERBS_1.12): upgrade rdma-core to 34 or newer"
            )
        elif result == -E.EOPNOTSUPP:
            detail = "the device or its driver takes no DMA-BUF: copy what is sent to the host's memory first"
        self._check(result, "register_dmabuf", Phase.REGISTER, arguments, detail)

    def lkey(self, mr: Mr) -> int:
        return self._lib.mcast_lkey(mr)

    def deregister(self, ref: HandleRef) -> None:
        self._check(self._lib.mcast_deregister(ref), "close", Phase.REGISTER)

    def address_of(self, buffer: Any) -> int:
        """The address of the buffer's bytes, valid while the caller keeps the buffer."""
        return int(self._ffi.cast("uintptr_t", self._ffi.from_buffer(buffer)))

    def new_ah(self, qp: NativeQp, gid: bytes, fields: Mapping[str, int], arguments: Arguments = None) -> int:
        """An address handle, by the serial that `Calls` takes."""
        init = self._ffi.new("struct mcast_ah_init *", {"gid": list(gid), **fields})
        out = self._ffi.new("uint64_t *")
        self._check(self._lib.mcast_new_ah(qp, init, out), "send", Phase.SEND, arguments)
        return int(out[0])

    def retire_ah(self, qp: NativeQp, serial: int) -> None:
        """Post no more messages with the handle; it is destroyed when no posted message needs it."""
        self._lib.mcast_retire_ah(qp, serial)

    def set_regions(self, qp: NativeQp, regions: Sequence[tuple[int, int, int, bool, bool]]) -> None:
        """(start, end, lkey, is on a device) of the memory that is sent from without a copy, from now on."""
        array = self._ffi.new("struct mcast_region[]", list(regions))
        self._check(self._lib.mcast_set_regions(qp, array, len(regions)), "register", Phase.REGISTER)

    # --- data ---

    def address(self, handle: object) -> int:
        """Where an object of C is, for `Calls`."""
        return int(self._ffi.cast("uintptr_t", handle))

    def recv_fd(self, qp: NativeQp) -> int:
        """Return a descriptor that is readable when a receive would find something.

        A receive that found nothing arms it.
        """
        return self._check(self._lib.mcast_recv_fd(qp), "fileno", Phase.RECV)

    def send_fd(self, qp: NativeQp) -> int:
        """Return a descriptor that is readable when a send can go on."""
        return self._check(self._lib.mcast_send_fd(qp), "send_fileno", Phase.SEND)

    def failure(self, qp: NativeQp) -> NativeFailure:
        out = self._ffi.new("struct mcast_failure *")
        self._lib.mcast_read_failure(qp, out)
        return NativeFailure(out.status, out.reason, out.unsent)

    def port_changes(self, qp: NativeQp) -> int:
        """Return the number of events of the QP's port so far."""
        self._lib.mcast_read_async(qp)
        return self._lib.mcast_port_changes(qp)

    def port_events(self, qp: NativeQp) -> list[int]:
        """The ibv_event_types by which the port has told of something since the last call."""
        out = self._ffi.new("uint8_t[]", self._lib.PORT_EVENTS)
        count = self._check(self._lib.mcast_read_port_events(qp, out), "port_events", Phase.EVENT)
        return list(out[0:count])

    def counters(self, qp: NativeQp) -> QpCounters:
        """Return the counters of the QP; None for those that only the device has."""
        out = self._ffi.new("struct mcast_counters *")
        self._lib.mcast_read_counters(qp, out)
        names = ("sent", "received", "recv_free", "recv_low_water", "recv_empty", "unsent")
        counted = {name: getattr(out, name) for name in (*names, "dropped_reset", "dropped_invalid")}
        return QpCounters(dropped_no_receive=None, dropped_too_long=None, dropped_qkey=None, **counted)

    def is_receiving(self, qp: NativeQp) -> bool:
        """Return True if a message is leased, or waits to be received."""
        return bool(self._lib.mcast_is_receiving(qp))

    def receive_into(
        self, qp: NativeQp, mr: Mr | None, address: int = 0, slot: int = 0, count: int = 0
    ) -> int:
        """In RESET: take payloads into the memory of `mr`, one each `slot` bytes; None: into the slab.

        Returns the generation that the records of messages received there carry.
        """
        result = self._lib.mcast_receive_into(qp, self.null if mr is None else mr, address, slot, count)
        return self._check(result, "register", Phase.REGISTER)

    # --- helpers ---

    def fail(self, error: McastError) -> NoReturn:
        """Raise the error as a call that fails does."""
        raise self._failure(error)

    def _text(self, pointer: Pointer) -> str:
        return os.fsdecode(self._ffi.string(pointer))

    def _check(
        self, result: int, call: str, phase: Phase, arguments: Arguments = None, detail: str = ""
    ) -> int:
        if result == -E.EBADF:  # what C says of an object that was closed meanwhile
            raise self._failure(Closed("object", call, phase))
        if result < 0:
            raise self._failure(mcast_error(-result, call, phase, arguments, detail))
        return result


def _as_it_is(error: McastError) -> McastError:
    return error


LIBRARIES = {"MCAST_LIBRDMACM": "librdmacm.so.1", "MCAST_LIBIBVERBS": "libibverbs.so.1"}
"""Environment variable -> the library that is loaded unless the variable names another file."""

_loading = Guard("libraries").lock
_loaded: Native | None = None


def load() -> Native:
    """Load the libraries, once.

    Raises Unusable. A failure is not remembered, so a later call sees that it was repaired.
    """
    global _loaded
    with _loading:
        if _loaded is None:
            _loaded = _load()
        return _loaded


def _load() -> Native:
    try:
        module: Any = importlib.import_module("mcast.backends.rdma._native")
    except ModuleNotFoundError as error:
        raise Unusable(UnavailableReason.NOT_BUILT, f"there is no module {error.name}") from error
    except ImportError as error:
        raise Unusable(UnavailableReason.BROKEN, str(error)) from error
    rdmacm, ibverbs = (os.environ.get(name) or usual for name, usual in LIBRARIES.items())
    reason = module.ffi.new("char[]", 1024)
    if module.lib.mcast_load(rdmacm.encode(), ibverbs.encode(), reason, len(reason)):
        raise Unusable(UnavailableReason.NO_LIBRARY, module.ffi.string(reason).decode())
    if needs_fork_init(os.uname().release):
        module.lib.mcast_fork_init()
    return Native(module.ffi, module.lib)


def needs_fork_init(release: str) -> bool:
    """Return True if libibverbs must exclude registered memory from forked children.

    Since Linux 5.12 the kernel copies the pages that a device uses for the child.
    """
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return numbers is not None and tuple(map(int, numbers.groups())) < (5, 12)
