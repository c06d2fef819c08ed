"""The help: every command on a line of its own, none cut short, all of it at 80 columns."""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import IPv4Address

import pytest

from mcast.api import CmId, CqModeration, QpInit, QueuePair
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.trace.events import Send
from mcast.bench.end import BenchEnd
from mcast.cli import SUMMARIES, load
from mcast.cli.options import endpoint_at, settings_of
from mcast.endpoint.policy import LoopbackPolicy
from mcast.endpoint.ports import active

from ..commands import MCAST, Run

ALL = """
import sys
from mcast.cli import SUMMARIES, app, load

def show(*path):
    try:
        app([*path, "--help"], prog_name="mcast", standalone_mode=False)
    except SystemExit:
        pass

for name in SUMMARIES:
    show(name)
    for inner in getattr(load(name), "commands", {}):
        show(name, inner)

assert "pydantic" not in sys.modules
"""


def test_commands_are_in_order_and_not_cut(mcast: Run) -> None:
    """The commands are in order of use and none is cut short."""
    text = mcast("--help").stdout
    _, _, commands = text.partition("Commands:\n")
    lines = commands.splitlines()
    assert [line.split()[0] for line in lines] == list(SUMMARIES)
    for line in lines:
        assert re.fullmatch(r"  [a-z]+ +\S.*[^.]\.", line), line


@pytest.mark.parametrize("name", SUMMARIES)
def test_summaries_equal_the_help(name: str) -> None:
    """The summary of a command is what its own help begins with."""
    assert " ".join((load(name).help or "").split()).startswith(SUMMARIES[name])


@pytest.mark.parametrize(
    "name", ["demo", "send", "recv", "ping", "listen", "top", "record", "replay", "bench"]
)
def test_endpoint_commands_take_card_options(name: str) -> None:
    """Each command that opens an endpoint takes what cards offer."""
    offered = {option for one in load(name).params for option in one.opts}
    wanted = {"--busy-poll", "--traffic-class", "--dscp", "--service-level", "--comp-vector", "--moderation"}
    assert wanted <= offered
    assert ("--timestamps" in offered) is (name == "record"), "it shows the times"
    assert ("--receive-depth" in offered) is (name not in ("ping", "replay")), "which receive little"


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_endpoint_follows_the_options(make: Callable[..., Fabric]) -> None:
    """An endpoint of a command sends as its options say."""
    fabric = make(ports=2, trace=True)
    settings = settings_of(busy_poll=0.5, dscp=26, service_level=3, comp_vector=2, moderation="32/50")
    with (
        open_fabric(fabric) as backend,
        endpoint_at(backend, IPv4Address("10.0.0.1"), None, settings) as endpoint,
    ):
        endpoint.sender("239.1.1.1").send(b"x")
        kept = endpoint._core.resources.settings
    assert (kept.busy_poll, kept.receive_depth, kept.loopback) == (0.5, 512, LoopbackPolicy.OFF)
    assert (kept.comp_vector, kept.moderation) == (2, CqModeration(count=32, period=50))
    sent = [event for _, event in fabric.trace or () if type(event) is Send]
    assert [(event.traffic_class, event.sl) for event in sent] == [(104, 3)]


@pytest.mark.parametrize("command", ["record 239.1.1.1 -o a --demo", "demo", "bench"])
@pytest.mark.parametrize(
    ("option", "why"),
    [
        (("--service-level", "9"), "--service-level is 9: allowed are 0..7 (Ethernet has eight priorities)"),
        (("--comp-vector", "4"), "--comp-vector is 4: allowed are 0..3 (num_comp_vectors of roce0)"),
        (("--moderation", "32"), "--moderation is '32': write MESSAGES/MICROSECONDS, both whole, such as"),
        (("--moderation", "32/1.5us"), "--moderation is '32/1.5us': write MESSAGES/MICROSECONDS, both whole"),
        (("--moderation", "32/2x"), "--moderation 32/2x: '2x' is not a time: give microseconds"),
        (("--moderation", "32/1h"), "--moderation 32/1h: period is 3600000000: give 1..65535 microseconds"),
        (("--moderation", "0/50"), "--moderation 0/50: count is 0: give 1..65535 messages"),
        (("--moderation", "1/65536"), "--moderation 1/65536: period is 65536: give 1..65535 microseconds"),
    ],
)
def test_unsupported_option_is_a_usage_error(
    here: Run, command: str, option: tuple[str, str], why: str
) -> None:
    """An option that the port or the card lacks is one sentence and status 2."""
    done = here(*command.split(), "--backend", "sim", *option)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert why in done.stderr


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_measurement_queue_pair_follows_options(make: Callable[..., Fabric]) -> None:
    """A queue pair of a measurement is made as the options say."""
    asked: list[QpInit] = []

    def seen(cm_id: CmId, init: QpInit) -> QueuePair:
        asked.append(init)
        return make_qp(cm_id, init)

    settings = settings_of(busy_poll=0.5, comp_vector=2, moderation="32/0.05ms")
    with open_fabric(make(ports=1)) as backend, backend.event_channel() as channel:
        make_qp = CmId.create_qp
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(CmId, "create_qp", seen)
            BenchEnd(channel, active(backend)[0], QpInit(max_recv_wr=7), settings)
    (init,) = asked
    assert (init.max_recv_wr, init.busy_poll, init.comp_vector) == (7, 0.5, 2)
    assert init.moderation == CqModeration(count=32, period=50)


WORK = ("pydantic", "rich", "mcast.")
"""Modules that a command needs when it runs, and not for its help."""
LIGHT = {"mcast.cli", "mcast.cli.status", "mcast.cli.terminal", "mcast.__main__", "mcast.facade"}
"""Modules that the help of all commands, and the version, may load of the package."""
SIM = {"mcast.cli.sim", "mcast.cli.sim_cast", "mcast.cli.sim_control"}
OWN = {
    "--help": set[str](),
    "--version": {"mcast.errors", "mcast.errors.install"},
    "sim --help": {*SIM, "mcast.cli.signals", "mcast.cli.values"},
}
"""The words of a command line -> what it may load besides."""


@pytest.mark.parametrize("words", OWN)
def test_help_and_version_load_nothing_that_works(run: Run, words: str) -> None:
    shown = f"import sys; sys.argv = ['mcast', *{words.split()!r}]\ntry: from mcast.cli import main; main()\n"
    shown += "except SystemExit: print(*sys.modules, sep='\\n', file=sys.stderr)"
    done = run(MCAST.with_name("python"), "-c", shown)
    assert done.stdout.startswith(("Usage: mcast", "mcast "))
    loaded = {name for name in done.stderr.splitlines() if name.startswith(WORK)}
    assert "mcast.cli" in loaded
    assert loaded - LIGHT - OWN[words] == set()


NOT_TO_START = {"rich", "asyncio", "typer.rich_utils"}
"""Modules that take long to import, and that no command for objects needs before its first message."""


@pytest.mark.parametrize(
    "words", [["send", "/etc/passwd", "239.7.7.7", "-n", "1"], ["recv", "239.7.7.7", "-o", "/dev/null"]]
)
def test_send_and_recv_start_light(run: Run, words: list[str]) -> None:
    """The wait for the other end is over at once, and ends the command."""
    line = ["mcast", *words, "--backend", "udp", "-b", "127.0.0.1", "--wait", "0.1"]
    shown = f"import sys; sys.argv = {line!r}\ntry: from mcast.cli import main; main()\n"
    shown += "except SystemExit: print(*sys.modules, sep='\\n')"
    done = run(MCAST.with_name("python"), "-c", shown)
    loaded = set(done.stdout.splitlines())
    assert "within 0.1 s" in done.stderr
    assert loaded & {"mcast.cast.io.session", "mcast.cast.io.reception"}
    assert loaded & NOT_TO_START == set()


def test_ctrl_c_works_before_large_imports(run: Run) -> None:
    """Ctrl-C is minded before anything large is loaded."""
    loaded = "import sys; before = set(sys.modules); import mcast.__main__; print(*set(sys.modules) - before)"
    names = set(run(MCAST.with_name("python"), "-c", loaded).stdout.split())
    assert names >= {"mcast", "mcast.__main__"}  # a process that coverage has entered has the others already
    assert not names & {"typing", "re", "contextlib"}


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("send", "Maximum bits per second, such as 2G; repairs and headers of mcast count, those of RoCE"),
        ("listen", "Pings of `mcast ping` are answered and not shown"),
    ],
)
def test_help_has_the_fact(mcast: Run, name: str, fact: str) -> None:
    assert fact in " ".join(mcast(name, "--help").stdout.split())


def test_all_help_fits_80_columns(run: Run) -> None:
    done = run(MCAST.with_name("python"), "-c", ALL, env={"COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("Usage: mcast ") >= len(SUMMARIES) + 4
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout
    assert re.findall(r"  .*\w\.\.\.\n", done.stdout) == [], "cut short"
    assert re.findall(r".*[{}].*|.*(?:<|\[)(?:list|str|int|path|Mcast).*", done.stdout) == [], (
        "Python's types"
    )
    assert {"mcast send [OPTIONS] FILE... GROUP", "mcast lab run [OPTIONS] -- COMMAND..."} <= set(
        re.findall("Usage: (.*)", done.stdout)
    )
