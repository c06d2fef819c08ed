"""The command: what it prints, what it answers to bad input, and how quickly."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from mcast import backend_names, cli
from mcast.__main__ import _silently
from mcast.cli.status import MEANINGS, ExitStatus
from mcast.cli.terminal import console, say
from rdma_lab import LabError

from ..commands import MCAST, QUOTED, Run, written_to_terminal

BAD_INPUT = {
    "unknown backend": (("demo", "--backend", "nope"), "'nope' is not a backend: choose one of sim"),
    "missing file": (("demo", "missing"), "cannot read missing: No such file"),
    "directory": (("demo", "."), ". is not a regular file"),
    "device": (("demo", "/dev/zero"), "/dev/zero is not a regular file"),
    "unicast group": (("demo", "--group", "10.0.0.1"), "10.0.0.1 is a unicast address"),
    "zero group": (("demo", "--group", "0.0.0.0"), "the zero address"),
    "no address": (("demo", "--group", "hello"), "'hello' is not an address"),
    "port out of range": (("demo", "--group", "239.1.1.1:99999"), "port is 99999"),
    "no receiver": (
        ("demo", "--receivers", "0"),
        "'--receivers': 0: give a whole number from 1 to 1,000",
    ),
    "no number": (("demo", "--receivers", "x"), "'--receivers': x: give a whole number"),
    "negative size": (("demo", "--size", "-1"), "'-1' is not a size"),
    "unknown unit": (("demo", "--size", "4X"), "'4X' is not a size"),
    "too large": (("demo", "--size", "1025M"), "at most 1G"),
    "size of a given file": (("demo", MCAST, "--size", "1"), "--size is for a generated file"),
    "a port of many digits": (
        ("recv", "239.1.1.1", "-o", "f", "--device", f"x/{'9' * 5000}"),
        "is not a device: give DEV",
    ),
    "two files": (("demo", "a", "b"), "unexpected extra argument"),
    "unknown option": (("demo", "--nope"), "No such option: --nope"),
    "unknown command": (("nope",), "No such command 'nope': see `mcast --help`"),
    "mistyped command": (("sned",), "No such command 'sned'. Did you mean 'send'?\n"),
    "no value": (
        ("send", "--wait"),
        "mcast send: Option '--wait' requires an argument: see `mcast send --help`\n",
    ),
    "no file": (("send",), "mcast send: Missing argument 'FILE': see `mcast send --help`\n"),
    "no choice": (("conformance", "--fabric", "x"), "'--fabric': 'x' is not one of 'roce', 'infiniband'"),
    "conformance of an unknown backend": (("conformance", "--backend", "nope"), "'nope' is not a backend"),
    "report that cannot be written": (("conformance", "--report", "no/such/dir"), "cannot write no/such/dir"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_status_2(here: Run, case: str) -> None:
    arguments, says = BAD_INPUT[case]
    done = here(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("mcast")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_an_unreadable_file_is_one_sentence(here: Run, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    done = here("demo", "loop")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "mcast demo: Invalid value: cannot read loop: Too many levels of symbolic links\n"


def test_without_a_command_there_is_help(here: Run) -> None:
    assert here().stdout == here("--help").stdout


def test_info_lists_every_provider(here: Run) -> None:
    done = here("info", "--json")
    found = json.loads(done.stdout)["providers"]
    assert set(found) >= set(backend_names())
    for name in ("sim", "sim-roce", "sim-ib"):
        assert found[name]["available"]
        assert len(found[name]["ports"]) == 4
    for provider in found.values():
        assert provider["available"] or (provider["reason"] and provider["detail"] and provider["fix"])


def test_info_says_why_a_provider_is_missing(here: Run, third_party: Callable[..., dict[str, str]]) -> None:
    env = third_party(source="raise RuntimeError('out of order')")
    found = json.loads(here("info", "--json", env=env).stdout)["providers"]["acme"]
    assert found["reason"] == "installed but broken"
    assert found["detail"] == "RuntimeError: out of order"
    assert "mcast.backends" in found["fix"]
    assert "RuntimeError: out of order" in here("info", env=env).stdout


LEFT_OUT = """
from mcast.api import Status, UnavailableReason, UnusableDevice
from mcast.backends.sim import ROCE
of = UnusableDevice("rxe9", UnavailableReason.NO_PROVIDER, "no provider for it", "apt-get install some", 19)
def opened(**options):
    backend = ROCE.open(**options)
    lack = {"driver": "siw", "no_multicast": "its driver siw has none"}
    first, *others = backend.devices()
    backend.devices = lambda: (first.model_copy(update=lack), *others)
    return backend
PROVIDER = ROCE._replace(
    name="acme", open=opened, status=lambda: Status(True, "it works", unusable=(of,))
)
"""


def test_info_names_devices_left_out(here: Run, third_party: Callable[..., dict[str, str]]) -> None:
    """Beside the ports that can be used, each with its reason and its fix; and drivers without multicast."""
    env = third_party(source=LEFT_OUT)
    found = json.loads(here("info", "--json", env=env).stdout)["providers"]["acme"]
    assert (found["available"], len(found["ports"])) == (True, 4)
    (device,) = found["left_out"]
    assert device == {
        "device": "rxe9",
        "reason": "no libibverbs provider",
        "detail": "no provider for it",
        "fix": "apt-get install some",
    }
    first = found["ports"][0]
    assert (first["driver"], first["no_multicast"]) == ("siw", "its driver siw has none")
    shown = here("info", env=env).stdout
    assert "no multicast: its driver siw has none" in " ".join(shown.split())
    assert re.search(r"\n +left out +rxe9: no provider for it\n +fix +apt-get install some\n", shown)


@pytest.mark.parametrize("arguments", [("info",), ("demo", "--size", "1M"), ("--help",), ("demo", "--help")])
def test_output_fits_80_columns_and_has_no_escapes(here: Run, arguments: tuple[str, ...]) -> None:
    done = here(*arguments)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if " fix  " not in line)


def test_a_narrow_terminal_gets_whole_numbers(here: Run) -> None:
    wide, narrow = (here("sim", "run", "late-join", env={"COLUMNS": columns}) for columns in ("80", "30"))
    (row,) = (line.rstrip() for line in wide.stdout.splitlines() if line.startswith("ib2 "))
    assert len(row) > 30
    assert row in [line.rstrip() for line in narrow.stdout.splitlines()]


def test_terminal_without_a_width_has_the_default(here: Run) -> None:
    """A terminal that knows no width has the usual one."""
    usual, unknown = (here("sim", "run", "late-join", env={"COLUMNS": columns}) for columns in ("80", "0"))
    assert unknown.stdout == usual.stdout != ""


def on_a_terminal(*arguments: str, **env: str) -> str:
    """Return the output of the command on a terminal."""
    env = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "COLUMNS": "80"} | env
    return written_to_terminal([str(MCAST), *arguments], env)


def test_a_terminal_gets_colour_and_a_progress_bar() -> None:
    written = on_a_terminal("demo", "--size", "1M")
    assert "waiting for receivers" in written
    assert "\x1b[32m" in written


def test_no_color_is_respected() -> None:
    assert "\x1b[3" not in on_a_terminal("demo", "--size", "1M", NO_COLOR="1")


@pytest.mark.parametrize("backend", ["sim", "sim-ib"])
@pytest.mark.parametrize("size", [0, 1, 1000, 1001, 300_001])
def test_demo_verifies_each_receiver(here: Run, tmp_path: Path, backend: str, size: int) -> None:
    data = bytes(number * 7 % 251 for number in range(size))
    (tmp_path / "file").write_bytes(data)
    done = here("demo", "file", "--receivers", "5", "--backend", backend, "--json")
    outcome = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert outcome["blake3"] == blake3(data).hexdigest()
    assert outcome["messages"] == -(-size // outcome["message_size"])
    assert len(outcome["receivers"]) == 5
    for receiver in outcome["receivers"]:
        assert receiver["verified"]
        assert receiver["blake3"] == outcome["blake3"]
        assert (receiver["bytes"], receiver["lost"]) == (size, 0)


def test_demo_ends_with_a_line_for_scripts(here: Run) -> None:
    last = here("demo", "--receivers", "2", "--size", "100K").stdout.splitlines()[-1]
    assert last == "demo: 2/2 receivers verified, 104 messages each, 0 lost"
    done = here("demo", "--receivers", "1", "--size", "1")
    assert done.stdout.splitlines()[-1] == "demo: 1/1 receivers verified, 1 message each, 0 lost"


def test_the_made_up_file_is_always_the_same(here: Run) -> None:
    first, second = (json.loads(here("demo", "--size", "2M", "--json").stdout) for _ in range(2))
    assert first["blake3"] == second["blake3"]
    assert first["size"] == 2 << 20


@pytest.mark.parametrize(
    "words", ["--version", "mgid 239.1.1.1", "lab check", "info", "demo --size 1K", "sim run late-join"]
)
def test_a_reader_that_is_gone_sees_no_traceback(words: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([MCAST, *words.split()], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_sentence(run: Run, unbuffered: str) -> None:
    done = run("sh", "-c", f"PYTHONUNBUFFERED={unbuffered} {QUOTED} info --json > /dev/full")
    assert (done.returncode, done.stderr) == (1, "mcast: cannot write to stdout: No space left on device\n")


@pytest.mark.parametrize("command", ["info", "--help", "mgid 239.1.1.1", "demo --size 1K", "lab check"])
def test_a_closed_stdout_is_one_sentence(run: Run, command: str) -> None:
    done = run("sh", "-c", f"{QUOTED} {command} >&-")
    assert (done.returncode, done.stderr) == (1, "mcast: cannot write to stdout: Bad file descriptor\n")


def test_an_error_is_not_printed_among_the_results(run: Run) -> None:
    done = run("sh", "-c", f"{QUOTED} nope 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


SUMMARY = """
name = "evil\\u001b[2J"
summary = "a \\u009b2J line\\nand another"
seconds = 1
[[members]]
group = "239.1.1.1"
ports = [0]
"""


def test_no_name_moves_the_cursor(here: Run, tmp_path: Path) -> None:
    (tmp_path / "\x1b[2J").write_bytes(b"x")
    (tmp_path / "run.toml").write_text(SUMMARY)
    shown = here("demo", "\x1b[2J").stdout, here("demo", "\x1b]0;x\a").stderr
    assert shown[0].startswith("\\x1b[2J: 1 bytes")
    assert "cannot read \\x1b]0;x\\x07: No such file" in shown[1]
    assert here("sim", "run", "run.toml").stdout.startswith("evil\\x1b[2J: a \\x9b2J line\nand another\n")


@pytest.mark.parametrize("option", ["--html", "--pcap", "--trace"])
def test_failed_run_keeps_the_older_file(
    here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """A run that fails leaves no file and an older one whole."""
    assert here("sim", "run", "no-such", option, "made").returncode == 2
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "made").write_text("older")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        done = here("sim", "run", "late-join", option, "made")
    assert (done.returncode, done.stderr) == (1, "mcast: cannot write made: No space left on device\n")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("made", "older")]
    assert here("sim", "run", "late-join", option, "made").returncode == 0
    assert (tmp_path / "made").stat().st_size > 1000


INTERRUPTED_AT = """
import atexit, os, signal, sys

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

class AtImport:
    def find_spec(self, name, *_):
        if name == {moment!r}:
            interrupt()

sys.meta_path.insert(0, AtImport())
if {moment!r} == "the end":
    atexit.register(interrupt)
sys.argv = ["mcast", "mgid", "239.1.1.1"]
from mcast.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("moment", "status"),
    [("mcast.cli", -2), ("mcast.cli.mgid", 130), ("mcast.wire.mapping", 130), ("the end", -2)],
)
def test_an_interrupt_at_any_moment_is_no_traceback(run: Run, moment: str, status: int) -> None:
    done = run(MCAST.with_name("python"), "-c", INTERRUPTED_AT.format(moment=moment))
    assert (done.returncode, done.stderr) == (status, "")
    assert "from mcast.__main__ import main" in MCAST.read_text()


def test_uncaught_interrupt_is_silent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An interrupt that nobody took is silent and another error is not."""
    for error in KeyboardInterrupt(), ValueError("a defect"):
        _silently(type(error), error, None)
    assert capsys.readouterr().err == "ValueError: a defect\n"


def test_background_job_ignores_interrupts(run: Run) -> None:
    """A background job that ignores interrupts goes on doing so."""
    script = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    script += INTERRUPTED_AT.format(moment="mcast.cli.mgid")
    done = run(MCAST.with_name("python"), "-c", script)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_has_no_control_sequences(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing on a console moves the cursor but its own colours."""
    from rich.table import Table
    from rich.text import Text

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    table = Table(box=None)
    table.add_row("\x1b[2J", Text("\x9b2J"), style="red")
    console().print(table, Text("\x1b]0;x\a", "red"))
    say("\x1b[2J", "\u202e")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert [one for one in shown if not (one.isprintable() or one == "\n")] == []
    assert shown.count(r"\x1b") == 3
    assert shown.endswith("\\x1b[2J\n\\u202e\n")


def test_every_command_escapes_names() -> None:
    """Every command prints by what makes names plain."""
    older = {"demo.py", "recv.py", "send.py"}  # whose words are of their own, but for a console's
    for path in sorted(Path(cli.__file__).parent.glob("*.py")):
        calls = {
            ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if type(node) is ast.Call
        }
        if path.name not in {"terminal.py", *older}:
            assert not calls & {"print", "typer.echo", "sys.stdout.write"}, path.name


def test_the_lab_ends_with_statuses_of_the_table() -> None:
    found: list[type[LabError]] = [LabError, *LabError.__subclasses__()]
    statuses = {ExitStatus.USAGE, ExitStatus.TIMEOUT, ExitStatus.LAB, ExitStatus.NOT_FOUND}
    assert {one.exit_code for one in found} == statuses
    assert set(MEANINGS) == set(ExitStatus)


LOSSY = """
from mcast.backends.sim import Fabric, ROCE, open_fabric
from mcast.backends.sim.faults import Drop, Messages

def open_lossy():
    fabric = Fabric.roce(4)
    fabric.rules.when(Messages(target="roce2", nth={nth}), Drop())
    return open_fabric(fabric)

PROVIDER = ROCE._replace(open=open_lossy)
"""


def test_demo_says_what_was_lost_and_sent_again(
    here: Run, third_party: Callable[..., dict[str, str]]
) -> None:
    env = third_party(source=LOSSY.format(nth=[15, 16]))
    done = here("demo", "--backend", "acme", "--size", "100K", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "demo: 3/3 receivers verified, 104 messages each, 2 lost"
    assert done.stdout.splitlines()[2] == "2 messages repaired losses"


def test_demo_names_a_receiver_that_hears_nothing(
    here: Run, third_party: Callable[..., dict[str, str]]
) -> None:
    env = third_party(source=LOSSY.format(nth=None))
    done = here("demo", "--backend", "acme", "--size", "100K", env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("mcast: roce2 (10.0.0.3) joined 239.1.1.1, but exchanged no message")
    assert done.stderr.count("\n") == 1


def test_demo_refuses_more_receivers_than_ports(
    here: Run, third_party: Callable[..., dict[str, str]]
) -> None:
    """Demo refuses more receivers than the ports take."""
    done = here(
        "demo", "--backend", "acme", "--receivers", 200, env=third_party(source=LOSSY.format(nth=[1]))
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "mcast: 200 receivers are too many for the ports here: at most 192\n"
