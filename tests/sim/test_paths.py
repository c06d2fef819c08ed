"""A QP remembers the path of its last send: never longer than the fabric stays as it is.

Two fabrics live through the same random life; one forgets all paths and routes before each send.
"""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address
from random import Random
from typing import Any

import pytest

from mcast.api import CmId, Destination, McastError, QpState
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.clock import VirtualClock
from mcast.backends.sim.core.port import FabricPort

PORTS, GROUPS = 6, ("239.0.0.1", "239.0.0.2")
MAKE = {"roce": Fabric.roce, "ib": Fabric.infiniband}


class Life:
    """A fabric with an id on every port, and everything that it has shown to them."""

    def __init__(self, kind: str, seed: int, forgetful: bool) -> None:
        self.fabric, self.forgetful, self.draw = MAKE[kind](PORTS, switches=3), forgetful, Random(seed)
        self.channel = open_fabric(self.fabric).event_channel()
        self.ids = [self.new_id(number) for number in range(PORTS)]
        self.known: dict[str, list[Destination]] = {group: [] for group in GROUPS}
        self.log: list[object] = []

    def new_id(self, port: int) -> CmId:
        cm_id = self.channel.create_id()
        cm_id.bind_addr(f"10.0.0.{port + 1}")
        cm_id.create_qp()
        return cm_id

    def live(self, steps: int) -> list[object]:
        happenings: list[Callable[[], Any]] = [self.join, self.leave, self.attach, self.detach, self.befall]
        for _ in range(steps):
            self.attempt(self.draw.choice(happenings))
            while (event := self.channel.get_event(0.001)) is not None:
                if event.ud is not None:
                    self.known[event.context].append(event.ud.destination)
            for _ in range(4):
                self.attempt(self.send)
        return self.log

    def attempt(self, step: Callable[[], Any]) -> None:
        try:
            step()
        except McastError as error:
            self.log.append((step.__name__, type(error).__name__, error.errno))

    def join(self) -> None:
        group = self.draw.choice(GROUPS)
        self.draw.choice(self.ids).join_multicast(group, group)

    def leave(self) -> None:
        self.draw.choice(self.ids).leave_multicast(self.draw.choice(GROUPS))

    def destination(self) -> Destination | None:
        known = self.known[self.draw.choice(GROUPS)]
        return known[-1] if known else None

    def attach(self) -> None:
        cm_id, to = self.draw.choice(self.ids), self.destination()
        if to is not None and cm_id.qp is not None:
            cm_id.qp.attach_mcast(to.gid, to.dlid)

    def detach(self) -> None:
        cm_id, to = self.draw.choice(self.ids), self.destination()
        if to is not None and cm_id.qp is not None:
            cm_id.qp.detach_mcast(to.gid, to.dlid)

    def befall(self) -> None:
        """Something that happens to a port, a switch, the SM or a QP."""
        draw, fabric, number = self.draw, self.fabric, self.draw.randrange(PORTS)
        port = fabric.ports[number]

        def new_qp() -> None:
            fabric.set_ipv4(port, IPv4Address(f"10.0.0.{number + 1}"))
            if fabric.sa is not None:
                fabric.set_pkeys(port, (0xFFFF,))
            self.ids[number].destroy()
            self.ids[number] = self.new_id(number)

        events: list[Callable[[], None]] = [
            lambda: fabric.set_link(port, up=not port.up),
            lambda: fabric.cut_cable(1) if draw.random() < 0.5 else fabric.repair_cable(1),
            lambda: fabric.set_ipv4(port, None),
            lambda: fabric.set_ipv4(port, IPv4Address(f"10.0.0.{number + 1}")),
            new_qp,
            lambda: self.ids[number].qp.modify(QpState.SQD),  # type: ignore[union-attr]
        ]
        if fabric.sa is None:
            events += [fabric.stop_querier, fabric.start_querier, lambda: self.advance(300)]
        else:
            events += [
                fabric.restart_sm,
                lambda: fabric.change_lid(port),
                lambda: fabric.set_pkeys(port, draw.choice([(0xFFFF,), (0x7FFF,), ()])),
                lambda: fabric.program_late(draw.choice([0, 0.01])),
                lambda: self.advance(0.1),
            ]
        draw.choice(events)()

    def advance(self, seconds: float) -> None:
        assert isinstance(self.fabric.clock, VirtualClock)
        self.fabric.clock.advance(seconds)

    def send(self) -> None:
        if self.forgetful:
            self.fabric.core.receivers.known.clear()
            for core in self.fabric.qps:
                core.path = None
        sender, to = self.draw.choice(self.ids), self.destination()
        if to is None or sender.qp is None:
            return
        if sender.qp.state is not QpState.RTS and self.draw.random() < 0.5:
            sender.qp.reset()
        if self.draw.random() < 0.2:
            other = self.draw.choice(self.ids)
            gid = self.port(other).gids.get(1, self.port(other).gids[0])
            to = to.model_copy(update={"gid": gid, "qp_num": other.qp.qp_num, "dlid": 1})  # type: ignore[union-attr]
        for _ in range(2):
            sender.qp.send(to, [b"x" * self.draw.randrange(64)], timeout=0)
        self.receive()

    def port(self, cm_id: CmId) -> FabricPort:
        return next(port for port in self.fabric.ports if port.name == cm_id.device)

    def receive(self) -> None:
        """Note what came, from whom, and what was counted."""
        for cm_id in self.ids:
            assert cm_id.qp is not None
            try:
                while (message := cm_id.qp.recv_one(0)) is not None:
                    self.log.append(
                        (cm_id.qp.qp_num, message.src_qp, message.src_lid, bytes(message.payload))
                    )
            except McastError as error:
                self.log.append((cm_id.qp.qp_num, error.errno))
            self.log.append(cm_id.qp.counters)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", MAKE)
def test_a_remembered_path_is_never_a_stale_one(kind: str, seed: int) -> None:
    remembering, forgetful = (Life(kind, seed, forgetful).live(300) for forgetful in (False, True))
    assert remembering == forgetful
    assert sum(isinstance(entry, tuple) and len(entry) == 4 for entry in remembering) > 100


CHANGES: list[tuple[str, Callable[[Fabric], None]]] = [
    ("roce", lambda fabric: fabric.remove_device(fabric.ports[1])),
    ("ib", lambda fabric: fabric.remove_device(fabric.ports[1])),
    ("ib", lambda fabric: fabric.set_pkeys(fabric.ports[0], ())),
]


@pytest.mark.parametrize(("kind", "change"), CHANGES)
def test_nothing_arrives_any_more(kind: str, change: Callable[[Fabric], None]) -> None:
    """The device is removed, or the sender loses its partition: rare in the lives above."""
    life = Life(kind, 0, forgetful=False)
    for cm_id in life.ids[:2]:
        cm_id.join_multicast(GROUPS[0])
        event = life.channel.get_event(1)
    assert event is not None
    assert event.ud is not None
    sender, receiver = (cm_id.qp for cm_id in life.ids[:2])
    assert sender is not None
    assert receiver is not None
    for _ in range(2):
        sender.send_one(event.ud.destination, b"x")
        assert receiver.counters.received == 1
        change(life.fabric)
