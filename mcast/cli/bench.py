"""`mcast bench`: rate, loss and latency of a group, in this process or over the ranks of an MPI job."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from mcast import open_backend
from mcast.cli.bench_client_server import EndOptions, line_of, send, serve, show
from mcast.cli.options import (
    BackendName,
    Bind,
    Device,
    Json,
    choose_backend,
    is_in_process,
    local_ports_of,
    refuse_in_process,
    require,
    with_settings,
)
from mcast.cli.status import ExitStatus
from mcast.cli.terminal import Failure, UsageError, group, json_output, plural, say
from mcast.cli.values import bit_rate, message_size, microseconds, number_option, rate
from mcast.cli.values import seconds as check_seconds
from mcast.errors import install
from mcast.errors.tree import MessageTooLarge
from mcast.wire.addresses import McastAddress

if TYPE_CHECKING:
    from mcast.api import Backend
    from mcast.bench.intervals import IntervalResult, Intervals
    from mcast.bench.measure import BenchResult
    from mcast.endpoint.settings import Settings

_MAX_SIZE = 1 << 16


PROGRESS_EVERY = 10.0
"""Seconds between lines on stderr that say how a long measurement goes, without --interval."""

_DEPTH = 4096
"""The receive queue of one end, in messages, because nothing holds the sender back."""


@with_settings()
def bench(
    backend: BackendName = None,
    size: Annotated[
        int,
        typer.Option(
            parser=message_size(0, _MAX_SIZE),
            metavar="BYTES",
            help="Bytes in a message, such as 1K.",
        ),
    ] = 64,
    receivers: Annotated[
        int | None,
        number_option(
            min=1, max=256, help="Number of receivers; under MPI, all ranks except one. [default: 1]"
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            parser=check_seconds(0.01, 3600),
            metavar="SECONDS",
            help="Time to send in batches, and again one by one.",
        ),
    ] = 1.0,
    address: Annotated[
        McastAddress, typer.Option("--group", parser=group, metavar="ADDRESS", help="The group to use.")
    ] = "239.1.1.1",  # type: ignore[assignment]  # text, read by the parser
    as_server: Annotated[
        bool, typer.Option("--server", help="Receive from a --client elsewhere, and count.")
    ] = False,
    as_client: Annotated[
        bool, typer.Option("--client", help="Send to --receivers servers elsewhere.")
    ] = False,
    limit: Annotated[
        float | None,
        typer.Option(
            "--rate",
            parser=bit_rate,
            metavar="BITS",
            help="Maximum rate at which --client sends, in bits per second.",
        ),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(
            "--interval",
            "-i",
            parser=check_seconds(0.001, 3600),
            metavar="SECONDS",
            help="Print a line for each interval.",
        ),
    ] = None,
    receive_depth: Annotated[
        int | None,
        number_option(min=1, help="Messages that the receive queue of --server holds.  [default: 4096]"),
    ] = None,
    bind: Bind = None,
    device: Device = None,
    *,
    settings: Settings,
    min_rate: Annotated[
        float | None,
        typer.Option(parser=rate, metavar="RATE", help="Fail below this many messages per second, as 2M."),
    ] = None,
    max_p99: Annotated[
        float | None,
        typer.Option(
            parser=microseconds(0, 1e9),
            metavar="US",
            help="Fail if the 99th percentile is above this, as 50us.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure message rate, loss and latency.

    Messages are sent in batches for the rate, then one by one for the latency. The exit status is 1 if
    --min-rate or --max-p99 is missed. Between hosts, start `mcast bench --server` on those that receive and
    `mcast bench --client --receivers N` on one: it sends for --seconds, at --rate or as fast as it can, and a
    server counts what is lost. Or start one rank on each host with mpirun or srun; rank 0 sends, no faster
    than all receive (pip install 'rdma-mcast[mpi]').
    """
    from mcast.bench.intervals import Intervals
    from mcast.bench.mpi import started_by_mpi

    reported: list[IntervalResult] = []

    def report(part: IntervalResult) -> None:
        reported.append(part)
        if not as_json:
            say(line_of(part))

    def show_progress(part: IntervalResult) -> None:
        say(line_of(part), err=True)

    intervals = Intervals(PROGRESS_EVERY, show_progress) if interval is None else Intervals(interval, report)
    if as_server or as_client:
        if as_server and as_client:
            raise UsageError("--server and --client exclude each other: start one on each host")
        if max_p99 is not None or (as_server and (limit, receivers) != (None, None)):
            raise UsageError(
                "--max-p99 is for one command alone, --rate and --receivers are for --client: leave them out"
            )
        if as_client and receive_depth is not None:
            raise UsageError(
                "--receive-depth is for --server, because a client receives little: leave it out"
            )
        deep = replace(settings, receive_depth=receive_depth or _DEPTH)
        where = EndOptions(choose_backend(backend), bind, device, address, deep, intervals)
        total, about = serve(where) if as_server else send(where, size, seconds, receivers or 1, limit)
        show(total, about, reported, as_json)
        if missed := _too_slow(total.messages_per_s, min_rate):
            raise Failure(missed[0])
        return
    if (limit, bind, device, receive_depth) != (None, None, None, None):
        raise UsageError(
            "--rate, --receive-depth, --bind and --device are for --client and --server: leave them out, or "
            "add one of the two"
        )
    if started_by_mpi():
        if receivers is not None:
            raise UsageError("under MPI every rank but the first is a receiver: leave out --receivers")
        if interval is not None:
            raise UsageError("under MPI losses are counted at the end alone: leave out --interval")
        refuse_in_process(backend, "receive")
        found = _over_ranks(choose_backend(backend), address, size, seconds, settings)
    else:
        name = choose_backend(backend)
        options = {"ports": (receivers or 1) + 1} if is_in_process(name) else {}
        with open_backend(name, **options) as opened:
            found = _run(opened, address, size, receivers or 1, seconds, settings, intervals)
    if found is None:
        return
    _show(found, as_json, reported)
    _judge(found, min_rate, max_p99)


def _run(
    backend: Backend,
    address: McastAddress,
    size: int,
    receivers: int,
    seconds: float,
    settings: Settings,
    intervals: Intervals,
) -> BenchResult:
    from mcast.bench.measure import measure

    require(settings, local_ports_of(backend))
    try:
        return measure(backend, address, size, receivers, seconds, settings, intervals)
    except MessageTooLarge as error:
        raise UsageError(
            f"--size is {size}: one MTU carries {error.limit} bytes, and a message is one MTU"
        ) from None
    except (TimeoutError, ValueError) as error:
        raise Failure(str(error)) from None


def _over_ranks(
    backend: str, address: McastAddress, size: int, seconds: float, settings: Settings
) -> BenchResult | None:
    from mcast.bench.mpi import measure, world

    try:
        comm = world()
    except ImportError:
        raise UsageError(f"started under MPI, but there is no mpi4py: {install.line('mpi')}") from None
    try:
        with open_backend(backend) as opened:
            require(settings, local_ports_of(opened))
            return measure(comm, opened, address, size, seconds, settings)
    except Exception as error:  # end the other ranks as well, which wait for this one
        json_output.error(str(error), ExitStatus.FAILED)
        say(f"mcast bench: {error}", err=True)
        comm.Abort(1)
        raise


def _show(found: BenchResult, as_json: bool, intervals: list[IntervalResult]) -> None:
    if as_json:
        json_output.result(found.as_dict() | {"intervals": intervals})
        return
    where = "in one process" if found.processes == 1 else f"in {found.processes} processes"
    size, ends = found.size, found.receivers
    say(f"{found.backend}: {size} {plural('byte', size)} to {ends} {plural('receiver', ends)}, {where}\n")
    shown_rate = f"{found.messages_per_s:,.0f} messages/s, {found.deliveries_per_s:,.0f} deliveries/s"
    say(f"rate     {shown_rate}, in batches, {found.seconds:.2f} s")
    say(f"         {found.gbits_per_s:,.3g} Gbit/s of payload")
    say(f"lost     {found.lost:,} of {found.messages * found.receivers:,}")
    if found.strangers:
        say(f"others   {found.strangers:,} messages from other senders in the group, not counted above")
    latency = found.latency_us
    if latency is None:
        say("latency  unknown: of the messages sent one by one none arrived")
    else:
        shown = "  ".join(f"{name} {value:,.1f}" for name, value in latency._asdict().items())
        say(f"latency  {shown}  us, one by one")


def _judge(found: BenchResult, min_rate: float | None, max_p99: float | None) -> None:
    """Raise Failure for each limit that is missed."""
    missed = _too_slow(found.messages_per_s, min_rate)
    if max_p99 is not None and (found.latency_us is None or found.latency_us.p99 > max_p99):
        p99 = "no latency" if found.latency_us is None else f"p99 {found.latency_us.p99:,.1f} us"
        missed.append(f"{p99}, --max-p99 is {max_p99:,.1f}")
    if missed:
        raise Failure("; ".join(missed))


def _too_slow(rate: float, least: float | None) -> list[str]:
    if least is None or rate >= least:
        return []
    return [f"{rate:,.0f} messages/s, --min-rate is {least:,.0f}"]
