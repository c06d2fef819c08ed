"""One block of memory for each queue pair: GRHs, receive payloads, and the copies that are sent."""

from __future__ import annotations

import errno as E
import mmap

from mcast.api import Cause, Phase, QpInit, Refused, mcast_error
from mcast.backends.rdma.native import Arguments, QpPlan

CACHE_LINE = 64
_MADV_WIPEONFORK = 18
_FIX = "ask for fewer or smaller messages: max_recv_wr, max_recv_size, max_send_wr of QpInit"


def layout(init: QpInit, active_mtu: int, max_mtu: int, is_ethernet: bool = True) -> tuple[QpPlan, int]:
    """Where everything lies in the block, and how many bytes the block takes.

    A receive has room for one MTU unless the user says otherwise; a send for the largest MTU that the port
    may ever have.
    """
    recv_room = active_mtu if init.max_recv_size is None else init.max_recv_size
    recv_stride = CACHE_LINE + _round_up(recv_room)  # a GRH in front of each payload
    recv_offset = (init.max_recv_wr + 1) * CACHE_LINE  # behind the GRHs for user memory
    send_stride = _round_up(max_mtu)
    send_offset = recv_offset + init.max_recv_wr * recv_stride
    plan = QpPlan(
        qp_type=int(init.qp_type),
        send_depth=init.max_send_wr,
        send_room=max_mtu,
        send_stride=send_stride,
        send_offset=send_offset,
        recv_depth=init.max_recv_wr,
        recv_room=recv_room,
        recv_stride=recv_stride,
        recv_offset=recv_offset,
        grh_stride=CACHE_LINE,
        block_loopback=init.block_loopback,
        is_ethernet=is_ethernet,
    )
    return plan, send_offset + init.max_send_wr * send_stride


def allocate(size: int, arguments: Arguments = None) -> mmap.mmap:
    """Page-aligned private memory. It lives as long as a view of it, so a payload outlives its queue pair.

    If the host has no room for it, the error says so, and how many bytes the queue pair needs.
    """
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        refused = mcast_error(error.errno or E.ENOMEM, "create_qp", Phase.CREATE_QP, arguments)
        why = f"the host has no {size} bytes for the messages that the queue pair sends and receives"
        refused.found = (Cause(why, "free -m; ulimit -v", _FIX),)
        raise Refused(refused) from None
    # A forked child gets zeros, because its writes must not move pages that the device writes to.
    memory.madvise(_MADV_WIPEONFORK)
    return memory


def _round_up(size: int) -> int:
    return -(-size // CACHE_LINE) * CACHE_LINE
