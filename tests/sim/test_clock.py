"""Time on a fabric: virtual time jumps, a stalled call says so, a descriptor lets time pass."""

from __future__ import annotations

import asyncio
import errno
import gc
import pickle
import select
import threading
from collections.abc import Callable
from concurrent.futures import Future
from math import inf, nan

import pytest

import mcast
from mcast.api import Broken, Closed, CmEvent, CmEventType, Phase, QpInit
from mcast.backends.model.times import NS
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.backend import SimBackend
from mcast.backends.sim.clock import POLL_NS, SimulationStalled, VirtualClock, WallClock
from mcast.backends.sim.faults import Delay, Requests
from mcast.backends.sim.faults.rules import Delivery, SaRequest
from mcast.wire.mcmember import SaMethod

from ..waiting import descriptors, until

GROUP = "239.1.1.1"


def test_steps_run_by_time_then_by_scheduling() -> None:
    """Due things happen in order of time then of scheduling."""
    clock, seen = VirtualClock(), list[str]()
    for delay, name in ((20, "c"), (10, "a"), (10, "b")):
        clock.call_later(delay, lambda name=name: seen.append(name))  # type: ignore[misc]
    clock.advance(1)
    assert seen == ["a", "b", "c"]
    assert clock.now == NS


def test_wait_jumps_to_the_next_step() -> None:
    """Waiting jumps to the next due thing and not past it."""
    clock, seen = VirtualClock(), list[int]()
    clock.call_later(5 * NS, lambda: seen.append(clock.now))
    assert clock.wait(lambda: bool(seen), 60.0, "test", Phase.EVENT)
    assert (seen, clock.now) == ([5 * NS], 5 * NS)


def test_a_wait_ends_when_what_is_due_ends_it() -> None:
    with open_fabric(Fabric.roce()) as backend:
        channel = backend.event_channel()
        assert isinstance(backend, SimBackend)
        backend.fabric.clock.call_later(NS, channel.close)
        backend.fabric.clock.call_later(2 * NS, lambda: None)
        with pytest.raises(Closed):
            channel.get_event(60)
        assert backend.now() == 1


def test_faults_are_refused_within_a_change() -> None:
    """The fabric's own close is carried out when the change ends."""
    fabric = Fabric.roce()
    port, clock = fabric.ports[0], fabric.clock

    def change() -> None:
        clock.call_later(NS, lambda: None)
        with pytest.raises(RuntimeError, match="in the middle of test of the same simulated fabric"):
            fabric.set_link(port, up=False)
        fabric.close()
        assert clock._due

    clock.guard.run("test", Phase.EVENT, change)
    assert port.up
    assert not clock._due
    fabric.set_link(port, up=False)
    assert not port.up


def test_what_comes_aside_may_change_the_fabric() -> None:
    """A planned fault acts in a step, too."""
    fabric = Fabric.roce()
    port, clock = fabric.ports[0], fabric.clock
    clock.call_later(NS, lambda: clock.defer(lambda: fabric.set_link(port, up=False)))
    clock.run_until_idle()
    assert not port.up


def test_a_timeout_takes_its_time_and_a_poll_a_little() -> None:
    clock = VirtualClock()
    assert not clock.wait(lambda: False, 2.0, "test", Phase.EVENT)
    assert clock.now == 2 * NS
    assert not clock.wait(lambda: False, 0, "test", Phase.EVENT)
    assert clock.now == 2 * NS + POLL_NS


HUGE = [1e10, 1e300, inf, 10**400]


@pytest.mark.parametrize("seconds", HUGE, ids=["1e10", "1e300", "inf", "int"])
def test_a_long_timeout_waits_long(seconds: float) -> None:
    clock = VirtualClock()
    clock.advance(seconds)
    assert clock.now >= 9e9 * NS
    with open_fabric(Fabric.roce(clock="wall")) as backend, backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        waiting: Future[CmEvent | None] = Future()
        thread = threading.Thread(target=lambda: waiting.set_result(channel.get_event(seconds)), daemon=True)
        thread.start()
        cm_id.join_multicast(GROUP)
        assert waiting.result(30) is not None
        thread.join()


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_invalid_timeout_is_refused(clock: str) -> None:
    """A timeout that is no number is refused and one below 0 polls."""
    with open_fabric(Fabric.roce(clock=clock)) as backend, backend.event_channel() as channel:
        with pytest.raises(ValueError, match="timeout is nan: give a number of seconds"):
            channel.get_event(nan)
        assert channel.get_event(-inf) is None


def test_a_call_leaves_the_thread_of_the_clock_asleep() -> None:
    """It is woken by what is scheduled alone: a thread that wakes takes longer than a message."""
    clock = WallClock()
    with clock:
        clock.call_later(10**18, lambda: None)
    until(lambda: bool(clock._alarm._asleep))
    (before,) = clock._alarm._asleep
    clock.guard.run("test", Phase.EVENT, lambda: None)
    assert clock._alarm._asleep == {before}
    done = list[bool]()
    clock.guard.run("test", Phase.EVENT, clock.call_later, 0, lambda: done.append(True))
    until(lambda: bool(done))
    clock.guard.close(clock.close)


@pytest.mark.parametrize("seconds", HUGE, ids=["1e10", "1e300", "inf", "int"])
def test_a_fault_far_away_leaves_the_clock_running(seconds: float) -> None:
    fabric = Fabric.infiniband(clock="wall")
    late = fabric.rules.when(Requests(nth=1), Delay(10**400 if seconds == inf else int(seconds)))
    with late, open_fabric(fabric) as backend, backend.event_channel() as channel:
        for number in (1, 2):
            cm_id = channel.create_id()
            cm_id.bind_addr(f"10.0.0.{number}")
            cm_id.join_multicast(GROUP)
        event = channel.get_event(30)
        assert event is not None
        assert event.id is cm_id
    fabric.restart_sm(seconds)
    fabric.program_late(seconds)
    fabric.close()


def test_forgotten_clock_frees_its_thread() -> None:
    """A forgotten clock frees its thread and descriptors."""

    def pumps() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "mcast-sim-clock"]

    before, running = descriptors(), pumps()

    def forget_three() -> None:
        for _ in range(3):
            endpoint = mcast.open_endpoint("sim-ib", "10.0.0.1", options={"clock": "wall"})
            endpoint.join(GROUP)
            assert endpoint.backend.event_channel().fileno() >= 0
        del endpoint
        gc.collect()

    forget_three()
    for thread in set(pumps()) - set(running):
        thread.join(300)
    assert set(pumps()) <= set(running), "one of another test may have ended meanwhile"
    until(lambda: descriptors() <= before)


def test_a_rule_that_fails_breaks_the_fabric(caplog: pytest.LogCaptureFixture) -> None:
    """By the clock's thread: whoever waits is told so, and the log says why."""

    def fail(request: SaRequest) -> Delay | None:
        if request.method is SaMethod.DELETE:  # by the clock's thread: the join that is left is under way
            raise ZeroDivisionError
        return Delay(NS)

    fabric = Fabric.infiniband(clock="wall")
    with (
        open_fabric(fabric) as backend,
        backend.event_channel() as channel,
        fabric.rules.on_sa_request(fail),
    ):
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        cm_id.join_multicast(GROUP)
        cm_id.leave_multicast(GROUP)
        with pytest.raises(Broken, match="the simulated fabric was interrupted in the middle of a step"):
            channel.get_event(60)
    fabric.close()
    until(
        lambda: "a scheduled step of the simulated fabric failed, and the fabric is now broken" in caplog.text
    )


def test_a_rule_that_fails_ends_its_call() -> None:
    def fail(delivery: Delivery) -> None:
        raise ZeroDivisionError

    fabric = Fabric.roce(ports=2)
    with open_fabric(fabric) as backend, fabric.rules.on_delivery(fail), backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        qp = cm_id.create_qp()
        cm_id.join_multicast(GROUP)
        event = channel.get_event(1)
        assert event is not None
        assert event.ud is not None
        with pytest.raises(ZeroDivisionError):
            qp.send(event.ud.destination, [b"x"])
        with pytest.raises(Broken, match="in the middle of send: close the backend and open another one"):
            qp.recv(timeout=0)
    assert fabric.qps == ()


def test_time_does_not_go_back() -> None:
    clock = VirtualClock()
    clock.advance(1)
    clock.call_later(-NS, lambda: None)
    clock.run_until_idle()
    assert clock.now == NS


def test_endless_wait_is_an_error() -> None:
    """Waiting for what never comes is an error not a hang."""
    with open_fabric(Fabric.roce()) as backend, backend.event_channel() as channel:
        with pytest.raises(SimulationStalled, match="would never return") as stalled:
            channel.get_event()
        assert stalled.value.errno == errno.EDEADLK
        again = pickle.loads(pickle.dumps(stalled.value))
        assert (type(again), str(again)) == (SimulationStalled, str(stalled.value))


def test_polling_lets_events_arrive() -> None:
    """Polling gets an event that is still on its way."""
    with open_fabric(Fabric.infiniband()) as backend, backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        cm_id.join_multicast(GROUP)
        polls = 1
        while (event := channel.get_event(timeout=0)) is None:
            polls += 1
        assert event.check().type is CmEventType.MULTICAST_JOIN
        assert 2 < polls < 1_000


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_descriptor_becomes_readable_by_itself(make: Callable[..., Fabric]) -> None:
    """A descriptor becomes readable although nobody waits in a call."""
    with open_fabric(make()) as backend, backend.event_channel() as channel:
        fd = channel.fileno()
        assert not select.select([fd], [], [], 0)[0]
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        cm_id.join_multicast(GROUP)
        assert select.select([fd], [], [], 0)[0]
        assert channel.get_event(0)
        assert not select.select([fd], [], [], 0)[0]


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_two_threads_on_wall_clock_time(make: Callable[..., Fabric]) -> None:
    fabric = make(clock="wall")
    received: list[bytes] = []
    joined = threading.Event()
    with open_fabric(fabric) as backend:

        def receive() -> None:
            with backend.event_channel() as channel:
                cm_id = channel.create_id()
                cm_id.bind_addr("10.0.0.2")
                qp = cm_id.create_qp(QpInit())
                cm_id.join_multicast(GROUP)
                event = channel.get_event(10)
                assert event is not None
                event.check()
                joined.set()
                while len(received) < 100:
                    with qp.recv(64, timeout=10) as batch:
                        received.extend(bytes(message.payload) for message in batch)

        receiver = threading.Thread(target=receive)
        receiver.start()
        with backend.event_channel() as channel:
            cm_id = channel.create_id()
            cm_id.bind_addr("10.0.0.1")
            qp = cm_id.create_qp()
            cm_id.join_multicast(GROUP)
            event = channel.get_event(10)
            assert event is not None
            assert event.ud is not None
            assert joined.wait(10)
            for number in range(100):
                qp.send_one(event.ud.destination, b"%d" % number)
            receiver.join(100)
    fabric.close()
    assert received == [b"%d" % number for number in range(100)]


@pytest.mark.parametrize("clock", ["virtual", "wall"])
@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_asyncio_waits_on_the_descriptor(make: Callable[..., Fabric], clock: str) -> None:
    async def join() -> CmEventType:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        with open_fabric(fabric) as backend, backend.event_channel() as channel:
            loop.add_reader(channel.fileno(), readable.set)
            cm_id = channel.create_id()
            cm_id.bind_addr("10.0.0.1")
            cm_id.join_multicast(GROUP)
            await asyncio.wait_for(readable.wait(), 10)
            loop.remove_reader(channel.fileno())
            event = channel.get_event(0)
            assert event is not None
            return event.type

    fabric = make(clock=clock)
    assert asyncio.run(join()) is CmEventType.MULTICAST_JOIN
    fabric.close()
