"""The trace's schema: every kind is written, read back the same, and says what became of each message."""

from __future__ import annotations

import json
from contextlib import nullcontext
from errno import ETIMEDOUT

import pytest
from pydantic import ValidationError

from mcast.api import CmId, Destination, EventChannel, JoinAttrEx, QpError, QpInit, QpState, QueuePair
from mcast.backends.model.log_events import EventQueued, JoinAccepted, Leave
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.core.sa_exchange import SA_TIMEOUT_NS
from mcast.backends.sim.faults import Delay, Drop
from mcast.backends.sim.trace.events import (
    KINDS,
    Deliver,
    IgmpReport,
    Link,
    MessagesLost,
    SaAnswered,
    Send,
    Trace,
    Unsent,
)

GROUP = "239.1.1.1"
SCENES = ("roce", "infiniband")


class Scene:
    """A fabric with a trace, and an id with a QP on each of its ports."""

    def __init__(self, kind: str, **options: int) -> None:
        self.fabric: Fabric = getattr(Fabric, kind)(ports=3, trace=True, **options)
        self.backend = open_fabric(self.fabric)
        self.channel: EventChannel = self.backend.event_channel()
        self.ids = [self._ready(device.ports[0].addresses[0]) for device in self.backend.devices()]

    def _ready(self, address: object) -> CmId:
        cm_id = self.channel.create_id()
        cm_id.bind_addr(address)  # type: ignore[arg-type]
        cm_id.create_qp(QpInit(max_recv_wr=4))
        return cm_id

    def join(self, index: int, attr: JoinAttrEx | None = None) -> Destination:
        self.ids[index].join_multicast_ex(attr or JoinAttrEx.full_member(GROUP))
        event = self.channel.get_event(5)
        assert event is not None
        ud = event.check().ud
        assert ud is not None
        return ud.destination

    def qp(self, index: int) -> QueuePair:
        qp = self.ids[index].qp
        assert qp is not None
        return qp

    @property
    def trace(self) -> Trace:
        assert self.fabric.trace is not None
        return self.fabric.trace

    def events(self, kind: type) -> list[dict[str, object]]:
        """The events of a kind, as in their lines, without `what`."""
        found = [event for _, event in self.trace if isinstance(event, kind)]
        return [event.model_dump(mode="json", exclude={"what"}) for event in found]


@pytest.fixture(params=SCENES)
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(request.param)


def eventful(kind: str) -> Scene:
    """A scene in which every kind of event of its fabric happens."""
    scene = Scene(kind)
    fabric, ports = scene.fabric, scene.fabric.ports
    to = scene.join(0)
    scene.join(1)
    with fabric.rules.on_delivery(lambda d: Drop() if d.number == 1 else Delay(50)):
        scene.qp(0).send(to, [b"one", b"two"])
    fabric.clock.run_until_idle()
    scene.qp(0).send(to, [b"\x00\xff"], imm=5)
    fabric.set_link(ports[1], up=False)
    fabric.set_link(ports[1], up=True)
    scene.ids[0].leave_multicast(GROUP)
    fabric.clock.run_until_idle()
    fabric.bond_failover(ports[2])
    fabric.set_link(ports[0], up=False)
    # On RoCE the QP falls into ERR; on InfiniBand the message is lost in silence.
    with pytest.raises(QpError) if kind == "roce" else nullcontext():
        scene.qp(0).send(to, [b"into the void"])
    fabric.remove_device(ports[2])
    return scene


# --- the schema --------------------------------------------------------------------------


def test_every_kind_is_documented_and_written() -> None:
    written = {event.what for kind in SCENES for _, event in eventful(kind).trace}
    assert written == set(KINDS)
    assert all(kind.__doc__ for kind in KINDS.values())


@pytest.mark.parametrize("kind", SCENES)
def test_a_trace_is_read_back_as_it_was(kind: str) -> None:
    trace = eventful(kind).trace
    again = Trace.load(str(trace))
    assert list(again) == list(trace)
    assert str(again) == str(trace)


@pytest.mark.parametrize("kind", SCENES)
def test_lines_are_objects_in_order_of_time(kind: str) -> None:
    lines = [json.loads(line) for line in str(eventful(kind).trace).splitlines()]
    assert all(list(line)[:2] == ["t", "what"] for line in lines)
    assert [line["t"] for line in lines] == sorted(line["t"] for line in lines)
    assert lines[0]["what"] == "fabric"


@pytest.mark.parametrize(
    "bad",
    [
        "no json",
        "[]",
        "{}",
        '{"t": 1, "what": "nonsense"}',
        "[" * 100_000,
        '{"t": 1e400, "what": "link", "port": "p", "up": true}',
        '{"t": -1, "what": "link", "port": "p", "up": true}',
        f'{{"t": {1 << 63}, "what": "link", "port": "p", "up": true}}',
        f'{{"t": {"9" * 5000}, "what": "link", "port": "p", "up": true}}',
        '{"t": 1, "what": "deliver", "port": "p", "qp": 1, "group": "ff0e::1", "first": 0, "count": 1e15}',
        '{"t": 1, "what": "deliver", "port": "p", "qp": 1e9, "group": "ff0e::1", "first": 0, "count": 1}',
        '{"t": 1, "what": "link", "port": "p"}',
        '{"t": 1, "what": "link", "port": "p", "up": true, "more": 1}',
        '{"t": 1, "what": "sa-answer", "port": "p", "lid": 1, "tid": 1, "method": "SET", "mask": 0,'
        ' "status": "OK", "record": 7}',
    ],
)
def test_a_line_that_is_none_is_named(bad: str) -> None:
    with pytest.raises(ValueError, match="line 2 is no line of a trace") as raised:
        Trace.load('{"t": 0, "what": "link", "port": "p", "up": true}\n' + bad)
    assert type(raised.value) is ValueError


@pytest.mark.parametrize(
    ("field", "value"),
    [("mlid", 1 << 16), ("qkey", -1), ("mgid", "ff0e"), ("sl", "x"), ("sl", None), ("qkey", 1.5)],
)
def test_a_record_that_does_not_fit_is_refused(field: str, value: object) -> None:
    lines = [json.loads(line) for line in str(eventful("infiniband").trace).splitlines()]
    asked = next(line for line in lines if line["what"] == "sa-request")
    asked["record"][field] = value
    with pytest.raises(ValueError, match="line 1 is no line of a trace"):
        Trace.load(json.dumps(asked))


def test_unknown_field_of_an_event_is_refused() -> None:
    """A field that an event does not have is refused."""
    fabric = Fabric.roce(trace=True)
    with pytest.raises(ValidationError, match="Extra inputs"):
        fabric.core.log.note(Link, port="roce0", up=True, why="so")  # type: ignore[call-arg]


def test_without_a_trace_nothing_is_made() -> None:
    fabric = Fabric.roce()

    def never(**_: object) -> Link:
        raise AssertionError

    fabric.core.log.note(never)
    assert fabric.trace is None


# --- what it says ------------------------------------------------------------------------


def test_a_membership_from_join_to_leave(scene: Scene) -> None:
    scene.join(1)
    scene.ids[1].leave_multicast(GROUP)
    port, number = scene.fabric.ports[1].name, 2
    group = "::ffff:239.1.1.1" if scene.fabric.sa is None else "ff12:4001:ffff::f01:101"
    common = {"port": port, "id": number, "group": group}
    assert scene.events(JoinAccepted) == [{**common, "qp": 17, "address": GROUP, "send_only": False}]
    assert scene.events(EventQueued) == [{**common, "type": "MULTICAST_JOIN", "status": 0, "errno": 0}]
    assert scene.events(Leave) == [common]
    order = [event.what for _, event in scene.trace]
    assert order.index("join") < order.index("event") < order.index("attach")
    assert order.index("attach") < order.index("detach") < order.index("leave")


def test_a_send_only_join_sends_no_igmp() -> None:
    scene = Scene("roce")
    scene.join(0, JoinAttrEx.send_only(GROUP))
    assert scene.events(IgmpReport) == []
    scene.join(1)
    assert scene.events(IgmpReport) == [{"port": "roce1", "source": "10.0.0.2", "group": "::ffff:239.1.1.1"}]


def test_messages_and_psns_are_numbered(scene: Scene) -> None:
    """Messages are numbered over the fabric and PSNs over the QP."""
    to = scene.join(0)
    scene.qp(0).send(to, [b"a", b"b"])
    scene.qp(1).send(to, [b"c"])
    scene.qp(0).send(to, [b"d"])
    sends = scene.events(Send)
    assert [(s["qp"], s["first"], s["psn"]) for s in sends] == [(16, 0, 0), (17, 2, 0), (16, 3, 2)]
    assert [s["payloads"] for s in sends] == [["61", "62"], ["63"], ["64"]]


def test_each_message_is_delivered_or_has_a_reason(scene: Scene) -> None:
    """Each message is delivered or lost with a reason.

    Four receives are posted: of six messages the last two are lost.
    """
    to = scene.join(0)
    scene.join(1)
    scene.qp(1).send(to, [b"x"] * 6)
    fates = [
        {**common, "first": 0, "count": 4} if kind is Deliver else {**common, "first": 4, "count": 2, **why}
        for kind, why in ((Deliver, {}), (MessagesLost, {"reason": "no receive is free"}))
        for common in (
            {"port": scene.fabric.ports[index].name, "qp": 16 + index, "group": str(to.gid)}
            for index in (0, 1)
        )
    ]
    assert scene.events(Deliver) + scene.events(MessagesLost) == fates


@pytest.mark.parametrize("kind", SCENES)
@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("qkey", "the Q_Key differs"),
        ("link", "the link is down"),
        ("cable", "a switch is cut off"),
        ("rule", "a fault rule dropped it"),
        ("state", "the QP is in INIT"),
        ("no-join", "the fabric does not deliver the group to the port"),
    ],
)
def test_why_a_message_was_lost(kind: str, cause: str, reason: str) -> None:
    """One message from port 0 to port 1, which has its QP attached, but for one thing."""
    scene = Scene(kind, switches=3)
    fabric, port = scene.fabric, scene.fabric.ports[1]
    to = scene.join(0)
    if cause == "no-join":
        scene.qp(1).attach_mcast(to.gid, to.dlid)
    else:
        scene.join(1)
    if cause == "state":
        for state in (QpState.RESET, QpState.INIT):
            scene.qp(1).modify(state)
    elif cause == "link":
        fabric.set_link(port, up=False)
    elif cause == "cable":
        fabric.cut_cable(port.switch)
    elif cause == "qkey":
        to = to.model_copy(update={"qkey": 7})
    elif cause == "rule":
        fabric.rules.on_delivery(lambda d: Drop() if d.target == port.name else None)
    scene.qp(0).send(to, [b"x"])
    lost = [event for event in scene.events(MessagesLost) if event["port"] == port.name]
    group = str(to.gid)
    expected = {"port": port.name, "qp": 17, "group": group, "first": 0, "count": 1, "reason": reason}
    assert lost == [expected]


def test_what_never_left_its_port_says_so() -> None:
    for kind, reason in (("roce", "LOC_QP_OP_ERR"), ("infiniband", "the sender's link is down")):
        unsent = eventful(kind).events(Unsent)
        assert [(event["count"], event["reason"]) for event in unsent] == [(1, reason)]


def test_silent_sa_is_given_up() -> None:
    """An SA that says nothing is given up after its timeout."""
    scene = Scene("infiniband")
    with scene.fabric.rules.on_sa_request(lambda _: Drop()):
        scene.ids[0].join_multicast(GROUP)
        event = scene.channel.get_event(10)
    assert event is not None
    assert event.errno == ETIMEDOUT
    silent = [
        (t, event.tid) for t, event in scene.trace if isinstance(event, SaAnswered) and event.status is None
    ]
    assert silent == [(SA_TIMEOUT_NS, 1)]
