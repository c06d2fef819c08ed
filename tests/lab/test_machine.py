"""Ends of a run, with a shell script in QEMU's place; no guest is booted."""

import contextlib
import io
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rdma_lab import LabMachine, control, kernels, machine, snapshots
from rdma_lab.errors import (
    CommandNotFoundError,
    GuestPanicError,
    GuestStoppedError,
    LabError,
    LabTimeoutError,
    LabUnavailableError,
)

Pretend = Callable[[str], None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Run a script instead of QEMU: $ctl, $out and $err are the guest's ports, stderr is its console.

    $MARK, behind a 0 byte, ends an output; so does the end of the script.
    """

    def use(script: str) -> None:
        def plan(_: object, job: Path, *, ports: Mapping[str, int], **__: object) -> list[str]:
            names = (f"{name.removeprefix('lab.')}=/proc/self/fd/{fd}" for name, fd in ports.items())
            return [
                "/bin/sh",
                "-c",
                "; ".join([*names, f". {job}/settings", script]),
            ]  # and $0 is -incoming if it is resumed

        monkeypatch.setattr(machine, "plan", plan)

    return use


class Answering(io.BytesIO):
    """Makes the file `answer` when `word` has been written."""

    def __init__(self, word: bytes, answer: Path) -> None:
        super().__init__()
        self._word, self._answer = word, answer

    def write(self, data: Any) -> int:
        if self._word in bytes(data):
            self._answer.touch()
        return super().write(data)


def lab(**limits: float) -> LabMachine:
    return LabMachine(accel="tcg", boot_timeout=limits.get("boot_timeout", 20), anew=True)


def test_output_and_exit_code_come_through(pretend: Pretend) -> None:
    pretend("echo ready >$ctl; echo hello >$out; echo oops >$err; echo exit 7 >$ctl")
    out, err = io.BytesIO(), io.BytesIO()
    result = lab().run(["true"], stdout=out, stderr=err)
    assert (result.exit_code, out.getvalue(), err.getvalue()) == (7, b"hello\n", b"oops\n")
    assert 0 < result.ready_after <= result.seconds


@pytest.mark.parametrize("pause", ["", "sleep 0.2;"])
def test_guest_stops_after_its_outputs_end(pretend: Pretend, pause: str) -> None:
    """A guest is stopped when its outputs have ended.

    What it would lose if it stopped itself is read; what a child of the command adds is not.
    """
    half = "$(echo $MARK | cut -c1-9)"
    pretend(
        f"echo ready >$ctl; printf 'a\\0%s' {half} >$out; {pause} printf 'b\\0' >$out; {pause}"
        "printf '%s more' $MARK >$out; echo exit 7 >$ctl; printf '\\0%s' $MARK >$err; exec sleep 600"
    )
    out, err = io.BytesIO(), io.BytesIO()
    result = lab().run(["true"], stdout=out, stderr=err)
    assert re.fullmatch(rb"a\0[0-9a-f]{9}b", out.getvalue())
    assert (result.exit_code, err.getvalue()) == (7, b"")


def test_a_last_byte_like_a_mark_is_output(pretend: Pretend) -> None:
    pretend("echo ready >$ctl; printf 'a\\0' >$out; echo exit 0 >$ctl")
    out = io.BytesIO()
    lab().run(["true"], stdout=out)
    assert out.getvalue() == b"a\0"


def test_a_control_line_may_come_in_pieces(pretend: Pretend) -> None:
    pretend("printf rea >$ctl; sleep 0.1; printf 'dy\\nexi' >$ctl; sleep 0.1; echo t 7 >$ctl")
    assert lab().run(["true"]).exit_code == 7


def test_output_is_handed_on_when_it_comes(pretend: Pretend, tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    pretend(
        f"echo ready >$ctl; echo one >$out; until [ -e {heard} ]; do sleep 0.1; done; "
        "echo two >$out; echo exit 0 >$ctl"
    )
    assert lab().run(["true"], stdout=Answering(b"one", heard)).exit_code == 0


def test_panic_has_reason_and_console(pretend: Pretend) -> None:
    """A panic is told with its reason and the console."""
    console = "[ 1.0] Kernel panic - not syncing: Fatal exception\n[ 1.1] bye"
    pretend(f"echo ready >$ctl; echo '{console}' >&2")
    with pytest.raises(GuestPanicError, match="the guest's kernel panicked: Fatal exception") as raised:
        lab().run(["true"])
    assert raised.value.console[-1] == "[ 1.1] bye"
    assert str(raised.value).endswith("  [ 1.1] bye")


def test_a_panic_is_told_from_where_the_kernel_fell(pretend: Pretend) -> None:
    trace = [f"[ 1.0] RIP and callers, line {number}" for number in range(40)]
    fell = ["[ 1.0] BUG: unable to handle page fault", *trace, "[ 1.1] Kernel panic - not syncing: x"]
    console = "\n".join(["[ 0.9] before", *fell])
    pretend(f"echo ready >$ctl; echo '{console}' >&2")
    with pytest.raises(GuestPanicError) as raised:
        lab().run(["true"])
    assert raised.value.console == tuple(fell)


def test_panic_on_a_warning_begins_with_it(pretend: Pretend) -> None:
    """The console is shown from the warning that ended the kernel, not from an earlier one."""
    trace = [f"[ 2.0] caller {number}" for number in range(20)]
    own = ["[ 2.0] ------------[ cut here ]------------", "[ 2.0] bad: softib1"]
    last = [
        *own,
        "[ 2.0] WARNING: CPU: 0 at b.c:1",
        *trace,
        "[ 2.1] Kernel panic - not syncing: panic_on_warn set",
    ]
    console = "\n".join(["[ 1.0] WARNING: CPU: 0 at a.c:1", "[ 1.1] between", *last])
    pretend(f"echo ready >$ctl; echo '{console}' >&2")
    with pytest.raises(GuestPanicError) as raised:
        lab().run(["true"])
    assert raised.value.console == tuple(last)


SYSRQ = ["Kernel panic - not syncing: sysrq triggered crash", *(f"caller {n}" for n in range(30))]
HUNG_TASK = [
    "INFO: task insmod:90 blocked for more than 15 seconds.",
    *(f"caller {n}" for n in range(20)),
    "Kernel panic - not syncing: hung_task: blocked tasks",
    *(f"caller of khungtaskd {n}" for n in range(20)),
]


@pytest.mark.parametrize("report", [SYSRQ, HUNG_TASK])
def test_panic_shows_the_trace_that_led_to_it(pretend: Pretend, report: list[str]) -> None:
    console = "\n".join([*(f"before {n}" for n in range(200)), *report])
    pretend(f"echo ready >$ctl; echo '{console}' >&2")
    with pytest.raises(GuestPanicError) as raised:
        lab().run(["true"])
    assert raised.value.console == tuple(report)


@pytest.mark.parametrize(
    "first",
    [
        "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
        "watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [insmod:90]",
        "INFO: task insmod:90 blocked for more than 120 seconds.",
    ],
)
def test_time_limit_shows_the_trace_and_the_end(pretend: Pretend, tmp_path: Path, first: str) -> None:
    trace = [first, *(f"caller {n}" for n in range(59))]
    after = [f"after {n}" for n in range(40)]
    printed, begun = "\n".join(["before", *trace, *after]), tmp_path / "begun"
    pretend(f"echo '{printed}' >&2; touch {begun}; exec sleep 600")
    shown = ended_boot(lambda _: begun.exists()).console
    assert shown == (*trace, "...", *after[-machine.CONSOLE_LINES :])


PRINTED = "[ 1.0] one\r\n[ 1.1] two\r\n"


@pytest.mark.parametrize(
    ("ending", "raises"),
    [
        ("echo exit 0 >$ctl", None),
        ("echo 'Kernel panic - not syncing: x' >&2", GuestPanicError),
        ("exec sleep 600", LabTimeoutError),
        ("echo stop >$out; exec sleep 600", KeyboardInterrupt),
    ],
)
def test_console_file_has_all_that_was_printed(
    pretend: Pretend, tmp_path: Path, ending: str, raises: type[BaseException] | None
) -> None:
    class Interrupting(io.BytesIO):
        def write(self, _: Any) -> int:
            raise KeyboardInterrupt

    many = machine.CONSOLE_BYTES
    pretend(f"printf '{PRINTED}' >&2; yes | head -c {many} >&2; echo ready >$ctl; {ending}")
    file = tmp_path / "console.txt"
    with pytest.raises(raises) if raises else contextlib.nullcontext():
        lab().run(["true"], console=file, output_timeout=2, stdout=Interrupting())
    text = file.read_text()
    assert text.startswith("[ 1.0] one\n[ 1.1] two\ny\n")
    assert len(text) >= many
    assert ("Kernel panic" in text) is (raises is GuestPanicError)


def test_what_a_stopped_guest_printed_last_is_kept(pretend: Pretend, tmp_path: Path) -> None:
    """It is still in the pipe when the command's outputs have ended."""
    pretend(
        "trap 'echo last words >&2; exit' TERM; echo ready >$ctl; echo exit 0 >$ctl; "
        "printf '\\0%s' $MARK >$out; printf '\\0%s' $MARK >$err; while :; do sleep 0.1; done"
    )
    lab().run(["true"], console=tmp_path / "console.txt")
    assert (tmp_path / "console.txt").read_text() == "last words\n"


def test_console_file_that_cannot_be_written_is_one_sentence(pretend: Pretend, tmp_path: Path) -> None:
    pretend("echo some >&2; echo ready >$ctl; exec sleep 600")
    for path, why in (
        (tmp_path / "none" / "console.txt", "No such file or directory"),
        (Path("/dev/full"), "No space left on device"),
    ):
        with pytest.raises(LabError, match=f"^{path} cannot be written: {why}$"):
            lab().run(["true"], console=path, output_timeout=20)


def test_a_guest_that_cannot_be_set_up_says_why(pretend: Pretend) -> None:
    pretend("echo fail the bridge cannot be made >$ctl")
    with pytest.raises(GuestStoppedError, match="could not be set up: the bridge cannot be made"):
        lab().run(["true"])


def test_a_qemu_that_refuses_says_why(pretend: Pretend) -> None:
    pretend("echo 'qemu: no such machine' >&2; exit 1")
    with pytest.raises(GuestStoppedError, match=r"before the command did \(QEMU: exit status 1\)") as raised:
        lab().run(["true"])
    assert raised.value.console == ("qemu: no such machine",)


def test_a_qemu_that_is_killed_says_so(pretend: Pretend) -> None:
    pretend("echo ready >$ctl; kill -KILL $$")
    with pytest.raises(GuestStoppedError, match="QEMU: signal SIGKILL"):
        lab().run(["true"])


def test_a_slow_reader_loses_nothing(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pager, say, that shows a page: the command has ended, and its last output is still on the way."""
    monkeypatch.setattr(machine, "STOP_SECONDS", 0.2)

    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            time.sleep(0.3)
            return super().write(data)

    pretend("echo ready >$ctl; echo exit 0 >$ctl; head -c 400000 /dev/zero >$out")
    out = Slow()
    assert lab().run(["true"], stdout=out).exit_code == 0
    assert len(out.getvalue()) == 400_000


def test_guest_ends_with_its_caller(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest goes with its caller whatever the path.

    setpriv, which sees to that, is a tool of the system.
    """
    monkeypatch.setenv("PATH", "/nonexistent")
    pretend("echo ready >$ctl; echo exit 0 >$ctl; exec /usr/bin/setpriv --dump >$out")
    out = io.BytesIO()
    lab().run(["/bin/true"], stdout=out)
    assert b"Parent death signal: KILL" in out.getvalue()


def ended_boot(has_begun: Callable[[LabTimeoutError], object]) -> LabTimeoutError:
    """Return the error of a boot that hangs; a busy machine gets more time to start its shell."""
    for seconds in (0.5, 10, 200):
        with pytest.raises(LabTimeoutError, match=f"not ready in {seconds:g} s") as raised:
            lab(boot_timeout=seconds).run(["true"])
        if has_begun(raised.value):
            break
    return raised.value


def test_a_boot_that_hangs_is_ended(pretend: Pretend) -> None:
    pretend("echo 'waiting for root' >&2; exec sleep 600")
    assert ended_boot(lambda error: error.console).console == ("waiting for root",)


def test_overall_limit_ends_a_hanging_command(pretend: Pretend) -> None:
    """A command that hangs is ended by the overall limit only."""
    pretend("echo ready >$ctl; while :; do echo more >$out; done")
    whole, said = 1.0, "not ready"
    while "not ready" in said:  # a slow machine starts a shell later
        with pytest.raises(LabTimeoutError) as raised:
            lab(boot_timeout=whole / 2).run(["true"], timeout=whole, stdout=io.BytesIO())
        said, whole = raised.value.message, whole * 4
    assert said.endswith(f"not done in {whole / 4:g} s")


def test_a_command_that_says_nothing_any_more_is_ended(pretend: Pretend) -> None:
    pretend("echo ready >$ctl; for i in $(seq 20); do echo more >$out; sleep 0.2; done; exec sleep 600")
    out = io.BytesIO()
    with pytest.raises(LabTimeoutError, match="the command wrote nothing for 3 s"):
        lab().run(["true"], output_timeout=3, stdout=out)
    assert out.getvalue() == b"more\n" * 20, "as long as it says something, it may go on"


def test_a_qemu_that_ignores_sigterm_is_killed(pretend: Pretend, tmp_path: Path) -> None:
    said = tmp_path / "pid"
    pretend(f"trap '' TERM; echo $$ >{said}; while :; do sleep 0.1; done")
    ended_boot(lambda _: said.exists() and said.read_text())
    pid = int(said.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.fixture
def kept_guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a guest, of whatever kind, that was kept."""
    path = tmp_path / "kept"
    path.write_bytes(b"a guest")

    def find(_: snapshots.GuestKind) -> snapshots.GuestSnapshot | None:
        return snapshots.GuestSnapshot(path, path.open("rb"), 7) if path.exists() else None

    monkeypatch.setattr(snapshots.GuestKind, "find", find)
    return path


def resuming(boot_timeout: float = 20) -> LabMachine:
    return LabMachine(accel="tcg", boot_timeout=boot_timeout)


def test_a_guest_that_was_kept_is_resumed(pretend: Pretend, kept_guest: Path) -> None:
    started = """sh -c "${1#exec:}" >$out"""
    pretend(f'[ "$0" = -incoming ] && {started}; echo ready >$ctl; echo exit 7 >$ctl')
    out = io.BytesIO()
    result = resuming().run(["true"], stdout=out)
    assert (result.exit_code, result.resumed, out.getvalue()) == (7, True, b"a guest")


@pytest.mark.parametrize("ended", ["echo 'qemu: Unknown section' >&2; exit 1", "kill -KILL $$"])
def test_a_guest_that_cannot_be_resumed_is_booted(
    ended: str, pretend: Pretend, kept_guest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(f'[ "$0" = -incoming ] && {{ {ended}; }}; echo ready >$ctl; echo exit 7 >$ctl')
    result = resuming().run(["true"])
    assert (result.exit_code, result.resumed) == (7, False)
    assert not kept_guest.exists()
    (message,) = caplog.messages
    assert f"the snapshot {kept_guest} could not be resumed: the guest ended before" in message
    assert "\n" not in message


def test_hanging_snapshot_is_not_resumed_again(
    pretend: Pretend,
    kept_guest: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resumed guest that hangs is ended and not resumed again.

    If the limit was long enough for it to be ready; with a short one, it is resumed next time.
    """
    pretend("exec sleep 600")
    for hung in (200.0, 0.1):
        monkeypatch.setattr(machine, "HUNG_SECONDS", hung)
        assert kept_guest.exists()
        assert caplog.messages == []
        with pytest.raises(LabTimeoutError, match=r"not ready in 0\.5 s"):
            resuming(boot_timeout=0.5).run(["true"])
    assert not kept_guest.exists()
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("script", ["echo fail no share >$ctl", "echo ready >$ctl; exit 1"])
def test_later_failure_keeps_the_snapshot(script: str, pretend: Pretend, kept_guest: Path) -> None:
    """A later failure is not the snapshot's fault."""
    pretend(script)
    with pytest.raises(GuestStoppedError):
        resuming().run(["true"])
    assert kept_guest.exists()


def test_anew_means_booted(pretend: Pretend, kept_guest: Path) -> None:
    pretend('[ "$0" = -incoming ] && exit 1; echo ready >$ctl; echo exit 7 >$ctl')
    assert lab().run(["true"]).resumed is False
    assert kept_guest.exists(), "nor was it tried"


def test_unknown_command_fails_before_a_boot(tmp_path: Path) -> None:
    """An unknown command is found out before anything is booted."""
    for name in ("no-such-command", "./no-such-file", str(tmp_path)):
        with pytest.raises(CommandNotFoundError, match="no such command"):
            lab().run([name])
    with pytest.raises(CommandNotFoundError, match="put it after --"):
        lab().run([])


def test_relative_command_is_found_in_cwd(pretend: Pretend, tmp_path: Path) -> None:
    """A relative command is looked for in the working directory."""
    (tmp_path / "here").write_text("#!/bin/sh\n")
    (tmp_path / "here").chmod(0o755)
    pretend("echo ready >$ctl; echo exit 0 >$ctl")
    assert lab().run(["./here"], cwd=tmp_path).exit_code == 0


@pytest.mark.parametrize("ports", [0, 65])
def test_the_number_of_ports_is_bounded(ports: int) -> None:
    with pytest.raises(LabUnavailableError, match=f"{ports} ports asked for: the lab makes 1 to 64"):
        LabMachine(ports=ports)


def test_what_cannot_be_shared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "root").symlink_to("/")
    for path, why in (
        (tmp_path / "none", "it is not a directory; make it first"),
        (tmp_path / "loop", "it is not a directory; make it first"),
        (Path(__file__), "it is not a directory; make it first"),
        (tmp_path / "root", "the guest has a / of its own; share another directory"),
        (Path("/run"), "the guest has a /run of its own; share another directory"),
        (Path("/proc/self"), "of its own; share another directory"),
    ):
        with pytest.raises(LabUnavailableError) as refused:
            LabMachine(share=[path])
        assert str(refused.value).startswith(f"'{path}' cannot be shared: ")
        assert str(refused.value).endswith(why)
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)  # root may write everywhere
    with pytest.raises(LabUnavailableError, match="you may not write to it; share one that you may write to"):
        LabMachine(share=[tmp_path])


def test_a_directory_that_the_guest_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LabUnavailableError, match=r"^/dev/fd is not in the guest, which has a /proc of"):
        lab().run(["true"], cwd=Path("/dev/fd"))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(LabUnavailableError, match="this directory was removed: change to another one"):
        lab().run(["true"])


def test_a_full_temporary_directory_is_one_sentence(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such an error is not of stdout, and the folder of the run is gone."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        LabUnavailableError, match="temporary files: No space left on device: free some, or set TMP"
    ):
        lab().run(["true"])
    assert list(tmp_path.iterdir()) == []


def test_a_command_of_many_lines_has_one_in_the_list(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Server(contextlib.nullcontext[None]):
        def __init__(self, about: control.About, *_: object) -> None:
            super().__init__()
            seen.append(about.command)

    monkeypatch.setattr(machine, "ControlServer", Server)
    pretend("echo ready >$ctl; echo exit 0 >$ctl")
    lab().run(["sh", "-c", "\n  server &\n  client"])
    assert seen == ["sh -c ' server & client'"]


def test_the_environment_is_a_chosen_part() -> None:
    environ = {
        "PATH": "/bin",
        "PYTHONPATH": "/x",
        "MCAST_SEED": "1",
        "LC_ALL": "C",
        "SSH_AUTH_SOCK": "/s",
        "HOSTNAME": "h",
    }
    assert machine.inherited(environ) == {
        "PATH": "/bin",
        "PYTHONPATH": "/x",
        "MCAST_SEED": "1",
        "LC_ALL": "C",
    }


def test_script_executes_any_command(tmp_path: Path) -> None:
    """The script becomes the command whatever its words."""
    words = ["printf", r"<%s>\n", "a b", "$HOME", "it's", "*", ""]
    cwd = tmp_path / "a 'dir'"
    cwd.mkdir()
    script = machine._command_script(
        [*words], cwd, {"MCAST_X": "two\nlines $PATH", "PATH": os.environ["PATH"], "a-b": "no", "LC_É": "no"}
    )
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "<a b>\n<$HOME>\n<it's>\n<*>\n<>\n"
    script = machine._command_script(
        ["sh", "-c", 'echo "$MCAST_X|$RDMA_LAB"; pwd'], cwd, {"MCAST_X": "two\nlines $PATH"}
    )
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"two\nlines $PATH|1\n{cwd}\n"


def test_names_that_are_no_text_reach_the_guest(tmp_path: Path) -> None:
    cwd = tmp_path / os.fsdecode(b"caf\xe9")
    cwd.mkdir()
    script = machine._command_script(["echo", os.fsdecode(b"\xff")], cwd, {})
    kernel = kernels.Kernel("6.1", tmp_path, tmp_path)
    machine._write_job(tmp_path, kernel, [cwd], script, "mark", tty=False)
    assert (tmp_path / "shares").read_bytes() == os.fsencode(cwd) + b"\n"
    done = subprocess.run(["sh", tmp_path / "command"], capture_output=True, check=True)
    assert done.stdout == b"\xff\n"


def test_a_share_whose_name_has_two_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "two\nlines").mkdir()
    with pytest.raises(LabUnavailableError, match="its name contains a line break"):
        LabMachine(share=[tmp_path / "two\nlines"])
