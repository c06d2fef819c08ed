"""What befalls a port, a switch or the SM: the faults that are methods of `Fabric`.

Each function takes the fabric first and is bound in `Fabric` under its own name. What an application sees of
it is said here, with the source. Seconds for the times that a user gives, as in the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from mcast.api import PortEvent, WcStatus
from mcast.backends.sim.clock import NS, ns_of
from mcast.backends.sim.core.port import PKEYS, Port
from mcast.backends.sim.core.qp import Qp
from mcast.backends.sim.core.sa_client import Reset
from mcast.backends.sim.trace.events import DeviceRemoval, Fault, Link
from mcast.wire.partition import find_pkey

if TYPE_CHECKING:
    from mcast.backends.sim.core.fabric import Fabric
    from mcast.backends.sim.core.sa import SubnetAdmin

SWEEP_NS = 50_000_000
"""About 50 ms after its trap the SM knows that a port is gone (SA-SM-1)."""

MEMBERSHIP_INTERVAL_NS = 260 * NS
"""A membership that no report renews ages out: 2 x 125 s + 10 s (RFC 3376, 8.4)."""

LIDS = range(1, 0xC000)
"""Unicast LIDs (IBA vol 1, 4.1.3)."""

P = ParamSpec("P")


def _one_call(function: Callable[Concatenate[Fabric, P], None]) -> Callable[Concatenate[Fabric, P], None]:
    """The function as one call into the fabric: under its lock, and waking whoever waits."""

    @wraps(function)
    def locked(fabric: Fabric, /, *args: P.args, **kwargs: P.kwargs) -> None:
        with fabric.clock:
            function(fabric, *args, **kwargs)

    return locked


# --- links and devices ---------------------------------------------------------------------------


@_one_call
def set_link(fabric: Fabric, port: Port, up: bool) -> None:
    """Take the port's link down or up.

    Its QPs are told: PortEvent.ERR, PortEvent.ACTIVE.
    RoCE: no CmEvent; the membership is kept and traffic resumes (K-DEVICE-2). InfiniBand:
    PORT_ERR, so -ENETRESET for every active membership; about 50 ms later the SA has dropped the port, and
    the link's return restores nothing. While it is down, a join finds no IPoIB broadcast group (SA-PATH-1).
    """
    if port.up == up:
        return
    port.up = up
    fabric.topology_changed()
    fabric.note(Link, port=port.name, up=up)
    fabric.tell(port, PortEvent.ACTIVE if up else PortEvent.ERR)
    if fabric.sa is None:
        return
    if up:
        _found(fabric, port)
        fabric.join_broadcasts(port)
    else:
        for interface in port.interfaces:
            interface.broadcast = None
        fabric.sa_clients[port.index].reset(Reset.PORT_ERR)
        fabric.clock.call_later(SWEEP_NS, lambda: None if port.up else _missed(fabric, port))


@_one_call
def remove_device(fabric: Fabric, port: Port) -> None:
    """The port's device disappears: DEVICE_REMOVAL for every id on it, its memberships end
    (K-DEVICE-1). Its QPs receive nothing any more, and a send takes them to ERR.
    """
    if port.removed:
        return
    fabric.note(DeviceRemoval, port=port.name)
    for cm_id in list(port.ids):
        cm_id.device_removed()
    port.ids.clear()
    port.removed = True
    port.removals += 1
    fabric.topology_changed()


@_one_call
def restore_device(fabric: Fabric, port: Port) -> None:
    """A removed device is back, with its address and nothing else: ids can be bound to it anew."""
    if not port.removed:
        return
    fabric.note(Fault, name="device-restored", port=port.name)
    port.removed = False
    fabric.topology_changed()


@_one_call
def bond_failover(fabric: Fabric, port: Port) -> None:
    """The bond below the port changes to its other link: ADDR_CHANGE for every id on it, the only cause of
    that event; memberships stay (K-DEVICE-5).
    """
    fabric.note(Fault, name="bond-failover", port=port.name)
    for cm_id in list(port.ids):
        cm_id.address_changed()


@_one_call
def cut_cable(fabric: Fabric, switch: int) -> None:
    """Cut leaf switch 1, 2, … off the root: no message and no SA request passes, traffic on the leaf does.

    The hosts see no event, for their own links are up. On InfiniBand the SA drops the ports behind the cut,
    as if they were down (SA-SM-1). Raises ValueError for a switch that is no leaf.
    """
    if switch not in range(1, fabric.switches):
        raise ValueError(f"switch is {switch}: the leaves of this fabric are 1..{fabric.switches - 1}")
    if switch in fabric.cut:
        return
    fabric.cut.add(switch)
    fabric.topology_changed()
    fabric.note(Fault, name="cable-cut", detail=f"switch {switch}")
    if fabric.sa is not None:
        fabric.keep_tables(switch)
        fabric.clock.call_later(SWEEP_NS, lambda: _missed(fabric, *_behind(fabric, switch)))


@_one_call
def mend_cable(fabric: Fabric, switch: int) -> None:
    """Undo `cut_cable`. RoCE: traffic resumes. InfiniBand: the SM finds the ports anew and sets
    ClientReregister, so -ENETRESET for every active membership behind the cut.
    """
    if switch not in fabric.cut:
        return
    fabric.cut.remove(switch)
    fabric.note(Fault, name="cable-mended", detail=f"switch {switch}")
    if fabric.sa is not None:
        fabric.forget_kept_tables(switch)
        for port in _behind(fabric, switch):
            if port.up and _found(fabric, port):
                _reregister(fabric, port)
    fabric.topology_changed()


def _behind(fabric: Fabric, switch: int) -> Iterable[Port]:
    return (port for port in fabric.ports if port.switch == switch)


def _missed(fabric: Fabric, *ports: Port) -> None:
    """The SM has noticed that ports are gone: their memberships end by the leave rules."""
    assert fabric.sa is not None
    for port in ports:
        if not (port.up and port.switch not in fabric.cut) and port.guid in fabric.sa_ports:
            fabric.sa.port_down(port.guid)
            fabric.sa_ports.remove(port.guid)
    fabric.tables_changed()


def _found(fabric: Fabric, port: Port) -> bool:
    """The SM sees the port; whether it had missed it."""
    assert fabric.sa is not None
    missed = port.guid not in fabric.sa_ports and port.switch not in fabric.cut
    if missed:
        fabric.sa.add_port(fabric.sa_port(port))
        fabric.sa_ports.add(port.guid)
    return missed


# --- the SM --------------------------------------------------------------------------------------


@_one_call
def restart_sm(fabric: Fabric, outage: float = 0.0) -> None:
    """The SM dies; `outage` s later it starts anew, or another takes over.

    In between no request is answered, so -ETIMEDOUT; messages flow, for the switches keep their tables. Then
    all groups are lost, MLIDs start again, and ClientReregister brings -ENETRESET to every active membership;
    to leave and join again is the user's job (SA-SM-2, SA-RESET-2). Of several calls that overlap the
    last one says when the SM starts. Raises ValueError on RoCE.
    """
    _sa(fabric, "restart_sm")
    late = ns_of(outage, "outage")
    fabric.sm_up = False
    fabric.sm_ends += 1
    fabric.note(Fault, name="sm-down")
    if late:
        end = fabric.sm_ends
        fabric.clock.call_later(late, lambda: _sm_starts(fabric) if fabric.sm_ends == end else None)
    else:
        _sm_starts(fabric)


def _sm_starts(fabric: Fabric) -> None:
    assert fabric.sa is not None
    fabric.sm_up = True
    fabric.sa.restart()
    fabric.tables_changed()
    fabric.note(Fault, name="sm-up", detail="ClientReregister to every port")
    for port in fabric.ports:
        if port.guid in fabric.sa_ports and port.up:
            _reregister(fabric, port)


def _reregister(fabric: Fabric, port: Port) -> None:
    """The port is told to register anew: IPoIB does so by itself, the applications are told."""
    fabric.join_broadcasts(port)
    fabric.tell(port, PortEvent.CLIENT_REREGISTER)
    fabric.sa_clients[port.index].reset(Reset.CLIENT_REREGISTER)


@_one_call
def change_lid(fabric: Fabric, port: Port, lid: int | None = None) -> None:
    """The SM gives the port another LID, by default a free one: -ENETRESET for every active membership
    (SA-RESET-1). Raises ValueError on RoCE, and for a LID outside 1..0xBFFF or of another port.
    """
    sa = _sa(fabric, "change_lid")
    taken = {other.lid for other in fabric.ports}
    if lid is None:
        lid = next((free for free in LIDS if free not in taken), 0)
    if lid not in LIDS or lid in taken:
        raise ValueError(f"lid is {lid}: give one in 1..0xBFFF that no port has")
    port.lid = lid
    fabric.topology_changed()
    fabric.note(Fault, name="lid-change", port=port.name, detail=f"LID {lid}")
    if port.guid in fabric.sa_ports:
        sa.add_port(fabric.sa_port(port))
    fabric.tell(port, PortEvent.LID_CHANGE)
    fabric.sa_clients[port.index].reset(Reset.LID_CHANGE)


@_one_call
def set_pkeys(fabric: Fabric, port: Port, pkeys: Collection[int]) -> None:
    """The SM writes another P_Key table into the port.

    -ENETRESET for the groups whose P_Key moved in the table or vanished from it, and for those only. In a
    partition that vanished, joins find no IPoIB broadcast group, and the QPs neither send nor receive; both
    recover when the P_Key returns (SA-RESET-1; IBA vol 1, 10.9.3). Raises ValueError on RoCE.
    """
    sa = _sa(fabric, "set_pkeys")
    if wrong := [pkey for pkey in pkeys if type(pkey) is not int or pkey not in PKEYS]:
        raise ValueError(f"P_Key is {wrong[0]!r}: give numbers of 16 bits")
    before, port.pkeys = port.pkeys, tuple(pkeys)
    shown = ", ".join(f"{pkey:#06x}" for pkey in port.pkeys)
    fabric.note(Fault, name="pkey-change", port=port.name, detail=f"P_Keys {shown or 'none'}")
    if port.guid in fabric.sa_ports:
        sa.add_port(fabric.sa_port(port))
    for qp in fabric.qps:
        if qp.port is port:
            qp.take_pkey(qp.partition if qp.partition in port.pkeys else 0)
    for interface in port.interfaces:
        if interface.pkey not in port.pkeys:
            interface.broadcast = None
    fabric.join_broadcasts(port)
    fabric.tell(port, PortEvent.PKEY_CHANGE)
    fabric.sa_clients[port.index].reset(
        Reset.PKEY_CHANGE,
        lambda record: find_pkey(before, record.pkey) != find_pkey(port.pkeys, record.pkey),
    )
    fabric.topology_changed()


@_one_call
def program_late(fabric: Fabric, delay: float) -> None:
    """From now on a switch learns of a change `delay` s after the SA has answered; 0: at once, as normally.

    Reply and switch tables are not ordered (SA-SM-4): the first messages after a join are lost.
    Raises ValueError on RoCE.
    """
    _sa(fabric, "program_late")
    late = ns_of(delay, "delay")
    fabric.note(Fault, name="late-switches", detail=f"{late / NS:g} s")
    fabric.set_programming(late)


def _sa(fabric: Fabric, what: str) -> SubnetAdmin:
    if fabric.sa is None:
        raise ValueError(f"{what}: a RoCE fabric has no SM; make one with Fabric.infiniband")
    return fabric.sa


# --- IGMP ----------------------------------------------------------------------------------------


@_one_call
def stop_querier(fabric: Fabric) -> None:
    """The IGMP querier goes away. 260 s after its last report a membership ages out of the snooping switches:
    no event, the port is still a member, and nothing arrives (docs/pitfalls.md, 22; RFC 3376, 8.4).
    Raises ValueError on InfiniBand.
    """
    if fabric.sa is not None:
        raise ValueError("stop_querier: InfiniBand has no IGMP; make the fabric with Fabric.roce")
    fabric.note(Fault, name="querier-stopped")
    fabric.querier = False
    for group, listeners in fabric.snooping.items():
        for port in listeners.values():
            fabric.age(port, group)


@_one_call
def start_querier(fabric: Fabric) -> None:
    """The querier is back and asks: every port reports its memberships, and traffic resumes."""
    fabric.note(Fault, name="querier-started")
    fabric.querier = True
    for port in fabric.ports:
        if port.up and not port.removed:
            for group in port.igmp:
                fabric.snoop(port, group)


# --- queue pairs ---------------------------------------------------------------------------------


@contextmanager
def starved(fabric: Fabric, qp: Qp) -> Iterator[None]:
    """While open, the QP has no free receive: messages are lost in silence, and only its `no_receive` counter
    says so; later ones arrive (K-DATA-8).
    """
    with fabric.clock:
        fabric.note(Fault, name="starved", port=qp.port.name, detail=f"QP {qp.number}")
        taken, qp.free, qp.low_water = qp.free, 0, 0
    try:
        yield
    finally:
        with fabric.clock:
            fabric.note(Fault, name="fed", port=qp.port.name, detail=f"QP {qp.number}")
            qp.free += taken


@_one_call
def overrun_cq(fabric: Fabric, qp: Qp) -> None:
    """The receive CQ overflows: CQ_ERR, and the QP falls into ERR (K-DATA-19)."""
    fabric.note(Fault, name="cq-overrun", port=qp.port.name, detail=f"QP {qp.number}")
    qp.fail(WcStatus.WR_FLUSH_ERR)


@_one_call
def fail_qp(fabric: Fabric, qp: Qp, status: WcStatus = WcStatus.LOC_QP_OP_ERR) -> None:
    """The device puts the QP into ERR, and its work completes with `status`; reset() brings it back."""
    fabric.note(Fault, name="qp-error", port=qp.port.name, detail=f"QP {qp.number}: {status.name}")
    qp.fail(status)
