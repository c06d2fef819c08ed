"""`mcast record`: messages to groups, as packets in a pcapng file."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from mcast.cli.listening import DEFAULT_DEPTH, Demo, Groups, MaxMessages, MaxSeconds, listening, opened
from mcast.cli.options import BackendName, Bind, Device, Json, with_settings
from mcast.cli.signals import interruptible
from mcast.cli.terminal import STANDARD, Failure, UsageError, console, json_output, packet_sink
from mcast.wire.addresses import McastAddress

if TYPE_CHECKING:
    from mcast.capture.recorder import Recorder
    from mcast.cli.outputs import RecordOutput
    from mcast.endpoint.blocking import Endpoint
    from mcast.endpoint.settings import Settings


@with_settings(DEFAULT_DEPTH)
def record(
    groups: Groups,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Output file; - is stdout.")],
    count: MaxMessages = None,
    seconds: MaxSeconds = None,
    bind: Bind = None,
    device: Device = None,
    backend: BackendName = None,
    demo: Demo = False,
    *,
    settings: Settings,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Use the card's time stamps instead of the host's.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Record messages to groups in a pcapng file.

    Wireshark and `mcast replay` read the file. Recording ends after --count, --seconds or with Ctrl-C. The
    status is 1 if fewer messages than --count arrived.
    """
    from mcast.capture.recorder import make_recorder

    apart = json_output.on_stderr = output == STANDARD
    settings = replace(settings, timestamps=timestamps)
    with (
        interruptible(),
        opened(backend, demo, bind) as fabric,
        listening(fabric, groups, bind, device, settings, demo) as endpoint,
        packet_sink(output) as file,
    ):
        try:
            recorder, started = make_recorder(endpoint, file), time.monotonic()
        except ValueError as error:
            raise UsageError(f"{error}: leave out --timestamps") from None
        try:
            _record(endpoint, recorder, count, seconds, file)
        except KeyboardInterrupt:
            pass  # the usual way to end a recording
        outcome = _outcome(endpoint, recorder, groups, output, time.monotonic() - started)
    if as_json:
        json_output.result(outcome)
    else:
        _show(outcome, apart)
    if count is not None and outcome["messages"] < count:
        raise Failure(f"{outcome['messages']:,} of {count:,} messages arrived in {outcome['seconds']:.3g} s")


def _record(
    endpoint: Endpoint, recorder: Recorder, count: int | None, duration: float | None, file: BinaryIO
) -> None:
    from rich.progress import Progress, SpinnerColumn, TextColumn

    from mcast.capture.recorder import record
    from mcast.cli.progress import PlainLines

    err = console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=err, transient=True, disable=not err.is_interactive) as line:
        task, lines = line.add_task("listening"), PlainLines(disable=err.is_interactive)
        for _ in record(endpoint, recorder, file, count, duration):
            so_far = f"{recorder.messages:,} messages, {recorder.bytes:,} bytes"
            line.update(task, description=so_far)
            lines.show(f"recorded so far: {so_far}")


def _outcome(
    endpoint: Endpoint, recorder: Recorder, groups: list[McastAddress], output: str, seconds: float
) -> RecordOutput:
    stats = endpoint.stats()
    return {
        "backend": endpoint.backend.name,
        "file": output,
        "groups": [str(one.address) for one in groups],
        "device": endpoint.device.name,
        "port": endpoint.port.port_num,
        "messages": recorder.messages,
        "bytes": recorder.bytes,
        "sources": recorder.sources,
        "seconds": seconds,
        "dropped": {why: lost for why, lost in stats.dropped.items() if lost},
        "receive_empty": stats.receive_empty,
    }


def _show(outcome: RecordOutput, apart: bool) -> None:
    lines = [
        f"record: {outcome['messages']:,} messages, {outcome['bytes']:,} bytes, sources: "
        f"{outcome['sources']}, in {outcome['seconds']:.3g} s -> {outcome['file']}",
        *(f"not recorded: {count:,} {why}" for why, count in outcome["dropped"].items()),
    ]
    if outcome["receive_empty"]:
        lines.append(
            f"the receive queue was full {outcome['receive_empty']:,} times, so messages may be missing from "
            "the file: raise --receive-depth"
        )
    console(stderr=apart).print(*lines, sep="\n", markup=False)
