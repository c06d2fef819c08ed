"""Memberships of many ids on few ports are counted: a port is a member as long as one id is (SA-SHARE-1)."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mcast.api import CmId, JoinAttrEx
from mcast.backends.sim import Fabric, open_fabric
from mcast.wire.mcmember import JoinState

GROUPS = ("239.1.1.1", "239.2.2.2")
PORTS = 2


class Counting(RuleBasedStateMachine):
    """Joins and leaves of ids on two ports, at any moment of the other requests in flight, and restarts of
    the SM in between."""

    make: Callable[..., Fabric] = staticmethod(Fabric.infiniband)

    def __init__(self) -> None:
        super().__init__()
        self.fabric = self.make(ports=PORTS)
        self.backend = open_fabric(self.fabric)
        self.channel = self.backend.event_channel()
        self.holds: dict[tuple[CmId, str], bool] = {}  # (id, group) -> send-only
        self.lost: dict[tuple[CmId, str], None] = {}  # not left yet
        self.ids: list[CmId] = []

    @rule(port=st.integers(1, PORTS))
    def new_id(self, port: int) -> None:
        cm_id = self.channel.create_id()
        cm_id.bind_addr(f"10.0.0.{port}")
        self.ids.append(cm_id)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), group=st.sampled_from(GROUPS), send_only=st.booleans())
    def join(self, data: st.DataObject, group: str, send_only: bool) -> None:
        cm_id = data.draw(st.sampled_from(self.ids))
        if (cm_id, group) not in self.holds and (cm_id, group) not in self.lost:
            attr = JoinAttrEx.send_only(group) if send_only else JoinAttrEx.full_member(group)
            cm_id.join_multicast_ex(attr, (cm_id, group))
            self.holds[cm_id, group] = send_only

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        cm_id, group = data.draw(st.sampled_from(list(self.holds)))
        cm_id.leave_multicast(group)
        del self.holds[cm_id, group]

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def destroy(self, data: st.DataObject) -> None:
        cm_id = data.draw(st.sampled_from(self.ids))
        cm_id.destroy()
        self.ids.remove(cm_id)
        self.holds = {key: send_only for key, send_only in self.holds.items() if key[0] is not cm_id}
        self.lost = {key: None for key in self.lost if key[0] is not cm_id}

    @rule(timeout=st.sampled_from([0, 0.0001, 1.0]))
    def let_time_pass(self, timeout: float) -> None:
        if (event := self.channel.get_event(timeout)) is not None:
            event.check()

    @rule()
    def settle(self) -> None:
        while (event := self.channel.get_event(1.0)) is not None:
            event.check()
        for port in self.fabric.ports:
            assert self.at_port(port.index) == self.expected(port.name), port.name

    @precondition(lambda self: self.fabric.sa is not None)
    @rule()
    def lose_all(self) -> None:
        """The SM restarts: every membership is told so, once, and nothing else is."""
        self.settle()
        self.fabric.restart_sm()
        events = list(iter(lambda: self.channel.get_event(1.0), None))
        assert {event.errno for event in events} <= {errno.ENETRESET}
        assert Counter(event.context for event in events) == Counter(list(self.holds))
        self.lost |= dict.fromkeys(self.holds)
        self.holds.clear()

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def leave_what_was_lost(self, data: st.DataObject) -> None:
        cm_id, group = data.draw(st.sampled_from(list(self.lost)))
        cm_id.leave_multicast(group)
        del self.lost[cm_id, group]

    def expected(self, device: str) -> dict[str, int]:
        bits: dict[str, int] = {}
        for (cm_id, group), send_only in self.holds.items():
            if cm_id.device == device:
                bit = JoinState.SEND_ONLY_FULL if send_only else JoinState.FULL
                bits[group] = bits.get(group, 0) | bit
        return bits

    def at_port(self, index: int) -> dict[str, int]:
        subnet = self.fabric.core.subnet
        assert subnet is not None
        held = subnet.clients[index].memberships
        for mgid, bits in held.items():
            group = subnet.sa.group(mgid)
            assert group is not None
            assert group.join_state(self.fabric.ports[index].guid) == bits
        return {f"239.{mgid[13]}.{mgid[14]}.{mgid[15]}": int(bits) for mgid, bits in held.items()}

    def teardown(self) -> None:
        self.backend.close()
        self.fabric.clock.advance(1.0)  # type: ignore[attr-defined]
        if (subnet := self.fabric.core.subnet) is not None:
            assert [client.memberships for client in subnet.clients.values()] == [{}] * PORTS


class CountingIgmp(Counting):
    """Count on RoCE, where a full member is announced by IGMP and a send-only one is not (JEX-10)."""

    make = staticmethod(Fabric.roce)

    @invariant()
    def the_switch_knows_the_ports(self) -> None:
        for group in GROUPS:
            ports = {
                id_.device
                for (id_, joined), send_only in self.holds.items()
                if joined == group and not send_only
            }
            snooping = self.fabric.core.igmp.snooping
            snooped = [g for g in snooping if str(g.ipv4) == group]
            found = {port.name for g in snooped for port in snooping[g].values()}
            assert found == ports

    def at_port(self, index: int) -> dict[str, int]:
        return {str(group.ipv4): 1 for group in self.fabric.ports[index].igmp}

    def expected(self, device: str) -> dict[str, int]:
        return {group: 1 for group, bits in super().expected(device).items() if bits & JoinState.FULL}

    def teardown(self) -> None:
        self.backend.close()
        assert [port.igmp for port in self.fabric.ports] == [{}] * PORTS


BOUNDS = settings(max_examples=100, stateful_step_count=50)
TestSa = Counting.TestCase
TestSa.settings = BOUNDS
TestIgmp = CountingIgmp.TestCase
TestIgmp.settings = BOUNDS
