"""Reproducers for the reports on pyverbs: `python3 pyverbs_multicast.py CASE ADDRESS`.

The address is of a RoCE port of this host. Each case prints what pyverbs does.
"""

import sys
import threading
import time
from pathlib import Path

import pyverbs.cm_enums as ce
import pyverbs.enums as e
from pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, JoinMCAttrEx
from pyverbs.cq import CQ
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPCap, QPInitAttr

BOTH = ce.RDMA_CM_JOIN_MC_ATTR_ADDRESS | ce.RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS


def opened(address):
    """An event channel and an id that is bound to the port with that address."""
    channel = CMEventChannel()
    cm_id = CMID(creator=channel, port_space=ce.RDMA_PS_UDP)
    cm_id.bind_addr(AddrInfo(src=address, port_space=ce.RDMA_PS_UDP, flags=ce.RAI_PASSIVE))
    return channel, cm_id


def igmp():
    """The groups of the host's IGMP list, from which 224.0.0.1 is left out."""
    lines = Path("/proc/net/igmp").read_text().splitlines()
    names = [line.split()[0] for line in lines if line.startswith("\t")]
    return [".".join(str(byte) for byte in bytes.fromhex(name)[::-1]) for name in names if name != "010000E0"]


def dangling(address):
    """A join of an AddrInfo that is kept, and one of a temporary: JoinMCAttrEx does not keep the object."""
    channel, cm_id = opened(address)
    kept = AddrInfo(src="239.66.1.1")
    cm_id.join_multicast(mc_attr=JoinMCAttrEx(addr=kept, comp_mask=BOTH, join_flags=0))
    CMEvent(channel).ack_cm_event()
    print("kept, 239.66.1.1: joined")
    attr = JoinMCAttrEx(addr=AddrInfo(src="239.66.1.2"), comp_mask=BOTH, join_flags=0)
    try:
        cm_id.join_multicast(mc_attr=attr)
        CMEvent(channel).ack_cm_event()
        print("temporary, 239.66.1.2: joined", *igmp())
    except PyverbsError as error:
        print("temporary, 239.66.1.2:", error)


def status(address):
    """An event of a join that failed."""
    channel, cm_id = opened(address)
    cap = QPCap(max_send_wr=1, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
    cq = CQ(cm_id.context, 2)
    cm_id.create_qp(QPInitAttr(qp_type=e.IBV_QPT_UD, scq=cq, rcq=cq, cap=cap))
    group = AddrInfo(src="10.77.0.99")  # unicast: the join is taken, and the attach fails
    cm_id.join_multicast(mc_attr=JoinMCAttrEx(addr=group, comp_mask=BOTH, join_flags=0))
    event = CMEvent(channel)
    print(event.event_str(), "has a status:", hasattr(event, "status"))
    event.ack_cm_event()


def gil(address):
    """Another thread, while one waits in CMEvent for a second."""
    channel, cm_id = opened(address)
    turns = 0

    def count():
        nonlocal turns
        while True:
            turns += 1
            time.sleep(0.01)

    def join_later():
        time.sleep(1)
        cm_id.join_multicast(mc_attr=JoinMCAttrEx(addr=group, comp_mask=BOTH, join_flags=0))

    group = AddrInfo(src="239.66.1.1")
    for target in (count, join_later):
        threading.Thread(target=target, daemon=True).start()
    sys.stdout.flush()
    CMEvent(channel).ack_cm_event()
    print("the counting thread had", turns, "turns")


def attach(address):
    """What a QP offers to attach it to a group."""
    print([name for name in dir(QP) + dir(CMID) if "mcast" in name or "attach" in name])


CASES = {"dangling": dangling, "status": status, "gil": gil, "attach": attach}

if __name__ == "__main__":
    CASES[sys.argv[1]](sys.argv[2])
