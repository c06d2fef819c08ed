"""The command `rdma-lab`: run a command on Soft-RoCE or InfiniBand, in a small virtual machine.

`app` may be mounted in the command of another program: errors begin with the name it has there.
"""

import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, NoReturn

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from rdma_lab import LabError, LabMachine, LabResult, apt_line, faults, kernels
from rdma_lab import needs as look_up_needs
from rdma_lab.cache_key import cache_key
from rdma_lab.control import connect
from rdma_lab.driver import MAX_SWITCHES
from rdma_lab.errors import FaultError
from rdma_lab.host import Need, kvm_problem
from rdma_lab.machine import BOOT_TIMEOUT, MAX_PORTS, MEMORY, PORTS, Accel, FabricKind
from rdma_lab.tap import Tally, Tap, until_signalled

if TYPE_CHECKING:
    from typer._click.core import Context
    from typer._click.formatting import HelpFormatter

GUEST_STOPPED = "interrupted; the guest is stopped"
FAILED, INTERRUPTED, UNREAD = 1, 128 + signal.SIGINT, 128 + signal.SIGPIPE
"""Exit statuses of the command itself; those of the lab are in `rdma_lab.errors`."""
MAX_SECONDS = 604_800.0
"""The longest time that an option takes: a week, which each timer of the system can wait for."""
SECONDS = {"us": 1e-6, "ms": 1e-3, "": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}
MIB = {"": 1.0, "m": 1.0, "mi": 1.0, "mib": 1.0, "g": 1024.0, "gi": 1024.0, "gib": 1024.0}
"""Unit of a memory size -> MiB, as QEMU has them."""
MIN_MEMORY, MAX_MEMORY = 128, 1 << 20
"""Bounds of the guest's memory in MiB."""


class _Plain(TyperCommand):
    """A command whose arguments are shown as manual pages show them: COMMAND... or [FAULT...]."""

    def collect_usage_pieces(self, ctx: "Context") -> list[str]:
        pieces = [self.options_metavar or ""]
        for one in self.params:
            if isinstance(one, TyperArgument):
                name = one.display_name_raw + "..." * (one.nargs != 1)
                pieces.append(name if one.required else f"[{name}]")
        return pieces

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        for title, kind in (("Arguments", TyperArgument), ("Options", TyperOption)):
            shown = [one for one in self.get_params(ctx) if isinstance(one, kind)]
            # Without the type, which typer adds to the name of an argument.
            rows = [
                (one.display_name_raw if kind is TyperArgument else row[0], row[1])
                for one in shown
                if (row := one.get_help_record(ctx))
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


app: typer.Typer = typer.Typer(
    name="rdma-lab",
    help="Run commands on Soft-RoCE or InfiniBand, in a small guest. The guest sees this machine's files.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _amount(text: str, units: dict[str, float]) -> float | None:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+) ?([a-z]*)", text.lower())
    return float(found[1]) * units[found[2]] if found and found[2] in units else None


def _whole(text: str | int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", str(text)):
        raise typer.BadParameter(f"{text} is not a number: give a whole number, such as 4")
    return int(text)


def _seconds(text: str | float) -> float:
    wanted = _amount(str(text), SECONDS)
    if not wanted or wanted > MAX_SECONDS:
        raise typer.BadParameter(
            f"{text} is not a time: give more than 0 and up to a week, in seconds or with us, ms, s, min or h"
        )
    return wanted


def _memory(text: str | int) -> int:
    wanted = _amount(str(text), MIB)
    if wanted is None or wanted % 1 or not MIN_MEMORY <= wanted <= MAX_MEMORY:
        raise typer.BadParameter(
            f"{text} is not a size of memory: give MiB, or a number with M or G, {MIN_MEMORY}M to "
            f"{MAX_MEMORY >> 10}G"
        )
    return int(wanted)


Ports = Annotated[
    int, typer.Option(parser=_whole, metavar="N", help=f"RDMA devices to make, 1 to {MAX_PORTS}.")
]
FabricName = Annotated[
    FabricKind, typer.Option(help="Soft-RoCE on a bridge, or InfiniBand: HCAs, switches and OpenSM.")
]
Switches = Annotated[
    int,
    typer.Option(
        parser=_whole,
        metavar="N",
        help=f"InfiniBand switches, 1 to {MAX_SWITCHES}: one, or a root and leaves.",
    ),
]
KernelSpec = Annotated[
    str | None,
    typer.Option(
        "--kernel",
        help="6.1, a full version, or the directory of an unpacked kernel package.",
        metavar="VERSION",
    ),
]
Share = Annotated[
    list[Path] | None, typer.Option(help="A directory the guest may write to; repeatable.", metavar="DIR")
]
Memory = Annotated[
    int,
    typer.Option(parser=_memory, metavar="MIB", help="The guest's memory: 1024 MiB, or 2G."),
]
Anew = Annotated[
    bool, typer.Option("--anew", help="Boot: neither resume a guest of an earlier run nor keep one.")
]
Console = Annotated[
    Path | None, typer.Option(help="Write what the guest's kernel prints to FILE.", metavar="FILE")
]
Accelerator = Annotated[Accel, typer.Option(help="auto: KVM where it works, else emulation (tcg).")]


@app.command(options_metavar="[OPTIONS] --", context_settings={"allow_interspersed_args": False})
def run(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(help="What to run, with its arguments.", metavar="COMMAND")],
    ports: Ports = PORTS,
    kernel: KernelSpec = None,
    share: Share = None,
    timeout: Annotated[
        float | None,
        typer.Option(parser=_seconds, metavar="SECONDS", help="Stop after this time: 90, or 10min."),
    ] = None,
    output_timeout: Annotated[
        float | None,
        typer.Option(
            parser=_seconds,
            metavar="SECONDS",
            help="Stop when COMMAND has written nothing for this time.",
        ),
    ] = None,
    boot_timeout: Annotated[
        float,
        typer.Option(parser=_seconds, metavar="SECONDS", help="Maximum time until the guest is ready."),
    ] = BOOT_TIMEOUT,
    memory: Memory = MEMORY,
    accel: Accelerator = "auto",
    fabric: FabricName = "roce",
    switches: Switches = 1,
    anew: Anew = False,
    console: Console = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print kernel, acceleration and times to stderr.")
    ] = False,
) -> None:
    """Run COMMAND in the lab, with your files and environment.

    COMMAND runs in this directory of the guest; its output and exit status are passed on.

    Files that it writes are discarded, except in directories given with --share. Exit codes of rdma-lab
    itself, like those of env and timeout: 127 no such command, 124 time limit, 125 the lab failed, 130
    Ctrl-C.
    """
    with _plain_errors(context, GUEST_STOPPED):
        machine = LabMachine(ports, kernel, share or (), memory, accel, boot_timeout, fabric, switches, anew)
        try:
            result = machine.run(command, timeout=timeout, output_timeout=output_timeout, console=console)
        except LabError as error:
            if verbose and error.result:
                _summarize(context, error.result, machine)
            raise
    if verbose:
        _summarize(context, result, machine)
    raise typer.Exit(result.exit_code)


@app.command()
def shell(
    context: typer.Context,
    ports: Ports = PORTS,
    kernel: KernelSpec = None,
    share: Share = None,
    memory: Memory = MEMORY,
    accel: Accelerator = "auto",
    fabric: FabricName = "roce",
    switches: Switches = 1,
    anew: Anew = False,
    console: Console = None,
) -> None:
    """Open a prompt in the lab.

    Leave it with exit, or Ctrl-A X to stop the machine.
    """
    with _plain_errors(context, GUEST_STOPPED):
        machine = LabMachine(
            ports, kernel, share or (), memory, accel, fabric=fabric, switches=switches, anew=anew
        )
        if sys.stdin.isatty():
            _say(context, "the guest boots; the prompt appears in seconds, and Ctrl-A X stops it")
        result = machine.shell(console)
    raise typer.Exit(result.exit_code)


@dataclass
class CheckOutput:
    """Needs of the lab, and which of them are there."""

    needs: tuple[Need, ...]
    kvm: bool
    """True if guests run under KVM, False if they are emulated."""
    kvm_problem: str
    """Why KVM is not used; "" if it is, or if it was not tried because no guest starts."""
    fix: str
    """The line that installs what is missing; "" if nothing is."""


@app.command()
def check(
    context: typer.Context,
    fabric: Annotated[FabricKind | None, typer.Option(help="Show only what this fabric needs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show what the lab needs, and the line that installs the rest.

    The exit status is 1 if something is missing.
    """
    with _plain_errors(context):
        found = look_up_needs(fabric)
        missing = [need for need in found if need.found is None]
        starts = not any(need.boots for need in missing)
        problem = kvm_problem() if starts else ""
        kvm = starts and not problem
        if as_json:
            typer.echo(json.dumps(asdict(CheckOutput(found, kvm, problem, apt_line(missing))), indent=1))
        else:
            rows = [(need.name, need.found) for need in found]
            rows.append(("acceleration", "KVM" if kvm else "none: emulation, seconds to start"))
            wide = max(len(name) for name, _ in rows)
            room = max(shutil.get_terminal_size().columns - wide - 9, 20)
            for name, where in rows:
                shown = where or ""
                shown = shown if len(shown) <= room else f"...{shown[3 - room :]}"  # --json has all of it
                typer.echo(f"{'missing' if where is None else 'ok':8}{name:{wide}} {shown}".rstrip())
            if problem and Path("/dev/kvm").exists():
                typer.echo(f"\nKVM is not used: {problem}")
            if missing:
                typer.echo(f"\nto install the rest: {apt_line(missing)}")
    raise typer.Exit(FAILED if missing else 0)


@app.command("kernel")
def fetch_kernel(
    context: typer.Context,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="The start of a version, such as 6.12.")],
) -> None:
    """Fetch a Debian kernel for --kernel, without installing it.

    It is the newest of VERSION that the package sources have.
    """
    with _plain_errors(context):
        kernel = kernels.fetch(version)
    where = kernels.fetched_dir() / kernel.version
    typer.echo(f"{kernel.version} is in {where}: rdma-lab run --kernel {version} -- ...")


@app.command("cache-key")
def print_cache_key(
    context: typer.Context,
    ports: Ports = PORTS,
    kernel: KernelSpec = None,
    share: Share = None,
    memory: Memory = MEMORY,
    fabric: FabricName = "roce",
    switches: Switches = 1,
) -> None:
    """Print a key of the lab's cache, for a CI system.

    Store ~/.cache/rdma-lab under this key. It changes with rdma-lab, the kernel and QEMU. Give the same
    options as to run.
    """
    with _plain_errors(context):
        machine = LabMachine(ports, kernel, share or (), memory, fabric=fabric, switches=switches)
        typer.echo(cache_key(machine))


GuestName = Annotated[
    str | None, typer.Option("--guest", metavar="NAME", help="Guest to use, if several are running.")
]


@app.command("break")
def break_fabric(
    context: typer.Context,
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="FAULT", help="What to break, as above.", show_default=False),
    ] = None,
    guest: GuestName = None,
    undo: Annotated[bool, typer.Option("--undo", help="Undo that fault, or, without one, all.")] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--for", parser=_seconds, metavar="SECONDS", help="Undo it after this time, or at Ctrl-C."
        ),
    ] = None,
) -> None:
    """Break the fabric of a running guest, from another terminal.

    Without a FAULT, show what can be broken, and its state. A FAULT is one of:

    \b
    cable NAME...        take the cable out of a port
    port NAME...         disable a port
    device NAME...       remove a device
    loss P [NAME...]     lose messages that arrive at ports: 0.1, 10%
    sm stop              stop OpenSM
    sm restart           stop OpenSM and start it again
    sm failover          start a standby, and kill the master
    """
    words = what or []
    with _plain_errors(context):
        if seconds is not None and (undo or not words or (words[0] == "sm" and words[1:] != ["stop"])):
            raise FaultError("--for undoes a fault later: give it with cable, port, device, loss or sm stop")
        with connect(guest) as running:
            _say(context, f"the guest is {running.about.name}, which runs: {running.about.command}")
            now = faults.status(running)
            done = faults.changes(words, now, undo=undo) if words or undo else []
            undone = [faults.opposite(change) for change in done] if seconds is not None else []
            after = " ; ".join(faults.script(running.about, *change) for change in undone) or None
            for change in done:
                said = running.run(faults.script(running.about, *change), after=after)
                after = None
                if said.strip():
                    _say(context, said.strip())
            typer.echo(faults.status(running).table())
            if seconds is None:
                return
            sys.stdout.flush()
            try:
                running.wait_for_end(seconds)
            except KeyboardInterrupt:
                _say(context, "interrupted; the fault is undone")
                raise typer.Exit(INTERRUPTED) from None


@app.command()
def tap(
    context: typer.Context,
    write: Annotated[
        Path | None, typer.Option("--write", "-w", metavar="FILE", help="Write to FILE, not to stdout.")
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", "-c", parser=_whole, metavar="N", help="End after N packets.")
    ] = None,
    guest: GuestName = None,
) -> None:
    """Capture the packets of a running guest's fabric, as pcapng.

    A packet is seen at each device that sends or receives it. Ctrl-C ends the capture, and the guest goes on.
    Live: rdma-lab tap | wireshark -k -i -
    """
    if write is None and sys.stdout.isatty():
        raise typer.BadParameter(
            "stdout is a terminal, and a capture is binary: give -w FILE, or pipe it to `wireshark -k -i -`"
        )
    if count == 0:
        raise typer.BadParameter("-c 0: give the number of packets to capture, 1 or more")
    tally, status = Tally(limit=count), 0
    with _plain_errors(context), ExitStack() as opened:
        running = opened.enter_context(connect(guest))
        capture = Tap(running)  # before the file: it may be the one that another tap of this guest writes
        file = opened.enter_context(_opened(write))
        try:
            with until_signalled() as signalled:
                _say(context, f"capturing the fabric of {running.about.name}; Ctrl-C ends it")
                capture.copy(file, tally, signalled)
        except LabError:  # some of which are an OSError
            raise
        except BrokenPipeError:  # Wireshark was closed
            _forget_stdout()
            status = UNREAD
        except OSError as error:
            _say(context, f"{write or 'stdout'} cannot be written: {error.strerror}")
            status = FAILED
        except KeyboardInterrupt:
            status = INTERRUPTED
        finally:
            plural = "" if tally.packets == 1 else "s"
            lost = f"{tally.lost} lost, because the reader was slow" if tally.lost else "none lost"
            _say(context, f"{tally.packets} packet{plural} captured, {lost}")
    raise typer.Exit(status)


@contextmanager
def _opened(path: Path | None) -> Iterator[BinaryIO]:
    """The file to write to, without a buffer; stdout without a path. Raises FaultError."""
    if path is None:
        with open(sys.stdout.fileno(), "wb", buffering=0, closefd=False) as file:
            yield file
        return
    try:
        opened = path.open("wb", buffering=0)
    except OSError as error:
        raise FaultError(f"{path} cannot be written: {error.strerror}") from None
    with opened as file:
        yield file


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rdma-lab {version_of('rdma-lab')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _summarize(context: typer.Context, result: LabResult, machine: LabMachine) -> None:
    """Say what --verbose asks for."""
    kernel = f"{result.kernel} of {machine.kernel}" if "/" in (machine.kernel or "") else result.kernel
    how = "KVM" if result.kvm else "emulated"
    how += ", resumed" if result.resumed else ""
    ready = f"ready after {result.ready_after:.1f} s" if result.ready_after < math.inf else "never ready"
    end = f"{result.seconds:.1f} s in all, exit code {result.exit_code}"
    _say(context, f"Linux {kernel}, {how}, {ready}, {end}")
    if machine.accel == "auto" and not result.kvm and Path("/dev/kvm").exists():
        _say(context, f"KVM is not used: {kvm_problem()}")


@contextmanager
def _plain_errors(context: typer.Context, interrupted: str = "interrupted") -> Iterator[None]:
    """One sentence and the exit code of the error; a signal that ends us ends the guest first."""
    try:
        with _one_signal():
            yield
    except LabError as error:
        _say(context, str(error), error.exit_code)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        _say(context, interrupted, INTERRUPTED)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # nobody reads our output any more
        _forget_stdout()
        raise typer.Exit(UNREAD) from None


@contextmanager
def _one_signal() -> Iterator[None]:
    """Let the first signal end the block by an exception, and ignore more of them while it tidies up.

    That takes seconds at most: QEMU has two to end.
    """

    def end(number: int, _: object) -> NoReturn:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {one: was for one, was in handlers.items() if was is not signal.SIG_IGN}  # as nohup(1) has it
    for one in before:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one, was in before.items():
            signal.signal(one, was)


def _forget_stdout() -> None:
    """Let the interpreter not flush to a pipe at the end whose reader is gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _say(context: typer.Context, text: str, status: int | None = None) -> None:
    """Write one message to stderr, under the name of the program that has this command.

    With a `status`, it is the error that ends the command, and with --json stdout has it, too.
    """
    if status is not None and context.params.get("as_json"):
        _print_error(text, status)
    name = context.parent.command_path if context.parent else context.command_path
    typer.echo(f"{name}: {text}", err=True)


def _print_error(text: str, status: int) -> None:
    """Print an error as JSON, as the commands of mcast do."""
    typer.echo(json.dumps({"error": text, "status": status}))


def _open_standard_streams() -> None:
    """Open those that the caller has closed, or a guest's pipe would take their numbers; writing fails."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_WRONLY if fd == 2 else os.O_RDONLY)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


for _command in app.registered_commands:
    _command.cls = _Plain


def main() -> NoReturn:
    """Run the command line and exit with its status."""
    command = "rdma-lab"
    _open_standard_streams()
    try:
        status = app(prog_name=command, standalone_mode=False)
        sys.stdout.flush()
        sys.exit(status if isinstance(status, int) else 0)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else command
        said = error.format_message().replace("Value error, ", "")
        if said.startswith("Usage:"):  # nothing was asked for
            typer.echo(said, err=True)
            sys.exit(error.exit_code)
        if not (type(error) is typer.BadParameter or said.endswith("?")):  # these say what to do
            said = f"{said.removesuffix('.')}: see `{command} --help`"
        status = error.exit_code
        has_json = context and any("--json" in one.opts for one in context.command.params)
        if has_json and "--json" in sys.argv:  # its options are not read yet
            _print_error(said, status)
    except KeyboardInterrupt:
        said, status = "interrupted", INTERRUPTED
    except OSError as error:  # an error with a file's name is not of stdout
        said = f"cannot write to stdout: {error.strerror}" if error.filename is None else str(error)
        status = FAILED
        _forget_stdout()
    print(f"{command}: {said}", file=sys.stderr)
    sys.exit(status)
