"""`mcast lab`: run a command on real RDMA stacks, Soft-RoCE or InfiniBand, in a small virtual machine."""

import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mcast.cli.interrupt import heeded
from mcast.cli.status import ExitStatus, by_signal
from mcast.cli.terminal import Json, json_output, say
from mcast.cli.values import LONGEST, number_option, seconds
from mcast.cli.values import memory as memory_of
from rdma_lab import LabError, LabMachine, LabResult, apt_line, kernels
from rdma_lab import needs as look_up_needs
from rdma_lab.driver import MAX_SWITCHES
from rdma_lab.host import kvm_works
from rdma_lab.machine import BOOT_TIMEOUT, MAX_PORTS, MEMORY, PORTS, Accel, FabricKind

app: typer.Typer = typer.Typer(
    help="Run commands on Soft-RoCE or InfiniBand, in a small guest. The guest sees this machine's files.",
    no_args_is_help=True,
)

_limit = seconds(0, LONGEST)

Ports = Annotated[int, number_option(help=f"RDMA devices to make, 1 to {MAX_PORTS}.")]
FabricName = Annotated[
    FabricKind, typer.Option(help="Soft-RoCE on a bridge, or InfiniBand: HCAs, switches and OpenSM.")
]
Switches = Annotated[
    int,
    number_option(help=f"InfiniBand switches, 1 to {MAX_SWITCHES}: one, or a root and leaves."),
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
    typer.Option(parser=memory_of(128, 1 << 20), metavar="MIB", help="The guest's memory: 1024 MiB, or 2G."),
]
Anew = Annotated[bool, typer.Option("--anew", help="Boot: resume no guest of an earlier run, and keep none.")]
Accelerator = Annotated[Accel, typer.Option(help="KVM where it really works, or one of the two.")]


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="What to run, after --.", metavar="-- COMMAND")],
    ports: Ports = PORTS,
    kernel: KernelSpec = None,
    share: Share = None,
    timeout: Annotated[
        float | None, typer.Option(parser=_limit, metavar="SECONDS", help="Stop everything after this time.")
    ] = None,
    silence: Annotated[
        float | None,
        typer.Option(
            parser=_limit,
            metavar="SECONDS",
            help="Stop everything once COMMAND has written nothing for this time.",
        ),
    ] = None,
    boot_timeout: Annotated[
        float, typer.Option(parser=_limit, metavar="SECONDS", help="How long the guest may take to be ready.")
    ] = BOOT_TIMEOUT,
    memory: Memory = MEMORY,
    accel: Accelerator = "auto",
    fabric: FabricName = "roce",
    switches: Switches = 1,
    anew: Anew = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say how the machine ran, on stderr.")
    ] = False,
) -> None:
    """Run COMMAND in the lab: same directory, same environment, its output and its exit code.

    What it writes is gone afterwards, except in the directories given with --share. Exit codes of our own, as
    env and timeout have them: 127 no such command, 124 time limit, 125 the lab failed, 130 Ctrl-C.
    """
    with _plain_errors():
        machine = LabMachine(ports, kernel, share or (), memory, accel, boot_timeout, fabric, switches, anew)
        result = machine.run(command, timeout=timeout, silence=silence)
    _leave(result, verbose)


@app.command()
def shell(
    ports: Ports = PORTS,
    kernel: KernelSpec = None,
    share: Share = None,
    memory: Memory = MEMORY,
    accel: Accelerator = "auto",
    fabric: FabricName = "roce",
    switches: Switches = 1,
    anew: Anew = False,
) -> None:
    """A prompt in the lab; leave it with exit, or Ctrl-A X to stop the machine."""
    with _plain_errors():
        machine = LabMachine(
            ports, kernel, share or (), memory, accel, fabric=fabric, switches=switches, anew=anew
        )
        result = machine.shell()
    _leave(result, verbose=False)


@app.command()
def check(as_json: Json = False) -> None:
    """Say what the lab needs and has, and the line that installs the rest; exit status 1 if there is one."""
    with _plain_errors():
        found = look_up_needs()
        missing = [need for need in found if need.found is None]
        kvm = not any(need.boots for need in missing) and kvm_works()
    if as_json:
        json_output.result({"needs": [asdict(need) for need in found], "kvm": kvm, "fix": apt_line(missing)})
    else:
        for need in found:
            state, found_at = ("missing", "") if need.found is None else ("ok", need.found)
            # A path is not broken: where it does not fit it has a line of its own.
            fits = len(found_at) <= shutil.get_terminal_size().columns - 38
            say(f"{state:8} {need.name:28} {found_at if fits else ''}".rstrip())
            if not fits:
                say(f"{'':9}{found_at}")
        say(f"{'ok':8} {'acceleration':28} {'KVM' if kvm else 'none: emulation, seconds to start'}")
        if missing:
            say(f"\nto have it all: {apt_line(missing)}")
    raise typer.Exit(ExitStatus.FAILED if missing else ExitStatus.DONE)


@app.command("kernel")
def fetch_kernel(
    version: Annotated[str, typer.Argument(metavar="VERSION", help="The start of a version, such as 6.12.")],
) -> None:
    """Fetch Debian's newest kernel of VERSION for --kernel, without installing it."""
    with _plain_errors():
        kernel = kernels.fetch(version)
    where = kernels.fetched_dir() / kernel.version
    say(f"{kernel.version} is in {where}: mcast lab run --kernel {version} -- ...")


def _leave(result: LabResult, verbose: bool) -> NoReturn:
    if verbose:
        how = "KVM" if result.kvm else "emulated"
        how += ", resumed" if result.resumed else ""
        times = f"ready after {result.ready_after:.1f} s, {result.seconds:.1f} s in all"
        say(f"mcast lab: Linux {result.kernel}, {how}, {times}, exit code {result.exit_code}", err=True)
    raise typer.Exit(result.exit_code)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """One sentence and the exit code of the error; a signal that ends us ends the guest first."""
    for number in heeded(signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, _: sys.exit(by_signal(signum)))
    try:
        yield
    except LabError as error:
        json_output.error(str(error), error.exit_code)
        say(f"mcast lab: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        json_output.error("interrupted", ExitStatus.INTERRUPTED)
        say("mcast lab: interrupted; the guest is stopped", err=True)
        raise typer.Exit(ExitStatus.INTERRUPTED) from None
    except BrokenPipeError:  # nobody reads our output any more
        sys.stdout = None
        raise typer.Exit(ExitStatus.UNREAD) from None
