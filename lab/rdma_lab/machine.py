"""Boots the guest, runs one command in it, and limits every step in time."""

import logging
import os
import re
import secrets
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, get_args

from rdma_lab import driver, host, kernels, snapshots
from rdma_lab.control import MAX_SCRIPT_SECONDS, About, ControlServer
from rdma_lab.errors import (
    CommandNotFoundError,
    GuestPanicError,
    GuestStoppedError,
    LabError,
    LabTimeoutError,
    LabUnavailableError,
    meant,
)
from rdma_lab.plan import plan
from rdma_lab.result import LabResult

PORTS, MAX_PORTS = 3, 64
MEMORY = 1024
BOOT_TIMEOUT = 300.0
CONSOLE_BYTES = 64 * 1024
CONSOLE_LINES, TRACE_LINES, TRACE_DISTANCE = 12, 60, 160
"""Lines of the console in an error: the last; of a trace; how far before the end a trace may begin."""
_TRACE = re.compile(
    r"\b(BUG|Oops|general protection fault|kernel NULL pointer|Unable to handle|Kernel panic|"
    r"INFO: task|rcu: INFO)\b"
)
"""First line of a kernel's report on the console; where and by whose call follow."""
HUNG_SECONDS = 30.0
"""Seconds after which a resumed guest that is not ready is taken to hang, and is not resumed again."""
STOP_SECONDS = 10.0
"""Maximum seconds that a guest may take to stop after its command ended."""

ENVIRONMENT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TERM", "COLUMNS", "TZ", "CI", "TMPDIR"),
    *(
        "NO_COLOR",
        "FORCE_COLOR",
        "VIRTUAL_ENV",
        "PYTHON*",
        "PYTEST_*",
        "PY_COLORS",
        "COVERAGE_*",
        "HYPOTHESIS_*",
    ),
    *("MCAST_*", "RDMAV_*", "IBV_*", "?SAN_OPTIONS", "UBSAN_OPTIONS", "LD_LIBRARY_PATH", "LD_PRELOAD"),
)
"""The variables, as shell patterns, that the command inherits. It also gets RDMA_LAB=1."""

logger: logging.Logger = logging.getLogger("rdma_lab")

Accel = Literal["auto", "kvm", "tcg"]
FabricKind = Literal["roce", "infiniband"]


class _NotResumedError(Exception):
    """A guest that was kept did not start, so a new one is booted."""


class _Limits(NamedTuple):
    """The limits of a run in seconds: until the guest is ready, in all, and without output of the command."""

    boot: float
    whole: float | None = None
    output_timeout: float | None = None


@dataclass(frozen=True, slots=True)
class LabMachine:
    """A guest with `ports` RDMA devices of one port each, on one fabric.

    "roce": Soft-RoCE devices rxe1… on netdevs e1…, all on one bridge with IGMP snooping; the other end of ei
    is the bridge's port pi. "infiniband": HCAs softib1… with IPoIB interfaces ib1…, on `switches` switches:
    one, or a root and leaves that the HCAs are dealt to in turn; OpenSM, on softib1, manages them.

    Port i has the addresses 10.77.0.i/24 and fd77::i/64. The guest sees this host's files; what it writes is
    gone with it, except in the directories of `share`.

    `kernel` is what `kernels.find` takes; `memory` is in MiB, of which 64 HCAs need 1664; `boot_timeout` in
    seconds. `accel` "auto" takes KVM where a kernel really starts under it. Values out of range raise
    LabUnavailableError at once.

    An emulated guest takes seconds to boot. So it is kept in the user's cache when its fabric stands, and the
    next run of the same machine, kernel, QEMU and rdma_lab resumes it there, with the clock set and other
    random numbers; the hardware addresses of its devices are the same. With `anew` nothing is resumed or
    kept.
    """

    ports: int = PORTS
    kernel: str | None = None
    share: Sequence[Path] = ()
    memory: int = MEMORY
    accel: Accel = "auto"
    boot_timeout: float = BOOT_TIMEOUT
    fabric: FabricKind = "roce"
    switches: int = 1
    anew: bool = False

    def __post_init__(self) -> None:
        if self.fabric not in get_args(FabricKind):
            raise LabUnavailableError(f"no fabric {self.fabric}: give {' or '.join(get_args(FabricKind))}")
        most = driver.MAX_SWITCHES if self.fabric == "infiniband" else 1
        if not 1 <= self.switches <= most:
            raise LabUnavailableError(
                f"{self.switches} switches asked for: on {self.fabric} the lab makes 1"
                + (f" to {most}" if most > 1 else " bridge")
            )
        if self.switches > self.ports + 1:
            raise LabUnavailableError(
                f"{self.switches} switches for {self.ports} ports: a leaf would have none; ask for fewer"
            )
        if not 1 <= self.ports <= MAX_PORTS:
            raise LabUnavailableError(f"{self.ports} ports asked for: the lab makes 1 to {MAX_PORTS}")
        needed = driver.memory(self.ports) if self.fabric == "infiniband" else 0
        if self.memory < needed:
            raise LabUnavailableError(
                f"{self.memory} MiB of memory for {self.ports} ports: on infiniband these take {needed} MiB; "
                f"give the guest that much (--memory {needed})"
            )
        for path in self.share:
            if why := _unshareable(path):
                raise LabUnavailableError(f"{str(path)!r} cannot be shared: {why}")

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float | None = None,
        output_timeout: float | None = None,
        stdout: BinaryIO | None = None,
        stderr: BinaryIO | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        console: Path | None = None,
    ) -> LabResult:
        """Boot, run `command` in `cwd` (here) with `env` (ENVIRONMENT of this process), and stop the guest.

        The command's standard input is empty; its output is written as it comes to `stdout` and `stderr`
        (this process's). `timeout` bounds the whole call, in seconds; `output_timeout` the time in which the
        command writes nothing: on a machine of unknown speed it tells a command that hangs from one that is
        slow. The file `console` gets what the guest's kernel prints, however the run ends. An exception,
        KeyboardInterrupt included, stops the guest before it leaves this call. Raises the errors of
        `rdma_lab.errors`.
        """
        env = inherited(os.environ) if env is None else env
        cwd = _here() if cwd is None else cwd.absolute()
        self._look_up(command, cwd, env)
        self._check_directory(cwd)
        sinks = {
            "lab.out": _writer(sys.stdout.buffer if stdout is None else stdout),
            "lab.err": _writer(sys.stderr.buffer if stderr is None else stderr),
        }
        limits = _Limits(self.boot_timeout, timeout, output_timeout)
        script = _command_script(command, cwd, env)
        with _Console.writing(console) as kept:
            return self._boot(command, script, sinks, limits, kept, tty=False)

    def shell(self, console: Path | None = None) -> LabResult:
        """A prompt in the guest, on this terminal; ends when the shell does (or at once with Ctrl-A X)."""
        if not sys.stdin.isatty():
            raise LabUnavailableError("a prompt needs a terminal; use `rdma-lab run -- COMMAND` without one")
        env, cwd = inherited(os.environ), _here()
        self._check_directory(cwd)
        size = shutil.get_terminal_size()
        command = ["sh", "-c", f'stty rows {size.lines} cols {size.columns}; exec "${{SHELL:-/bin/sh}}" -i']
        limits = _Limits(self.boot_timeout)
        script = _command_script(command, cwd, env)
        with _Console.writing(console) as kept:
            return self._boot(["shell"], script, {}, limits, kept, tty=True)

    def _look_up(self, command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        if not command:
            raise CommandNotFoundError("no command to run in the lab: put it after --")
        name = str(cwd / command[0]) if "/" in command[0] else command[0]
        path = env.get("PATH", host.SYSTEM_PATH)
        if shutil.which(name, path=path) is None:
            hint = "; install it here, or give its path"
            if "/" in name:
                hint = "; give the path of a file that may be executed"
            elif likely := meant(name, host.commands(path)):
                hint = likely
            raise CommandNotFoundError(
                f"{command[0]!r}: no such command on this machine, whose files the lab sees{hint}"
            )

    def _check_directory(self, cwd: Path) -> None:
        """Refuse a working directory that is this machine's alone. Raises LabUnavailableError."""
        found = cwd.resolve()
        if _is_guests_own(found) and not any(found.is_relative_to(path.resolve()) for path in self.share):
            raise LabUnavailableError(
                f"{cwd} is not in the guest, which has a /{found.parts[1]} of its own: change to another "
                "directory"
            )

    def _boot(
        self,
        command: Sequence[str],
        script: str,
        sinks: Mapping[str, Callable[[bytes], None]],
        limits: _Limits,
        console: "_Console",
        *,
        tty: bool,
    ) -> LabResult:
        started = time.monotonic()
        try:
            return self._attempt(command, script, sinks, limits, console, tty, started)
        except _NotResumedError:
            console.text.clear()
            return replace(self, anew=True)._attempt(command, script, sinks, limits, console, tty, started)

    def _attempt(
        self,
        command: Sequence[str],
        script: str,
        sinks: Mapping[str, Callable[[bytes], None]],
        limits: _Limits,
        console: "_Console",
        tty: bool,
        started: float,
    ) -> LabResult:
        host.require(self.fabric)
        kernel = kernels.find(self.kernel)
        kvm = self.accel != "tcg" and not host.kvm_problem()
        if self.accel == "kvm" and not kvm:
            raise LabUnavailableError(f"KVM does not work here: {host.kvm_problem()}; leave out --accel kvm")
        with ExitStack() as stack:
            shares, mark = [path.resolve() for path in self.share], secrets.token_hex(16)
            with _temporary_files():
                job = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rdma-lab-")))
                if self.fabric == "infiniband":
                    driver.write_job(job, kernel, self.ports, self.switches)
                _write_job(job, kernel, shares, script, mark, tty)
            names = ("lab.ctl", *sinks)
            pipes = {name: os.pipe() for name in (*names, "lab.tap", "console")}
            ends = {name: stack.enter_context(os.fdopen(read, "rb", 0)) for name, (read, _) in pipes.items()}
            tap = ends.pop("lab.tap")  # for the clients of the control server alone
            stack.callback(console.drain, ends["console"])  # when QEMU has ended
            (go, their_go), (monitor, their_monitor) = socket.socketpair(), socket.socketpair()
            stack.enter_context(go)
            stack.enter_context(monitor)
            monitor.settimeout(limits.boot)
            with ExitStack() as writing:
                for _, write in pipes.values():
                    writing.callback(os.close, write)
                fds = {name: pipes[name][1] for name in (*names, "lab.tap")}
                lines = [writing.enter_context(line).fileno() for line in (their_go, their_monitor)]
                with _temporary_files():
                    argv = plan(
                        kernel,
                        job,
                        memory=self.memory,
                        kvm=kvm,
                        shares=shares,
                        devices=self.ports if self.fabric == "roce" else 0,
                        ports=fds,
                        go=lines[0],
                        tty=tty,
                    )
                kind = None if kvm or self.anew else snapshots.GuestKind.of(argv)
                state = kind.find() if kind else None
                if state:
                    lines.append(stack.enter_context(state.file).fileno())
                argv += state.resumed() if state else snapshots.monitor_arguments(lines[1])
                process = stack.enter_context(
                    _running(argv, [*fds.values(), *lines], pipes["console"][1], tty)
                )

            def send(word: str) -> None:
                with suppress(BrokenPipeError):  # a QEMU that has ended is told of below
                    go.sendall(f"{word} {int(time.time())}\n".encode())

            def stands(word: str) -> None:
                if kind and word == "keep":
                    kind.keep(monitor)
                send("go")

            def ready() -> None:
                shape = (self.fabric, self.ports, self.switches)
                shown = " ".join(shlex.join(command).split())[:60]  # a script may have many lines
                about = About(f"{self.fabric}-{process.pid}", *shape, kernel.version, shown)
                try:
                    stack.enter_context(ControlServer(about, go, tap.fileno()))
                except (OSError, LabError) as error:
                    logger.warning("no other process can break or tap this guest: %s", error)

            if state:
                send("wake")
            outputs = {name: _Output(sink, b"\0" + mark.encode()) for name, sink in sinks.items()}
            watch = _Watch(process, started, limits, stands, ready, tuple(outputs.values()), console)
            handlers = {name: watch.heeding(output) for name, output in outputs.items()}
            handlers |= {"lab.ctl": watch.control, "console": console.hear}
            try:
                watch.follow({end: handlers[name] for name, end in ends.items()})
                exit_code, ready_after = watch.outcome()
            except LabError as error:
                ready_after = float("inf") if watch.ready_after is None else watch.ready_after
                spent = time.monotonic() - started
                error.result = LabResult(
                    error.exit_code, kernel.version, kvm, ready_after, spent, state is not None
                )
                if state is None or watch.ready_after is not None or watch.failure is not None:
                    raise
                if isinstance(error, LabTimeoutError) and time.monotonic() - started < HUNG_SECONDS:
                    raise  # of a limit that is short the guest knows nothing
                state.discard("; ".join(["could not be resumed: " + error.message, *error.console[-1:]]))
                if isinstance(error, LabTimeoutError):
                    raise
                raise _NotResumedError from error
            seconds = time.monotonic() - started
            return LabResult(exit_code, kernel.version, kvm, ready_after, seconds, state is not None)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of `environ` that matches ENVIRONMENT."""
    return {
        name: value for name, value in environ.items() if any(fnmatchcase(name, kind) for kind in ENVIRONMENT)
    }


def _writer(stream: BinaryIO) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        stream.write(data)
        stream.flush()

    return write


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise LabUnavailableError("this directory was removed: change to another one") from None


GUESTS_OWN = ("dev", "proc", "run", "sys")
"""Directories of / that the guest has of its own."""


def _is_guests_own(path: Path) -> bool:
    return len(path.parts) > 1 and path.parts[1] in GUESTS_OWN


def _unshareable(path: Path) -> str:
    """Return why a guest cannot have that directory to write to, and what to do; "" if it can."""
    if not os.access(path, os.X_OK) or not path.is_dir():
        return "it is not a directory; make it first"
    found = path.resolve()
    if "\n" in str(found):
        return "its name contains a line break: rename it"
    whole = len(found.parts) < 3 and (found == Path("/") or _is_guests_own(found))
    if whole or found.parts[1] in ("proc", "sys"):
        return f"the guest has a {found} of its own; share another directory"
    if not os.access(found, os.W_OK | os.X_OK):
        return "you may not write to it; share one that you may write to: the guest reads all others anyway"
    return ""


@contextmanager
def _temporary_files() -> Iterator[None]:
    """Raise LabUnavailableError if a file of this run cannot be written in the block."""
    try:
        yield
    except LabError:  # some of which are an OSError
        raise
    except OSError as error:
        raise LabUnavailableError(
            f"no room for this run's temporary files: {error.strerror}: free some, or set TMPDIR to another "
            "directory"
        ) from error


def _command_script(command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> str:
    names = re.compile("[A-Za-z_][A-Za-z0-9_]*")  # others, the shell would take for errors
    exports = [f"export {name}={shlex.quote(value)}" for name, value in env.items() if names.fullmatch(name)]
    lines = [f"cd {shlex.quote(str(cwd))} || exit 125", "export RDMA_LAB=1", *exports]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])


def _write_job(
    job: Path, kernel: kernels.Kernel, shares: Sequence[Path], script: str, mark: str, tty: bool
) -> None:
    settings = {
        "MARK": mark,
        "MODULES_DIR": str(kernel.modules),
        "TTY": "1" if tty else "",
        "MAX_SCRIPT_SECONDS": str(MAX_SCRIPT_SECONDS),
    }
    files = {
        "settings": [f"{name}={shlex.quote(value)}" for name, value in settings.items()],
        "shares": [str(path) for path in shares],
        "command": [script],
    }
    for name, lines in files.items():
        _write(job / name, "".join(f"{line}\n" for line in lines))


def _write(path: Path, text: str) -> None:
    path.write_bytes(os.fsencode(text))


@contextmanager
def _running(
    argv: Sequence[str], fds: Sequence[int], console: int, tty: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """QEMU, for as long as the block. QEMU is gone after the block, and when this process is killed."""
    guard = [setpriv, "--pdeathsig", "KILL"] if (setpriv := host.tool("setpriv")) else []
    process = subprocess.Popen(
        [*guard, *argv],
        stdin=None if tty else subprocess.DEVNULL,
        stdout=None if tty else subprocess.DEVNULL,
        stderr=console,
        pass_fds=fds,
        start_new_session=not tty,  # Ctrl-C is for us to act on, not for QEMU
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _Output:
    """An output of the command, up to the mark that ends it."""

    def __init__(self, sink: Callable[[bytes], None], mark: bytes) -> None:
        self._sink = sink
        self._mark = mark
        self._held = b""
        self.ended: bool = False

    def feed(self, data: bytes) -> None:
        """Hand on what is not, or not yet, a part of the mark; without data, which is the end, all."""
        if self.ended:
            return
        output, mark, _ = (self._held + data).partition(self._mark)
        self.ended = bool(mark) or not data
        sizes = range(min(len(self._mark) - 1, len(output)), 0, -1)
        begun = 0 if self.ended else next((n for n in sizes if output.endswith(self._mark[:n])), 0)
        at = len(output) - begun
        self._held = output[at:]
        if at:
            self._sink(output[:at])


@dataclass
class _Console:
    """The guest's console: its last part, for an error, and the file that gets all of it."""

    path: Path | None = None
    file: BinaryIO | None = None
    text: bytearray = field(default_factory=bytearray)

    @classmethod
    @contextmanager
    def writing(cls, path: Path | None) -> "Iterator[_Console]":
        """A console that is written to `path`. Raises LabError."""
        if path is None:
            yield cls()
            return
        try:
            file = path.open("wb", buffering=0)
        except OSError as error:
            raise LabUnavailableError(f"{path} cannot be written: {error.strerror}") from None
        with file:
            yield cls(path, file)

    def hear(self, data: bytes) -> None:
        self.text += data
        del self.text[:-CONSOLE_BYTES]
        if self.file:
            try:
                self.file.write(data.replace(b"\r", b""))  # a serial line ends in both
            except OSError as error:
                self.file = None
                raise LabError(f"{self.path} cannot be written: {error.strerror}") from None

    def drain(self, end: BinaryIO) -> None:
        """Hear what a guest that has ended left in the pipe."""
        os.set_blocking(end.fileno(), False)
        with suppress(BlockingIOError):
            while data := os.read(end.fileno(), 65536):
                self.hear(data)

    def excerpt(self, on_warn: bool = False) -> tuple[str, ...]:
        """The last lines; from where a trace that is near the end begins, if there is one.

        With `on_warn` that is the last warning: an earlier one has not stopped the kernel.
        """
        text = self.text.decode(errors="replace")
        lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
        if on_warn:
            begins = [at for at, line in enumerate(lines) if "WARNING: " in line][-1:]
        else:
            near = range(max(len(lines) - TRACE_DISTANCE, 0), len(lines))
            begins = [at for at in near if _TRACE.search(lines[at])]
        last = max(len(lines) - CONSOLE_LINES, 0)
        start = min([*begins[:1], last])
        # The kernel prints its own words for a warning or a bug before that line.
        cuts = (at for at in range(max(start - 3, 0), start) if "[ cut here ]" in lines[at])
        start = next(cuts, start)
        end = start + TRACE_LINES
        return tuple(lines[start:] if end >= last else [*lines[start:end], "...", *lines[last:]])


@dataclass
class _Watch:
    """State of a running guest, from its control port and its console."""

    process: subprocess.Popen[bytes]
    started: float
    limits: _Limits
    stands: Callable[[str], None]
    """Called when the guest waits to be told to go on, with what the guest says of itself."""
    ready: Callable[[], None]
    """Called when the fabric stands and the command is about to start."""
    outputs: tuple[_Output, ...]
    """Outputs of the command; none if it has a terminal."""
    console: _Console
    words: bytearray = field(default_factory=bytearray)
    ready_after: float | None = None
    last_output: float = 0
    ended: float | None = None
    exit_code: int | None = None
    failure: str | None = None

    def heeding(self, output: _Output) -> Callable[[bytes], None]:
        """The handler of `output`, by which the time of the command's last output is remembered."""

        def hand_on(data: bytes) -> None:
            output.feed(data)
            self.last_output = time.monotonic()
            if self.ended is not None:  # what is still to be read waits for a slow reader of the output
                self.ended = self.last_output

        return hand_on

    def control(self, data: bytes) -> None:
        self.words += data
        *lines, rest = self.words.split(b"\n")
        self.words = bytearray(rest)
        for line in lines:
            verb, _, argument = line.decode(errors="replace").partition(" ")
            if verb == "standing":
                self.stands(argument)
            elif verb == "ready":
                self.last_output = time.monotonic()
                self.ready_after = self.last_output - self.started
                self.ready()
            elif verb == "exit":
                self.exit_code, self.ended = int(argument), time.monotonic()
            elif verb == "fail":
                self.failure, self.ended = argument, time.monotonic()

    def deadline(self) -> tuple[float, str]:
        """The time at which to give up, and the reason to give then."""
        if self.ended is not None:
            return self.ended + STOP_SECONDS, ""
        boot, whole, output_timeout = self.limits
        limits: list[tuple[float, str]] = []
        if self.ready_after is None:
            limits.append((self.started + boot, f"not ready in {boot:g} s"))
        elif output_timeout is not None:
            limits.append(
                (self.last_output + output_timeout, f"the command wrote nothing for {output_timeout:g} s")
            )
        if whole is not None:
            limits.append((self.started + whole, f"not done in {whole:g} s"))
        return min(limits, default=(float("inf"), ""))

    def follow(self, handlers: Mapping[BinaryIO, Callable[[bytes], None]]) -> None:
        """Pass on output until the command has ended and all is read. Raises LabTimeoutError.

        All is read when both outputs have come to their marks, or else when the guest has closed every end.
        """
        with selectors.DefaultSelector() as selector:
            for end, handler in handlers.items():
                selector.register(end, selectors.EVENT_READ, handler)
            while selector.get_map():
                if self.exit_code is not None and self.outputs and all(one.ended for one in self.outputs):
                    return
                limit, why = self.deadline()
                left = limit - time.monotonic()
                if left <= 0:
                    if self.ended is not None:
                        return
                    raise LabTimeoutError(f"the lab was stopped: {why}", self.console.excerpt())
                for key, _ in selector.select(min(left, 3600)):
                    data = os.read(key.fd, 65536)
                    key.data(data)
                    if not data:
                        selector.unregister(key.fileobj)

    def outcome(self) -> tuple[int, float]:
        """The command's exit code and when the guest was ready. Raises GuestPanicError, GuestStoppedError."""
        if self.exit_code is not None and self.ready_after is not None:
            return self.exit_code, self.ready_after
        if panic := re.search(rb"Kernel panic - not syncing: ([^\r\n]*)", self.console.text):
            why = panic[1].decode(errors="replace")
            raise GuestPanicError(
                f"the guest's kernel panicked: {why}", self.console.excerpt("panic_on_warn" in why)
            )
        if self.failure is not None:
            raise GuestStoppedError(f"the guest could not be set up: {self.failure}", self.console.excerpt())
        status = self.process.wait(STOP_SECONDS)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        raise GuestStoppedError(
            f"the guest ended before the command did (QEMU: {how})", self.console.excerpt()
        )
