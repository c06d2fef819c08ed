"""Faults of a port, a switch or the SM, which are methods of `Fabric`.

Each function takes the parts of the fabric first. `Fabric` has it under the same name, as one change of the
fabric; so an error is raised as `Refused`. Each docstring says what an application sees of the fault, with
the source. Times that a user gives are in seconds, as in the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from mcast.api import PortEvent, Refused, WcStatus
from mcast.backends.model.port import Port
from mcast.backends.model.qp import Qp
from mcast.backends.model.sa_client import ResetReason
from mcast.backends.model.times import NS, to_ns
from mcast.backends.sim.core.fabric import FabricCore
from mcast.backends.sim.core.options import PKEYS
from mcast.backends.sim.core.subnet import Subnet
from mcast.backends.sim.trace.events import DeviceRemoval, FaultInjected, Link
from mcast.wire.partition import find_pkey

SWEEP_NS = 50_000_000
"""Time in ns, about 50 ms, from the trap until the SM has removed the port (SA-SM-1)."""

LIDS = range(1, 0xC000)
"""Unicast LIDs (IBA vol 1, 4.1.3)."""


# --- links and devices ---------------------------------------------------------------------------


def set_link(fabric: FabricCore, port: Port, up: bool) -> None:
    """Take the port's link down or up. Its queue pairs get PortEvent.ERR or PortEvent.ACTIVE.

    RoCE: no CmEvent; the membership stays, and messages flow again with the link (K-DEVICE-2). InfiniBand:
    PORT_ERR, and so ENETRESET for every active membership; about 50 ms later the SA drops the port, and the
    link's return restores nothing. While the link is down, a join finds no IPoIB broadcast group (SA-PATH-1).
    """
    if port.up == up:
        return
    port.up = up
    fabric.topology_changed()
    fabric.log.note(Link, port=port.name, up=up)
    fabric.queue_pairs.notify_port(port, PortEvent.ACTIVE if up else PortEvent.ERR)
    subnet = fabric.subnet
    if subnet is None:
        return
    if up:
        subnet.discover(port)
        subnet.join_broadcasts(port)
    else:
        for interface in port.interfaces:
            interface.broadcast = None
        subnet.clients[port.index].reset(ResetReason.PORT_ERR)
        fabric.clock.call_later(SWEEP_NS, lambda: None if port.up else subnet.drop_unreachable(port))


def remove_device(fabric: FabricCore, port: Port) -> None:
    """Remove the port's device (K-DEVICE-1, SA-REMOVE-1).

    Every id on it gets DEVICE_REMOVAL, and its memberships end.

    The device's queue pairs receive nothing any more, and a send puts them into ERR.
    """
    if port.removed:
        return
    fabric.log.note(DeviceRemoval, port=port.name)
    for cm_id in list(port.ids):
        cm_id.device_removed()
    port.ids.clear()
    port.removed = True
    port.removals += 1
    fabric.topology_changed()


def restore_device(fabric: FabricCore, port: Port) -> None:
    """Bring a removed device back, with its address and nothing else. New ids can be bound to it."""
    if not port.removed:
        return
    fabric.log.note(FaultInjected, name="device-restored", port=port.name)
    port.removed = False
    fabric.topology_changed()


def bond_failover(fabric: FabricCore, port: Port) -> None:
    """Change the bond below the port to its other link (K-DEVICE-5).

    Every id on it gets ADDR_CHANGE; memberships stay.

    Nothing else causes that event.
    """
    fabric.log.note(FaultInjected, name="bond-failover", port=port.name)
    for cm_id in list(port.ids):
        cm_id.address_changed()


def cut_cable(fabric: FabricCore, switch: int) -> None:
    """Cut leaf switch 1, 2, … off the root: no message and no SA request passes, traffic on the leaf does.

    The hosts see no event, for their own links are up. On InfiniBand the SA drops the ports behind the cut,
    as if they were down (SA-SM-1). Raises ValueError for a switch that is no leaf.
    """
    topology = fabric.topology
    if switch not in range(1, topology.switches):
        raise Refused(
            ValueError(f"switch is {switch}: the leaves of this fabric are 1..{topology.switches - 1}")
        )
    if switch in topology.cut:
        return
    topology.cut.add(switch)
    fabric.topology_changed()
    fabric.log.note(FaultInjected, name="cable-cut", detail=f"switch {switch}")
    if (subnet := fabric.subnet) is not None:
        subnet.forwarding.freeze(switch)
        fabric.clock.call_later(SWEEP_NS, lambda: subnet.drop_unreachable(*topology.ports_of_switch(switch)))


def repair_cable(fabric: FabricCore, switch: int) -> None:
    """Undo `cut_cable`.

    RoCE: traffic resumes. InfiniBand: the SM finds the ports again and sets ClientReregister, so every active
    membership behind the cut gets -ENETRESET.
    """
    if switch not in fabric.topology.cut:
        return
    fabric.topology.cut.remove(switch)
    fabric.log.note(FaultInjected, name="cable-repaired", detail=f"switch {switch}")
    if (subnet := fabric.subnet) is not None:
        subnet.forwarding.unfreeze(switch)
        for port in fabric.topology.ports_of_switch(switch):
            if port.up and subnet.discover(port):
                _reregister(fabric, subnet, port)
    fabric.topology_changed()


# --- the SM --------------------------------------------------------------------------------------


def restart_sm(fabric: FabricCore, outage: float = 0.0) -> None:
    """End the SM; `outage` seconds later it starts again, or another one takes over.

    In between requests get no answer, and fail with ETIMEDOUT; messages flow, because the switches keep their
    tables. Then all groups are lost, MLIDs start again, and ClientReregister brings ENETRESET to every active
    membership; the program has to leave and join again (SA-SM-2, SA-RESET-2). If several calls overlap, the
    last one says when the SM starts. Raises ValueError on RoCE.
    """
    subnet, late = _subnet(fabric, "restart_sm"), _ns(outage, "outage")
    subnet.up = False
    subnet.ends += 1
    fabric.log.note(FaultInjected, name="sm-down")
    if late:
        end = subnet.ends
        fabric.clock.call_later(late, lambda: _sm_starts(fabric, subnet) if subnet.ends == end else None)
    else:
        _sm_starts(fabric, subnet)


def _sm_starts(fabric: FabricCore, subnet: Subnet) -> None:
    subnet.up = True
    subnet.sa.restart()
    subnet.forwarding.changed()
    fabric.log.note(FaultInjected, name="sm-up", detail="ClientReregister to every port")
    for port in fabric.topology.ports:
        if subnet.knows(port) and port.up:
            _reregister(fabric, subnet, port)


def _reregister(fabric: FabricCore, subnet: Subnet, port: Port) -> None:
    """The port is told to register anew: IPoIB does so by itself, the applications are told."""
    subnet.join_broadcasts(port)
    fabric.queue_pairs.notify_port(port, PortEvent.CLIENT_REREGISTER)
    subnet.clients[port.index].reset(ResetReason.CLIENT_REREGISTER)


def change_lid(fabric: FabricCore, port: Port, lid: int | None = None) -> None:
    """Give the port another LID, by default a free one: ENETRESET for every active membership (SA-RESET-1).

    What is sent to the LID before arrives nowhere (SA-SM-8). Raises ValueError on RoCE, and for a LID outside
    1..0xBFFF or of another port.
    """
    subnet = _subnet(fabric, "change_lid")
    taken = {other.lid for other in fabric.topology.ports}
    if lid is None:
        lid = next((free for free in LIDS if free not in taken), 0)
    if lid not in LIDS or lid in taken:
        raise Refused(ValueError(f"lid is {lid}: give one in 1..0xBFFF that no port has"))
    port.lid = lid
    fabric.topology_changed()
    fabric.log.note(FaultInjected, name="lid-change", port=port.name, detail=f"LID {lid}")
    subnet.update(port)
    fabric.queue_pairs.notify_port(port, PortEvent.LID_CHANGE)
    subnet.clients[port.index].reset(ResetReason.LID_CHANGE)


def set_pkeys(fabric: FabricCore, port: Port, pkeys: Collection[int]) -> None:
    """Write another P_Key table into the port, as an SM does.

    ENETRESET for the groups whose P_Key moved in the table or vanished from it, and for no others: a port
    that becomes a limited member loses none (SA-RESET-1). In a partition that vanished, joins find no IPoIB
    broadcast group, and no queue pair can be made. A queue pair has whatever P_Key is at its place in the
    table; without one it neither sends nor receives (SA-PKEY-4; IBA vol 1, 10.9.3). Raises ValueError on
    RoCE.
    """
    subnet = _subnet(fabric, "set_pkeys")
    if wrong := [pkey for pkey in pkeys if type(pkey) is not int or pkey not in PKEYS]:
        raise Refused(ValueError(f"P_Key is {wrong[0]!r}: give numbers of 16 bits"))
    before, port.pkeys = port.pkeys, tuple(pkeys)
    shown = ", ".join(f"{pkey:#06x}" for pkey in port.pkeys)
    fabric.log.note(FaultInjected, name="pkey-change", port=port.name, detail=f"P_Keys {shown or 'none'}")
    subnet.update(port)
    for qp in fabric.queue_pairs:
        if qp.port is port:
            qp.read_pkey()
    for interface in port.interfaces:
        if find_pkey(port.pkeys, interface.pkey) is None:
            interface.broadcast = None
    subnet.join_broadcasts(port)
    fabric.queue_pairs.notify_port(port, PortEvent.PKEY_CHANGE)
    subnet.clients[port.index].reset(
        ResetReason.PKEY_CHANGE,
        lambda record: find_pkey(before, record.pkey) != find_pkey(port.pkeys, record.pkey),
    )
    fabric.topology_changed()


def program_late(fabric: FabricCore, delay: float) -> None:
    """From now on a switch learns of a change `delay` s after the SA has answered; 0: at once, as normally.

    The first messages after a join are lost, because the SA answers before the tables are written (SA-SM-4).
    Raises ValueError on RoCE.
    """
    subnet, late = _subnet(fabric, "program_late"), _ns(delay, "delay")
    fabric.log.note(FaultInjected, name="late-switches", detail=f"{late / NS:g} s")
    subnet.forwarding.set_delay(late)


def _ns(seconds: float, what: str) -> int:
    try:
        return to_ns(seconds, what)
    except (TypeError, ValueError) as error:
        raise Refused(error) from None


def _subnet(fabric: FabricCore, what: str) -> Subnet:
    if fabric.subnet is None:
        raise Refused(ValueError(f"{what}: a RoCE fabric has no SM; make one with Fabric.infiniband"))
    return fabric.subnet


# --- IGMP ----------------------------------------------------------------------------------------


def stop_querier(fabric: FabricCore) -> None:
    """Stop the IGMP querier. The switches forget a membership 260 s after its last report.

    Then no event comes and the port is still a member, but nothing arrives (docs/pitfalls.md, 22; RFC 3376,
    8.4). Raises ValueError on InfiniBand.
    """
    if fabric.subnet is not None:
        raise Refused(ValueError("stop_querier: InfiniBand has no IGMP; make the fabric with Fabric.roce"))
    fabric.log.note(FaultInjected, name="querier-stopped")
    fabric.igmp.stop_querier()


def start_querier(fabric: FabricCore) -> None:
    """Start the querier again. It asks, every port reports its memberships, and messages flow again."""
    fabric.log.note(FaultInjected, name="querier-started")
    fabric.igmp.start_querier()


# --- queue pairs ---------------------------------------------------------------------------------


def starve(fabric: FabricCore, qp: Qp) -> Callable[[], None]:
    """Take all free receives from the QP; calling the answer gives them back."""
    fabric.log.note(FaultInjected, name="starved", port=qp.port.name, detail=f"QP {qp.number}")
    qp.reclaim()
    taken, qp.free, qp.low_water = qp.free, 0, 0

    def feed() -> None:
        fabric.log.note(FaultInjected, name="fed", port=qp.port.name, detail=f"QP {qp.number}")
        qp.free += taken

    return feed


def overrun_cq(fabric: FabricCore, qp: Qp) -> None:
    """The receive CQ overflows: CQ_ERR, and the QP falls into ERR (K-DATA-19)."""
    fabric.log.note(FaultInjected, name="cq-overrun", port=qp.port.name, detail=f"QP {qp.number}")
    qp.fail(WcStatus.WR_FLUSH_ERR)


def fail_qp(fabric: FabricCore, qp: Qp, status: WcStatus = WcStatus.LOC_QP_OP_ERR) -> None:
    """Put the queue pair into ERR, as a device does.

    Its work completes with `status`. reset() restores it.
    """
    fabric.log.note(
        FaultInjected, name="qp-error", port=qp.port.name, detail=f"QP {qp.number}: {status.name}"
    )
    qp.fail(status)
