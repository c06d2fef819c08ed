"""The contract against a small model of its own: a dictionary of who should get what.

Hypothesis draws joins, leaves, attaches, detaches, sends, receives, link failures and destroys; the model
says which message reaches whom. It knows two sentences: a QP gets what it is attached to if the fabric
delivers to its port (AT-1, AT-5), and each sender's messages once and in order (AT-4, K-DATA-14).
"""

from __future__ import annotations

import errno
from collections import defaultdict
from functools import partial
from ipaddress import IPv4Address

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from mcast.api import (
    Capability,
    CmEventType,
    Destination,
    Feature,
    GroupSource,
    InvalidArgument,
    JoinAttrEx,
    McastAddress,
    Testbed,
)
from mcast.conformance.helpers import Application, eventually, new_group, ud_of

PORTS = 3
MAX_PEERS = 5


class Modelled:
    """A peer, and what the model holds of it."""

    def __init__(self, bed: Testbed, port: int) -> None:
        self.peer, self.port = Application(bed, port), port
        self.flags: dict[McastAddress, bool] = {}  # joined group -> send-only
        self.unfetched: list[McastAddress] = []
        self.attached: dict[McastAddress, int] = {}  # group -> MLID
        self.inbox: dict[int, list[bytes]] = defaultdict(list)  # sender's QP -> payloads


class Model(RuleBasedStateMachine):
    """Peers on three ports, three groups."""

    def __init__(self, bed: Testbed) -> None:
        super().__init__()
        self.bed = bed
        self.has_sa = Capability.SA in bed.backend.capabilities
        self.groups = [new_group() for _ in range(3)]
        self.peers: list[Modelled] = []
        self.where: dict[McastAddress, Destination] = {}
        self.sent = 0

    def draw_peer(self, data: st.DataObject) -> Modelled:
        return self.peers[data.draw(st.integers(0, len(self.peers) - 1), label="peer")]

    def draw_group(self, data: st.DataObject) -> McastAddress:
        return self.groups[data.draw(st.integers(0, len(self.groups) - 1), label="group")]

    def delivered_to(self, port: int, group: McastAddress) -> bool:
        """Return True if the fabric delivers the group to the port: at an SA any member, by IGMP a full."""
        return any(
            self.has_sa or not peer.flags[group]
            for peer in self.peers
            if peer.port == port and group in peer.flags
        )

    def settle(self, group: McastAddress) -> None:
        """Wait until the fabric's tables say what the model says of the group's ports."""
        if group not in self.where:
            return
        gid, observer = self.where[group].gid, self.bed.observer
        members = [peer for peer in self.peers if group in peer.flags]
        full = {self.bed.ports[peer.port] for peer in members if not peer.flags[group]}
        eventually(self.bed, lambda: observer.group_ports(gid) == full)
        if self.has_sa:  # which delivers to send-only members as well
            ports = {self.bed.ports[peer.port] for peer in members}
            held = observer.port_memberships
            eventually(self.bed, lambda: {port for port in self.bed.ports if gid in held(port)} == ports)

    @precondition(lambda self: len(self.peers) < MAX_PEERS)
    @rule(port=st.integers(0, PORTS - 1))
    def new_peer(self, port: int) -> None:
        self.peers.append(Modelled(self.bed, port))

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), send_only=st.booleans())
    def join(self, data: st.DataObject, send_only: bool) -> None:
        peer, group = self.draw_peer(data), self.draw_group(data)
        if group in peer.flags:
            return
        attr = JoinAttrEx.send_only(group) if send_only else JoinAttrEx.full_member(group)
        peer.peer.id.join_multicast_ex(attr, context=group)
        peer.flags[group] = send_only
        peer.unfetched.append(group)

    @precondition(lambda self: any(peer.unfetched for peer in self.peers))
    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        waiting = [peer for peer in self.peers if peer.unfetched]
        self.fetch_one(waiting[data.draw(st.integers(0, len(waiting) - 1), label="waiting")])

    def fetch_one(self, peer: Modelled) -> None:
        for group, lid in list(peer.attached.items()):
            if group in peer.unfetched:
                peer.peer.qp.detach_mcast(self.where[group].gid, lid)
                del peer.attached[group]
        event = peer.peer.event()
        joined: McastAddress = event.context
        assert joined in peer.unfetched
        peer.unfetched.remove(joined)
        self.where[joined] = ud_of(event).destination
        if not peer.flags[joined]:
            peer.attached[joined] = self.where[joined].dlid

    @precondition(lambda self: any(peer.flags for peer in self.peers))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        peer, group = self.draw_peer(data), self.draw_group(data)
        if group in peer.flags:
            peer.peer.id.leave_multicast(group)
            self.forget(peer, group)

    def forget(self, peer: Modelled, group: McastAddress) -> None:
        send_only = peer.flags.pop(group)
        if group in peer.unfetched:
            peer.unfetched.remove(group)
        elif not send_only:
            peer.attached.pop(group, None)

    @precondition(lambda self: self.peers and self.where)
    @rule(data=st.data())
    def attach_or_detach(self, data: st.DataObject) -> None:
        peer, group = self.draw_peer(data), self.draw_group(data)
        if group not in self.where:
            return
        gid, lid = self.where[group].gid, self.where[group].dlid
        if group not in peer.attached:
            with pytest.raises(InvalidArgument):
                peer.peer.qp.detach_mcast(gid, lid)
            peer.peer.qp.attach_mcast(gid, lid)
            peer.attached[group] = lid
        else:
            peer.peer.qp.detach_mcast(gid, peer.attached.pop(group))

    def may_send(self) -> list[tuple[Modelled, McastAddress]]:
        return [(p, g) for p in self.peers for g in p.flags if g not in p.unfetched]

    @precondition(lambda self: self.may_send())
    @rule(data=st.data(), count=st.integers(1, 3))
    def send(self, data: st.DataObject, count: int) -> None:
        senders = self.may_send()
        sender, group = senders[data.draw(st.integers(0, len(senders) - 1), label="sender")]
        self.settle(group)
        self.send_from(sender, group, count, down=None)

    @precondition(lambda self: Feature.LINK in self.bed.features and not self.has_sa and self.may_send())
    @rule(data=st.data())
    def send_while_a_link_is_down(self, data: st.DataObject) -> None:
        senders = self.may_send()
        sender, group = senders[data.draw(st.integers(0, len(senders) - 1), label="sender")]
        down = data.draw(
            st.sampled_from([port for port in range(PORTS) if port != sender.port]), label="down"
        )
        self.settle(group)
        with self.bed.link_down(self.bed.ports[down]):
            self.send_from(sender, group, 1, down)
            self.receive_all()
        for known in self.where:
            self.settle(known)

    @precondition(lambda self: Feature.LINK in self.bed.features and self.has_sa and self.may_send())
    @rule(data=st.data())
    def flap(self, data: st.DataObject) -> None:
        """InfiniBand: a port that went down has lost its groups, and says so to each member (SA-RESET-1).

        Not the first port, on which the lab's OpenSM runs: without that it loses all others, and resets them.
        """
        port = data.draw(st.integers(1, PORTS - 1), label="port")
        here = [peer for peer in self.peers if peer.port == port]
        if any(peer.unfetched for peer in here):
            return
        with self.bed.link_down(self.bed.ports[port]):  # until the SM has noticed it, too
            eventually(self.bed, lambda: not self.known_to_sa(self.bed.ports[port]))
        for peer in here:
            for _ in list(peer.flags):
                lost = peer.peer.event(CmEventType.MULTICAST_ERROR, -errno.ENETRESET)
                peer.peer.id.leave_multicast(lost.context)
                self.forget(peer, lost.context)

    def known_to_sa(self, address: IPv4Address) -> bool:
        """Return True if the SA has the port in a group, be it for sending only."""
        backend = self.bed.backend
        (name,) = (device.name for device in backend.devices() if address in device.ports[0].addresses)
        members = [member for group in backend.groups().groups for member in group.members]
        return any(member.port == f"{name}/1" and GroupSource.SA in member.seen_in for member in members)

    def send_from(self, sender: Modelled, group: McastAddress, count: int, down: int | None) -> None:
        payloads = [b"%d" % number for number in range(self.sent, self.sent + count)]
        self.sent += count
        destination = self.where[group]
        sender.peer.send(destination, *payloads)
        for peer in self.peers:
            is_attached = peer.attached.get(group) == destination.dlid
            loops_back = self.has_sa and peer.port == sender.port
            if is_attached and peer.port != down and (loops_back or self.delivered_to(peer.port, group)):
                peer.inbox[sender.peer.qp.qp_num] += payloads

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        self.receive_at(self.draw_peer(data))

    def receive_all(self) -> None:
        for peer in self.peers:
            self.receive_at(peer)

    def receive_at(self, peer: Modelled) -> None:
        expected = {source: payloads for source, payloads in peer.inbox.items() if payloads}
        got: dict[int, list[bytes]] = defaultdict(list)
        for _ in range(sum(map(len, expected.values()))):
            message = peer.peer.qp.recv_one(10.0)
            assert message is not None, f"missing of {expected}, got {dict(got)}"
            got[message.src_qp].append(bytes(message.payload))
        assert got == expected
        peer.inbox.clear()

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def destroy(self, data: st.DataObject) -> None:
        peer = self.draw_peer(data)
        self.receive_at(peer)
        peer.peer.close()
        self.peers.remove(peer)

    def teardown(self) -> None:
        try:
            self.receive_all()
            for peer in self.peers:
                assert peer.peer.qp.recv_one(0) is None, "a message that the model did not expect"
        finally:
            for peer in self.peers:
                peer.peer.close()


def test_the_provider_does_what_the_model_says(bed: Testbed) -> None:
    """Fewer examples where a step is slow: `--hypothesis-profile=lab`."""
    bounds = settings(suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(partial(Model, bed), settings=bounds)  # type: ignore[arg-type]  # any factory
