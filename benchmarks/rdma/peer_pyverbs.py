"""pyverbs with the same commands, one message by one: its calls take no batches.

PYTHON peer_pyverbs.py SENDER_ADDRESS RECEIVER_ADDRESS...        PYTHON has Debian's pyverbs, or PyPI's
"""

from __future__ import annotations

import json
import sys
from time import monotonic as now
from typing import Any

try:
    import pyverbs.libibverbs_enums as e
    import pyverbs.librdmacm_enums as ce
except ImportError:  # rdma-core 44
    import pyverbs.cm_enums as ce
    import pyverbs.enums as e
from pyverbs.addr import AH
from pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, JoinMCAttrEx, UDParam
from pyverbs.cq import CQ
from pyverbs.mr import MR
from pyverbs.qp import QPCap, QPInitAttr

DATA, BACK, GRH, DEPTH, SENDS, SLOT = "239.9.1.1", "239.9.1.2", 40, 512, 128, 2048
MULTICAST_QPN, GIVE_UP = 0xFFFFFF, 5.0


class End:
    def __init__(self, address: str) -> None:
        self.channel = CMEventChannel()
        self.id = CMID(creator=self.channel, port_space=ce.RDMA_PS_UDP)
        self.source = AddrInfo(src=address, port_space=ce.RDMA_PS_UDP, flags=ce.RAI_PASSIVE)
        self.id.bind_addr(self.source)
        self.send_cq, self.recv_cq = CQ(self.id.context, SENDS), CQ(self.id.context, DEPTH)
        cap = QPCap(max_send_wr=SENDS, max_recv_wr=DEPTH, max_send_sge=1, max_recv_sge=1)
        self.id.create_qp(QPInitAttr(qp_type=e.IBV_QPT_UD, scq=self.send_cq, rcq=self.recv_cq, cap=cap))
        self.send_mr = MR(self.id.pd, SLOT, e.IBV_ACCESS_LOCAL_WRITE)
        self.recv_mr = MR(self.id.pd, SLOT, e.IBV_ACCESS_LOCAL_WRITE)
        for _ in range(DEPTH):
            self.id.post_recv(self.recv_mr)
        self.groups: list[AddrInfo] = []
        self.ah: AH | None = None

    def join(self, group: str, send_only: bool = False) -> None:
        address = AddrInfo(src=group)
        self.groups.append(address)  # JoinMCAttrEx only points into it
        mask = ce.RDMA_CM_JOIN_MC_ATTR_ADDRESS | ce.RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS
        flag = ce.RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER if send_only else ce.RDMA_MC_JOIN_FLAG_FULLMEMBER
        self.id.join_multicast(mc_attr=JoinMCAttrEx(addr=address, comp_mask=mask, join_flags=flag))
        event = CMEvent(self.channel)
        if send_only:
            self.ah = AH(self.id.pd, attr=UDParam(event).ah_attr)
        event.ack_cm_event()

    def close(self) -> None:
        """In the one order that works: each of these refuses to end while the next uses it."""
        for group in self.groups:
            self.id.leave_multicast(group)
        if self.ah is not None:
            self.ah.close()
        self.recv_mr.close()
        self.send_mr.close()
        self.id.close()
        self.recv_cq.close()
        self.send_cq.close()

    def send(self, size: int) -> None:
        self.id.post_ud_send(self.send_mr, self.ah, MULTICAST_QPN, e.IBV_SEND_SIGNALED, size)
        while not self.send_cq.poll(1)[0]:
            pass

    def receive(self, seconds: float) -> bytes | None:
        end = now() + seconds
        poll = self.recv_cq.poll
        while True:
            count, completions = poll(1)
            if count:
                break
            if now() > end:
                return None
        payload: bytes = self.recv_mr.read(completions[0].byte_len - GRH, GRH)
        self.id.post_recv(self.recv_mr)
        return payload


def until_heard(sender: End, receiver: End) -> None:
    for _ in range(100):
        sender.send(1)
        if receiver.receive(0.1) is not None:
            return
    raise TimeoutError


def single(addresses: list[str], size: int, count: int) -> dict[str, Any]:
    sender, receiver = End(addresses[0]), End(addresses[1])
    receiver.join(DATA)
    sender.join(DATA, send_only=True)
    until_heard(sender, receiver)
    lost, start = 0, now()
    for _ in range(count):
        sender.send(size)
        lost += receiver.receive(GIVE_UP) is None
    spent = now() - start
    sender.close()
    receiver.close()
    return {"count": count, "seconds": spent, "lost": lost}


def pingpong(addresses: list[str], size: int, count: int) -> dict[str, Any]:
    near, far = End(addresses[0]), End(addresses[1])
    near.join(BACK)
    far.join(DATA)
    near.join(DATA, send_only=True)
    far.join(BACK, send_only=True)
    until_heard(near, far)
    until_heard(far, near)
    latencies, begin = [], now()
    for _ in range(count):
        start = now()
        near.send(size)
        far.receive(GIVE_UP)
        far.send(size)
        near.receive(GIVE_UP)
        latencies.append(now() - start)
    spent = now() - begin
    near.close()
    far.close()
    latencies.sort()
    p50, p99 = latencies[count // 2], latencies[count * 99 // 100]
    return {"count": count, "seconds": spent, "lost": 0, "p50": p50, "p99": p99}


if __name__ == "__main__":
    for line in sys.stdin:
        what, *numbers = line.split()
        found = {"single": single, "pingpong": pingpong}[what](sys.argv[1:], *map(int, numbers))
        print(json.dumps(found), flush=True)
