"""The plugin for tests of applications: fabrics, faults, seeds, and what a test has left open."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest

# A run in this process forgets the modules that it has imported first: some would come twice.
import mcast.aio
import mcast.backends.sim.open_objects
import mcast.backends.sim.scenario.faults
import mcast.endpoint.blocking  # noqa: F401

pytest_plugins = ["pytester"]

Suite = Callable[..., pytest.RunResult]

HEAD = """
import asyncio, gc, logging
import pytest
import mcast
from mcast import open_backend, open_endpoint
from mcast.api import JoinAttrEx
from mcast.api import BackendUnavailable, LinkLayer, McastError
from mcast.backends.sim.faults import Drop, Messages, Refuse, Requests
from mcast.wire.mcmember import SaMethod, SaStatus

GROUP = "239.1.1.1"

def received(endpoint):
    found = []
    for batch in endpoint.batches(timeout=1):
        found += [bytes(message.payload) for message in batch]
    return found
"""
FIRST = HEAD.count("\n")
"""The line of a file that a suite's tests begin in."""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> Suite:
    """Run pytest on a file of tests, in this process."""

    def call(tests: str, *options: str, subprocess: bool = False) -> pytest.RunResult:
        pytester.makepyfile(test_it=HEAD + tests)
        run = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        plugins = [] if subprocess else ["-p", "no:asyncio"]  # which warns where its ini says nothing
        return run("-p", "no:cacheprovider", *plugins, "--strict-markers", "-rA", *options)

    return call


def output(result: pytest.RunResult) -> str:
    return result.stdout.str()


# --- the fabric -----------------------------------------------------------------------------------


def test_application_opens_the_tests_fabric_by_name(suite: Suite) -> None:
    """An application reaches the fabric of its test by name."""
    result = suite("""
@pytest.mark.mcast(fabric=["roce", "infiniband"], ports=3)
def test_each(mcast_fabric):
    name = "sim-roce" if mcast_fabric.sa is None else "sim-ib"
    with open_endpoint("sim", "10.0.0.1") as one, open_endpoint(name, "10.0.0.2") as other:
        with one.join(GROUP) as group, other.join(GROUP):
            group.send(b"seen by name")
            assert bytes(other.recv(timeout=1).payload) == b"seen by name"
        assert len(one.backend.devices()) == len(mcast_fabric.ports) == 3

def test_the_other_kind_is_refused(mcast_fabric):
    with pytest.raises(BackendUnavailable) as refused:
        open_backend("sim-ib")
    assert str(refused.value) == (
        "backend 'sim-ib': no device: the fabric of this test is roce; "
        "mark the test @pytest.mark.mcast(fabric='infiniband'), or open 'sim'"
    )

def test_options_are_the_fabrics(mcast_fabric, caplog):
    caplog.set_level(logging.INFO)
    with open_backend("sim", ports=9) as backend:
        assert len(backend.devices()) == 4
    assert "the options ports are ignored" in caplog.text

def test_without_the_fixture_the_name_is_as_ever():
    with open_backend("sim-ib", ports=2) as backend:
        assert len(backend.devices()) == 2
""")
    result.assert_outcomes(passed=5)
    assert "test_each[roce]" in output(result)
    assert "test_each[infiniband]" in output(result)


def test_marks_add_up_and_the_nearest_wins(suite: Suite) -> None:
    suite("""
pytestmark = pytest.mark.mcast(fabric="infiniband", ports=6)

def test_module(mcast_fabric):
    assert (mcast_fabric.link_layer, len(mcast_fabric.ports)) == (LinkLayer.INFINIBAND, 6)

@pytest.mark.mcast(ports=2)
class TestClass:
    def test_class(self, mcast_fabric):
        assert (mcast_fabric.link_layer, len(mcast_fabric.ports)) == (LinkLayer.INFINIBAND, 2)

    @pytest.mark.mcast(fabric="roce", mtu=2048)
    def test_own(self, mcast_fabric):
        assert (mcast_fabric.link_layer, len(mcast_fabric.ports)) == (LinkLayer.ETHERNET, 2)
        assert mcast_fabric.ports[0].mtu == 2048
""").assert_outcomes(passed=3)


def test_the_ini_file_says_on_which_fabrics_tests_run(suite: Suite, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmcast_fabric = infiniband roce\n")
    result = suite("""
def test_both(mcast_fabric, mcast_endpoints): pass

@pytest.mark.mcast(fabric="roce")
def test_one(mcast_fabric): pass

@pytest.mark.parametrize("mcast_fabric, n", [("roce", 1)], indirect=["mcast_fabric"])
def test_own(mcast_fabric, n): pass
""")
    result.assert_outcomes(passed=4)
    names = re.findall(r"PASSED test_it.py::(\S+)", output(result))
    assert names == ["test_both[infiniband]", "test_both[roce]", "test_one", "test_own[roce-1]"]


COROUTINES = """
import asyncio, inspect
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        names = inspect.signature(pyfuncitem.obj).parameters
        asyncio.run(pyfuncitem.obj(*(pyfuncitem.funcargs[name] for name in names)))
        return True
"""


def test_time_is_virtual_but_for_coroutines(suite: Suite, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(COROUTINES)
    suite("""
def test_virtual(mcast_fabric):
    mcast_fabric.clock.advance(1e6)
    assert mcast_fabric.clock.now == 10**15

async def test_coroutine(mcast_fabric):
    assert type(mcast_fabric.clock).__name__ == "WallClock"

@pytest.mark.mcast(clock="wall")
def test_threads(mcast_fabric):
    assert type(mcast_fabric.clock).__name__ == "WallClock"
""").assert_outcomes(passed=3)


# --- endpoints ------------------------------------------------------------------------------------


def test_endpoints_have_own_ports(suite: Suite) -> None:
    """Endpoints have ports of their own and are closed."""
    result = suite("""
kept = []

def test_three(mcast_endpoints, mcast_fabric):
    a, b = mcast_endpoints(2)
    (c,) = mcast_endpoints(sequence=True, loopback="filter")
    kept.extend((a, b, c))
    assert [str(one.address) for one in kept] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    for one in kept:
        one.join(GROUP)
    with pytest.raises(ValueError, match=r"4 ports, not 5: mark the test @pytest.mark.mcast\\(ports=5\\)"):
        mcast_endpoints(2)
    assert all(not one.closed for one in kept)

def test_then():
    assert all(one.closed for one in kept)
""")
    result.assert_outcomes(passed=2)


def test_async_endpoints_close_after_their_loop(suite: Suite, pytester: pytest.Pytester) -> None:
    """Endpoints of coroutines are closed after their loop."""
    pytester.makeconftest(COROUTINES)
    suite("""
kept = []

@pytest.mark.mcast(fabric=["roce", "infiniband"])
async def test_awaited(mcast_endpoints):
    kept.extend(mcast_endpoints.aio(2, sequence=True))
    sender, receiver = kept[-2:]
    group = await sender.join(GROUP)
    await receiver.join(GROUP)
    await group.send(b"awaited")
    assert bytes((await receiver.recv(timeout=5)).payload) == b"awaited"

async def test_leak(mcast_fabric):
    kept.append(mcast.aio.open_endpoint("sim", "10.0.0.1"))
    await kept[-1].join(GROUP)

def test_then():
    assert [one.closed for one in kept] == [True] * 5  # the last one with its fabric
""").assert_outcomes(passed=4, errors=1)


# --- coroutines ---------------------------------------------------------------------------------

AWAITED = """
kept = []

@pytest.fixture
def anyio_backend(): return "asyncio"

{mark}
@pytest.mark.mcast(fabric=["roce", "infiniband"])
async def test_awaited(mcast_aio_endpoints, mcast_fabric):
    kept.extend(mcast_aio_endpoints(2, sequence=True))
    sender, receiver = kept[-2:]
    group = await sender.join(GROUP)
    await receiver.join(GROUP)
    await group.send(b"awaited")
    assert bytes((await receiver.recv(timeout=5)).payload) == b"awaited"
    assert type(mcast_fabric.clock).__name__ == "WallClock"

{mark}
async def test_closed():
    assert [one.closed for one in kept] == [True] * 4

{mark}
async def test_too_many(mcast_aio_endpoints):
    with pytest.raises(ValueError, match="4 ports, not 5"):
        mcast_aio_endpoints(5)

{mark}
async def test_a_task_that_receives_ends(mcast_aio_endpoints):
    (endpoint,) = mcast_aio_endpoints()
    kept.append(asyncio.create_task((await endpoint.join(GROUP)).recv()))
    await asyncio.sleep(0)
    kept.append(endpoint)

def test_its_loop_has_ended_it():
    task, endpoint = kept[-2:]
    assert endpoint.closed
    assert task.done()
"""
STRICT = ("-o", "asyncio_default_fixture_loop_scope=function")


@pytest.mark.parametrize(
    ("mark", "options"),
    [
        ("@pytest.mark.anyio", STRICT),
        ("@pytest.mark.anyio", ("-p", "no:asyncio")),
        ("@pytest.mark.asyncio", STRICT),
        ("@pytest.mark.asyncio", (*STRICT, "-p", "no:anyio")),
        ("", (*STRICT, "--asyncio-mode=auto")),
    ],
    ids=["anyio", "anyio alone", "asyncio", "asyncio alone", "asyncio auto"],
)
def test_async_endpoints(suite: Suite, mark: str, options: tuple[str, ...]) -> None:
    """The fixture gives endpoints in the test's loop, and closes them there, by either plugin."""
    result = suite(AWAITED.format(mark=mark), *options, "-W", "error", subprocess=True)
    result.assert_outcomes(passed=6)


def test_async_endpoints_need_a_plugin(suite: Suite) -> None:
    result = suite("def test_it(mcast_aio_endpoints): pass", "-p", "no:asyncio", "-p", "no:anyio")
    result.assert_outcomes(errors=1)
    assert "mcast_aio_endpoints needs a plugin that runs coroutines: mark the test" in output(result)


def test_async_fixtures_of_a_test_may_build_on_it(suite: Suite) -> None:
    """A fixture of the user's that opens and joins is awaited in the same loop as its test."""
    suite(
        """
import pytest_asyncio

@pytest_asyncio.fixture
async def pair(mcast_aio_endpoints):
    one, other = mcast_aio_endpoints(2)
    async with one.sender(GROUP) as sender, other.join(GROUP) as member:
        yield sender, member

@pytest.mark.asyncio
async def test_pair(pair):
    sender, member = pair
    await sender.send(b"x")
    assert bytes((await member.recv(timeout=5)).payload) == b"x"

def test_sync(mcast_aio_endpoints, mcast_fabric):
    assert type(mcast_fabric.clock).__name__ == "WallClock"
""",
        *STRICT,
        subprocess=True,
    ).assert_outcomes(passed=2)


# --- faults ---------------------------------------------------------------------------------------


def test_endpoints_whose_loop_goes_on_are_closed_in_it(suite: Suite) -> None:
    """A loop that several tests share, idle or in another thread, or closed while a task waited."""
    result = suite(
        """
import threading

KEPT = []

async def waits(mcast_endpoints):
    (endpoint,) = mcast_endpoints.aio()
    task = asyncio.create_task((await endpoint.join(GROUP)).recv())
    while not endpoint._waiters:
        await asyncio.sleep(0)
    KEPT.append((endpoint, task))

def test_at_rest(mcast_endpoints):
    KEPT.append(asyncio.new_event_loop())
    KEPT[0].run_until_complete(waits(mcast_endpoints))

def test_elsewhere(mcast_endpoints):
    loop = KEPT[0]
    KEPT.append(threading.Thread(target=loop.run_forever))
    KEPT[-1].start()
    asyncio.run_coroutine_threadsafe(waits(mcast_endpoints), loop).result(60)

def test_closed(mcast_endpoints):
    loop, thread = KEPT[0], KEPT[2]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.run_until_complete(waits(mcast_endpoints))
    loop.close()

def test_then():
    endpoints, tasks = zip(*(KEPT[at] for at in (1, 3, 4)))
    assert [endpoint.closed for endpoint in endpoints] == [True] * 3
    assert [type(task.exception()).__name__ for task in tasks[:2]] == ["Closed"] * 2
    tasks[2]._log_destroy_pending = False
    tasks[2].get_coro().close()
"""
    )
    result.assert_outcomes(passed=4)


def test_failed_open_frees_its_port(suite: Suite) -> None:
    """A port on which no endpoint was opened stays free."""
    result = suite(
        """
@pytest.mark.mcast(ports=2)
def test_two(mcast_endpoints):
    for wrong in (2, -1):
        with pytest.raises(ValueError):
            mcast_endpoints(wrong, loopback="maybe")
    assert [str(one.address) for one in mcast_endpoints(2)] == ["10.0.0.1", "10.0.0.2"]
    with pytest.raises(ValueError, match="count is -1"):
        mcast_endpoints(-1)
"""
    )
    result.assert_outcomes(passed=1)


def test_faults_by_name_by_value_and_in_time(suite: Suite) -> None:
    suite("""
MESSAGES = [b"1", b"2", b"3", b"4"]

def run(mcast_endpoints, **pause):
    sender, receiver = mcast_endpoints(2)
    group = sender.join(GROUP)
    receiver.join(GROUP)
    for message in MESSAGES:
        group.send(message)
    return received(receiver)

@pytest.mark.mcast_faults("drop", nth=2, target=1)
def test_by_name(mcast_endpoints):
    assert run(mcast_endpoints) == [b"1", b"3", b"4"]

@pytest.mark.mcast_faults(Messages(nth=(1, 3), target="roce1"), Drop())
def test_by_value(mcast_endpoints):
    assert run(mcast_endpoints) == [b"2", b"4"]

@pytest.mark.mcast(faults=[{"kind": "duplicate", "target": 1, "nth": [4]}, (Messages(nth=1), Drop())])
@pytest.mark.mcast_faults("reorder", target=1, nth=2)
def test_together(mcast_endpoints):
    # The reordering is asked for what was not dropped: its second message is the third.
    assert run(mcast_endpoints) == [b"2", b"4", b"4", b"3"]

@pytest.mark.mcast_faults("drop", nth=2)
@pytest.mark.mcast_faults("duplicate", target=1)
class TestTheUpperRuleIsAskedFirst:
    @pytest.mark.mcast_faults("drop")
    def test_it(self, mcast_endpoints):
        assert run(mcast_endpoints) == [b"1", b"1", b"3", b"3", b"4", b"4"]

@pytest.mark.mcast_faults(Messages(nth=2), Drop())
@pytest.mark.mcast_faults("duplicate", target=1)
def test_the_upper_one_by_value_too(mcast_endpoints):
    assert run(mcast_endpoints) == [b"1", b"1", b"3", b"3", b"4", b"4"]

@pytest.mark.mcast_faults("link-down", port=1, at=1, until=2)
def test_in_time(mcast_endpoints, mcast_fabric):
    sender, receiver = mcast_endpoints(2)
    group = sender.join(GROUP)
    receiver.join(GROUP)
    for message in MESSAGES[:3]:
        group.send(message)
        mcast_fabric.clock.advance(1.1)
    assert received(receiver) == [b"1", b"3"]

@pytest.mark.mcast(fabric="infiniband")
@pytest.mark.mcast_faults("sa-refuses", method="SET", nth=1, status="NO_RESOURCES")
def test_of_the_sa(mcast_endpoints):
    (one,) = mcast_endpoints(rejoin=None)
    with pytest.raises(McastError, match="no MLID is left"):
        one.join(GROUP)
    one.join(GROUP)

@pytest.mark.mcast(fabric="infiniband")
def test_the_fabrics_own_calls(mcast_endpoints, mcast_fabric):
    (one,) = mcast_endpoints()
    group = one.join(GROUP)
    mcast_fabric.restart_sm()
    assert type(one.next_event(timeout=1)) is mcast.Lost
    assert type(one.next_event(timeout=60)) is mcast.Rejoined
""").assert_outcomes(passed=8)


# --- leaks ----------------------------------------------------------------------------------------

LEAKS = {
    "backend": ('kept.append(open_backend("sim"))', ["backend sim-roce"]),
    "endpoint": (
        'kept.append(open_endpoint("sim", "10.0.0.1")); kept[0].join(GROUP)',
        [
            "backend sim-roce, event channel, id 1 on roce0 (member of 239.1.1.1), "
            "QP 16 on roce0 (attached to ::ffff:239.1.1.1)"
        ],
    ),
    "dropped": ('open_endpoint("sim", "10.0.0.1").join(GROUP); gc.collect()', ["backend sim-roce, event"]),
    "id and unread event": (
        """
    backend = open_backend("sim")
    channel = backend.event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr("10.0.0.3")
    cm_id.join_multicast_ex(JoinAttrEx.full_member(GROUP))
    """,
        ["backend sim-roce", "event channel (1 unread event)", "id 1 on roce2 (member of 239.1.1.1)"],
    ),
    "batch": (
        """
    (one,) = mcast_endpoints()
    group = one.join(GROUP)
    group.send_batch([b"1", b"2"])
    kept.append(one.recv_batch(timeout=1))
    """,
        ["a batch of 2 messages of QP 16"],
    ),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_open_object_is_an_error_with_its_line(suite: Suite, leak: str) -> None:
    """An object that is left open is an error that names its line."""
    body, says = LEAKS[leak]
    result = suite(f"kept = []\ndef test_leak(mcast_fabric, mcast_endpoints):\n    {body}\n")
    result.assert_outcomes(passed=1, errors=1)
    text = output(result)
    found = text[text.index("the test has left open:") : text.index("Close it, with `with`")]
    assert [line for line in says if f"\n  {line}" not in found] == []
    # The endpoints of the fixture are no leak, and each place is one of the test's.
    assert set(re.findall(r"opened at (\S+):\d+ in (\S+)", found)) == {("test_it.py", "test_leak")}
    assert found.count("\n  ") - found.count("opened at") == found.count("opened at") == len(says)


def test_traces_show_by_which_calls(suite: Suite) -> None:
    tests = """
def connect():
    return open_backend("sim")

def test_leak(mcast_fabric):
    connect()
"""
    plain, traced = output(suite(tests)), output(suite(tests, "--mcast-traces"))
    assert re.search(r"opened at test_it.py:\d+ in connect\nClose", plain)
    assert re.search(
        r"opened at test_it.py:\d+ in connect\n    opened at test_it.py:\d+ in test_leak\n", traced
    )


def test_thread_waiting_on_a_leftover_wakes(suite: Suite) -> None:
    """A thread that waits on what was left open wakes."""
    suite("""
from threading import Thread

threads = []

@pytest.mark.mcast(clock="wall")
def test_leak(mcast_fabric):
    endpoint = open_endpoint("sim", "10.0.0.1")
    endpoint.join(GROUP)

    def wait():
        with pytest.raises(McastError):
            endpoint.recv()
    threads.append(Thread(target=wait))
    threads[0].start()

def test_then():
    threads[0].join(timeout=100)
    assert not threads[0].is_alive()
""").assert_outcomes(passed=2, errors=1)


def test_what_is_no_leak(suite: Suite) -> None:
    result = suite("""
kept = []

@pytest.mark.mcast(allow_leaks=True)
def test_allowed(mcast_fabric):
    kept.append(open_backend("sim"))

def test_closed(mcast_fabric):
    with open_backend("sim") as backend:
        kept.append(backend)
        channel = backend.event_channel()
        channel.create_id()

def test_a_dropped_batch_is_released(mcast_endpoints):
    (one,) = mcast_endpoints()
    one.join(GROUP).send(b"1")
    one.recv_batch(timeout=1)
    kept.append(one.recv_batch(timeout=0))  # empty

def test_a_batch_is_released_and_kept(mcast_endpoints):
    (one,) = mcast_endpoints()
    one.join(GROUP).send(b"1")
    with one.recv_batch(timeout=1) as batch:
        kept.append(batch)

def test_a_batch_in_a_caught_error(mcast_endpoints):
    (one,) = mcast_endpoints()
    one.join(GROUP).send(b"1")

    def fails():
        batch = one.recv_batch(timeout=1)
        raise KeyError

    with pytest.raises(KeyError) as caught:
        fails()

def test_failed(mcast_fabric):
    kept.append(open_backend("sim"))
    assert False

def test_skipped(mcast_fabric):
    kept.append(open_backend("sim"))
    pytest.skip()

@pytest.mark.xfail(strict=True)
def test_expected(mcast_fabric):
    kept.append(open_backend("sim"))
    assert False
""")
    result.assert_outcomes(passed=5, failed=1, skipped=1, xfailed=1)


# --- seeds ----------------------------------------------------------------------------------------

SEEDED = """
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.mcast_faults("drop", rate=0.5, target=1)
def test_drawn(mcast_endpoints, n):
    sender, receiver = mcast_endpoints(2)
    group = sender.join(GROUP)
    receiver.join(GROUP)
    group.send_batch([bytes([65 + i]) for i in range(24)])
    pytest.fail("drew " + b"".join(received(receiver)).decode(), pytrace=False)
"""


def drawn(result: pytest.RunResult) -> dict[str, str]:
    """Test -> what it drew."""
    return dict(re.findall(r"^_+ (test_drawn\S*) _+\n.*?^drew (\w+)", output(result), re.M | re.S))


def test_a_seed_follows_from_the_run_and_the_test(suite: Suite) -> None:
    first, again, other = suite(SEEDED), suite(SEEDED), suite(SEEDED, "--mcast-seed=5")
    assert len(set(drawn(first).values())) == 2
    assert drawn(first) == drawn(again)
    assert not set(drawn(first).items()) & set(drawn(other).items())
    assert "mcast: --mcast-seed=0\n" in output(first)
    assert "mcast: --mcast-seed=5\n" in output(other)


def test_random_numbers_follow_the_seed(suite: Suite) -> None:
    """Random numbers of an application follow from the seed."""
    tests = """
@pytest.mark.mcast(fabric="infiniband")
def test_drawn(mcast_fabric):
    gaps = ""
    with open_endpoint("sim", "10.0.0.1") as one, open_endpoint("sim", "10.0.0.2") as other:
        one.join(GROUP), other.join(GROUP)
        mcast_fabric.restart_sm(outage=1)
        for endpoint in (one, other):
            while not isinstance(event := endpoint.next_event(timeout=60), mcast.Rejoined):
                pass
            gaps += f"_{event.outage}"
    pytest.fail(f"drew {gaps.replace('.', '_')}", pytrace=False)
"""
    first, again, other = (drawn(suite(tests, f"--mcast-seed={seed}")) for seed in (1, 1, 2))
    assert first == again != other != {}


def test_the_mark_fixes_the_seed(suite: Suite) -> None:
    fixed = SEEDED.replace(
        "@pytest.mark.mcast_faults", "@pytest.mark.mcast(seed=7)\n@pytest.mark.mcast_faults"
    )
    draws = {drew for seed in (0, 1) for drew in drawn(suite(fixed, f"--mcast-seed={seed}")).values()}
    assert len(draws) == 1


def test_workers_share_the_seed_of_the_run(suite: Suite) -> None:
    spread = suite(SEEDED, "--mcast-seed=random", "-n", "2", subprocess=True)
    (seed,) = {command.rpartition("=")[2] for command in commands(spread)}
    assert f"mcast: --mcast-seed={int(seed)}\n" in output(spread)
    assert drawn(spread) == drawn(suite(SEEDED, f"--mcast-seed={seed}")) != {}


def commands(result: pytest.RunResult) -> list[str]:
    return re.findall(r"seed \d+; to repeat:\n(pytest .*)", output(result))


def test_the_command_of_a_failure_repeats_it(suite: Suite, pytester: pytest.Pytester) -> None:
    pytester.makefile(".ini", other="[pytest]\naddopts = -rf\n")
    options = ("-c", "other.ini", "-o", "mcast_fabric=infiniband roce", "--mcast-seed=random")
    result = suite(SEEDED, *options, "--show-capture=no")
    assert len(drawn(result)) == len(commands(result)) == 4
    for test, drew in drawn(result).items():
        (command,) = [one for one in commands(result) if f"test_it.py::{test}" in one]
        words = shlex.split(command)
        assert words[0] == "pytest"
        assert drawn(pytester.runpytest_inprocess(*words[1:])) == {test: drew}


def test_the_command_is_right_from_a_directory_below(suite: Suite, pytester: pytest.Pytester) -> None:
    suite(SEEDED)
    pytester.makeini("[pytest]\n")
    below = pytester.mkdir("below")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(below)
        result = pytester.runpytest_inprocess("..")
    assert commands(result)[0] == "pytest '../test_it.py::test_drawn[1]' --mcast-seed=0"


def test_the_seed_is_in_the_junit_file(suite: Suite, pytester: pytest.Pytester) -> None:
    suite("def test_it(mcast_fabric): pass", "--junitxml=report.xml")
    assert re.search(r'<property name="mcast_seed" value="\d+"', (pytester.path / "report.xml").read_text())


# --- mistakes, and what the plugin costs ----------------------------------------------------------

MARKED = """
import unittest

@pytest.mark.mcast_faults("drop", nth=2)
def test_faults():
    with open_endpoint("sim", "10.0.0.1") as one, open_endpoint("sim", "10.0.0.2") as other:
        other.join(GROUP)
        one.sender(GROUP).send_batch([b"1", b"2", b"3"])
        assert received(other) == [b"1", b"3"]

@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.mcast(fabric=["roce", "infiniband"], ports=2)
def test_each(n):
    with open_backend("sim") as backend:
        assert len(backend.devices()) == 2

@pytest.mark.mcast(ports=3)
class TestClass:
    def test_method(self):
        with open_backend("sim") as backend:
            assert len(backend.devices()) == 3

@pytest.mark.mcast(ports=5)
class TestOld(unittest.TestCase):
    def test_method(self):
        with open_backend("sim") as backend:
            assert len(backend.devices()) == 5

@pytest.fixture
def opened():
    with open_backend("sim") as backend:
        yield backend

@pytest.mark.mcast(ports=6)
def test_fixture(opened):
    assert len(opened.devices()) == 6

@pytest.mark.mcast(ports=7)
def test_leak():
    open_backend("sim")
"""


def test_a_mark_implies_the_fabric(suite: Suite) -> None:
    """Functions, parametrized ones, methods of both kinds, and the test's other fixtures have it."""
    result = suite(MARKED)
    result.assert_outcomes(passed=9, errors=1)
    assert "the test has left open" in output(result)
    assert "test_each[roce-1]" in output(result)
    assert "test_each[infiniband-2]" in output(result)


MISTAKES = {
    "@pytest.mark.mcast(prots=4)": "mcast(prots=…): the options of a roce fabric are ports, hosts, switches",
    "@pytest.mark.mcast(ports=0)": "mcast: ports is 0: allowed are 1..65000",
    '@pytest.mark.mcast(fabric="ether")': "the fabric is 'ether': give roce or infiniband",
    "@pytest.mark.mcast(fabric=5)": "the fabric is 5: give roce or infiniband",
    "@pytest.mark.mcast(faults=5)": "mcast(faults=5): give a list of faults",
    "@pytest.mark.mcast(faults={'kind': 'drop'})": "mcast(faults={'kind': 'drop'}): give a list of faults",
    "@pytest.mark.mcast(shared='no')": "mcast(shared='no'): give True or False",
    '@pytest.mark.mcast("infiniband")': "mcast('infiniband',): give its arguments by name, such",
    '@pytest.mark.mcast_faults("gremlins")': "mcast_faults: unknown kind 'gremlins': choose one of 'drop', ",
    '@pytest.mark.mcast_faults("drop", rate=2)': "mcast_faults: rate of drop is 2: give 1 or less",
    '@pytest.mark.mcast_faults("drop", nht=2)': "mcast_faults: there is no field nht of drop: its fields are",
    '@pytest.mark.mcast_faults("drop", source="roce0")': "mcast_faults: source of drop is 'roce0': give the",
    '@pytest.mark.mcast_faults(Messages(source="10.0.0.1"), Drop())': "mcast_faults: source is '10.0.0.1'",
    '@pytest.mark.mcast_faults("drop", 2)': "mcast_faults: str cannot have the verdict 2",
    '@pytest.mark.mcast_faults("drop", target=7)': "mcast_faults: port 7: this fabric has ports 0..3",
    '@pytest.mark.mcast_faults("restart-sm")': "mcast_faults: 'restart-sm' needs an SM: the fabric must",
    "@pytest.mark.mcast(faults=['drop'])": "mcast_faults: 'drop' is neither a table, as in a scenario, nor",
    "@pytest.mark.mcast(ports='x')": "mcast: ports is 'x'",
    "@pytest.mark.mcast(seed='x')": "mcast(seed='x'): give an int",
    "@pytest.mark.mcast(link_rate=[])": "mcast(link_rate=…): the options",
    "@pytest.mark.mcast_faults(Drop())": "mcast_faults takes the kind of one fault and its fields",
    "@pytest.mark.mcast_faults(Messages(), Refuse(SaStatus.OK))": "mcast_faults: Messages cannot have the "
    "verdict Refuse",
}


@pytest.mark.parametrize("mark", MISTAKES)
def test_a_mistake_is_told_in_one_sentence(suite: Suite, mark: str) -> None:
    result = suite(f"{mark}\ndef test_it(): raise SystemExit('never run')\ndef test_other(): pass")
    result.assert_outcomes(passed=1, errors=1)
    text = output(result)
    assert f"test_it.py:{FIRST}: {MISTAKES[mark]}" in text
    assert "Traceback" not in text
    assert "testing/plugin.py" not in text


PLACES = {
    "pytestmark = [\n    pytest.mark.mcast(prots=1)]\ndef test_it(): pass": 1,
    "pytestmark = pytest.mark.mcast(ports=2)\n@pytest.mark.mcast(prots=1)\ndef test_it(): pass": 2,
    "@pytest.mark.mcast(prots=1)\nclass TestIt:\n    def test_it(self): pass": 1,
    "class TestIt:\n    @pytest.mark.mcast(prots=1)\n    def test_it(self): pass": 2,
    "@pytest.mark.mcast(prots=1)\n@pytest.mark.parametrize('n', [1])\ndef test_it(n): pass": 1,
}


@pytest.mark.parametrize("tests", PLACES)
def test_a_mistake_has_its_place(suite: Suite, tests: str) -> None:
    result = suite(tests)
    result.assert_outcomes(errors=1)
    assert (
        f"test_it.py:{FIRST + PLACES[tests] - 1}: mcast(prots=…): the options of a roce fabric are"
        in output(result)
    )


def test_a_wrong_ini_is_named(suite: Suite) -> None:
    result = suite("def test_it(mcast_fabric): pass\ndef test_other(): pass", "-o", "mcast_fabric=ether")
    result.assert_outcomes(passed=1, errors=1)
    assert "the ini's mcast_fabric: the fabric is 'ether': give roce or infiniband" in output(result)


def test_a_seed_that_is_none_is_a_usage_error(suite: Suite) -> None:
    result = suite("def test_it(): pass", "--mcast-seed=x", subprocess=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--mcast-seed: 'x' is neither a number nor 'random'" in result.stderr.str()


def test_unused_it_imports_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
import sys
def test_it():
    assert "mcast.testing.plugin" in sys.modules
    heavy = ("mcast.", "pydantic", "cffi", "rich", "typer")
    plugin = ["mcast.facade", "mcast.testing", "mcast.testing.asyncio_fixtures", "mcast.testing.plugin"]
    assert sorted(name for name in sys.modules if name.startswith(heavy)) == plugin
""")
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_works_beside_the_conformance_plugin(suite: Suite) -> None:
    """It lives beside the plugin of the conformance suite."""
    result = suite(
        "def test_bed(bed): pass\ndef test_fabric(mcast_fabric): pass\n", "-p", "mcast.conformance.plugin"
    )
    result.assert_outcomes(passed=3)


def test_the_fixtures_types_are_there_for_annotations(suite: Suite) -> None:
    suite("""
from mcast.testing.plugin import McastEndpoints, McastFabric

def test_it(mcast_fabric: McastFabric, mcast_endpoints: McastEndpoints) -> None:
    assert isinstance(mcast_fabric, McastFabric)
    assert isinstance(mcast_endpoints, McastEndpoints)

def test_other():
    with pytest.raises(ImportError):
        from mcast.testing.plugin import McastNothing
""").assert_outcomes(passed=2)


# --- several processes ------------------------------------------------------------------------------

PROGRAM = (
    """
LISTENER = """
    + '"""'
    + """
import pathlib, sys, mcast
pathlib.Path("/proc/self/comm").write_bytes(bytes([0xfc]))  # a name that is no text
with mcast.open_endpoint("sim") as endpoint, endpoint.join("239.1.1.1") as group:
    print("joined", flush=True)
    print(bytes(group.recv(60).payload).decode(), flush=True)
    sys.stdin.read()
"""
    + '"""'
    + """
import subprocess, sys

def listener(**more):
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", LISTENER], stdin=pipe, stdout=pipe, text=True, **more)
    assert process.stdout.readline() == "joined\\n"
    return process
"""
)


def test_shared_fabric_kills_processes_left_over(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared fabric is that of subprocesses and each process left is named and killed."""
    monkeypatch.delenv("MCAST_SIM", raising=False)
    result = suite(
        PROGRAM
        + """
LEFT = []

@pytest.fixture
def mcast_elsewhere(monkeypatch):
    monkeypatch.setenv("MCAST_SIM", "/nowhere")

@pytest.mark.mcast(shared=True, ports=3)
def test_heard(mcast_fabric, mcast_environment, mcast_endpoints):
    with listener(env=mcast_environment) as process:
        (endpoint,) = mcast_endpoints(1)
        assert str(endpoint.address) == "10.0.0.1"
        with open_endpoint("sim-roce", "10.0.0.3") as other, other.join(GROUP) as group:
            group.ready(members=1, timeout=60)
            group.send(b"over there")
            assert process.communicate()[0] == "over there\\n"
    LEFT.append(mcast_environment["MCAST_SIM"])

@pytest.mark.mcast(shared=True)
def test_left(mcast_fabric):
    LEFT.append(listener())
    open_endpoint("sim")

def test_gone(mcast_fabric):
    import os
    path, process = LEFT
    assert process.wait(60) == -9
    process.stdin.close(), process.stdout.close()
    assert not os.path.exists(os.path.dirname(path))
    assert "MCAST_SIM" not in os.environ

@pytest.mark.mcast(shared=True)
def test_removed(mcast_environment, mcast_endpoints):
    import os
    mcast_endpoints(1)
    LEFT[:] = [os.environ.pop("MCAST_SIM"), listener(env=mcast_environment)]
    os.unlink(LEFT[0])

def test_gone_too():
    process = LEFT[1]
    assert process.wait(60) == -9
    process.stdin.close(), process.stdout.close()

def test_alone(mcast_environment):
    pass

def test_alone_among_others(mcast_elsewhere, mcast_environment):
    pass

@pytest.mark.mcast(shared=True, clock="virtual")
def test_clock(mcast_fabric):
    pass
"""
    )
    text = output(result)
    result.assert_outcomes(passed=5, errors=5)
    assert re.search(r"process \d+ \(python\), attached as host 0", text)
    assert "backend sim-roce on the shared fabric\n    opened at test_it.py:" in text
    alone = "the fabric is in this process alone: mark the test @pytest.mark.mcast(shared=True)"
    assert result.stdout.lines.count(alone) == 2, "where CI is set, the summary has both, too"
    assert "a fabric for several processes runs in real time: leave out clock" in text
