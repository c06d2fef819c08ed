"""`mcast send`: files and folders to every receiver in a group, verified by each."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mcast.cli.options import (
    OBJECTS_DEPTH,
    BackendName,
    Bind,
    Device,
    GroupArgument,
    Json,
    endpoint_at,
    network_hint,
    refuse_in_process,
    with_settings,
)
from mcast.cli.progress import Watch
from mcast.cli.signals import interruptible, on_signal
from mcast.cli.status import by_signal
from mcast.cli.terminal import Failure, UsageError, console, json_output, plural, print_table, say
from mcast.cli.values import MAX_RECEIVERS, WAITING, KeyFile, StrategyOption, bit_rate, number_option
from mcast.wire.addresses import McastAddress

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mcast.cast import ObjectReport, ObjectSession, Progress, ReceiverReport
    from mcast.cast.io.bundle import Bundle, Item, Label
    from mcast.cast.protocol.strategy import Strategy
    from mcast.cli.outputs import SendOutput, SendReceiver
    from mcast.endpoint.blocking import Membership
    from mcast.endpoint.settings import Settings

_LINGER = 1.0
"""Seconds after the first receiver in which others may join, where no number is given."""

_HINT = "start `mcast recv` at the others, give a longer --wait, or run `mcast doctor` there"
_KEY_HINT = "; without the same --key-file there, `mcast recv` prints that it rejected a message"

_NAMED = 3
"""Maximum number of files missed by a receiver that are named; JSON has all."""


@with_settings(OBJECTS_DEPTH)
def send(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Files and folders to send; - is stdin.")
    ],
    group: GroupArgument,
    receivers: Annotated[
        int | None,
        number_option("--receivers", "-n", min=1, max=MAX_RECEIVERS, help="Number of receivers to wait for."),
    ] = None,
    strategy: StrategyOption = "all",
    rate: Annotated[
        float | None,
        typer.Option(
            parser=bit_rate,
            metavar="BITS",
            help="Maximum bits per second, such as 2G; repairs and headers of mcast count, those of RoCE, "
            "UDP, IP and Ethernet do not.",
        ),
    ] = None,
    key: KeyFile = None,
    bind: Bind = None,
    device: Device = None,
    backend: BackendName = None,
    wait: Annotated[
        float, typer.Option(parser=WAITING, metavar="SECONDS", help="Time to wait for receivers.")
    ] = 60.0,
    peer_timeout: Annotated[
        float,
        typer.Option(parser=WAITING, metavar="SECONDS", help="Give up a receiver that is silent this long."),
    ] = 10.0,
    *,
    settings: Settings,
    as_json: Json = False,
) -> None:
    """Send files and folders to every `mcast recv` in GROUP.

    Waits for --receivers N receivers, or for all that join within a second after the first, and repairs
    losses. The exit status is 0 if the strategy was met, for `all` if every receiver has verified its copy;
    otherwise it is 1, and the report names each receiver and what it lacks. With `carousel`, which needs
    --rate, the files are sent in cycles until Ctrl-C or the given limit, for receivers that join at any time
    and send nothing; the command then waits for receivers only if --receivers is given.
    """
    from mcast.cast import open_session
    from mcast.cast.io.driver import IO_TIMEOUT
    from mcast.cast.protocol.members import MemberStatus

    refuse_in_process(backend, "receive")
    with ExitStack() as stack:
        stack.enter_context(interruptible())
        bundle = _bundle(files)
        if strategy.carousel and rate is None:
            raise UsageError("a carousel needs --rate: without answers nothing else limits its rate")
        for path, why in bundle.skipped.items():
            say(f"mcast: {path} is not sent: {why}", err=True)
        endpoint = stack.enter_context(endpoint_at(backend, bind, device, settings))
        member = endpoint.join(group, timeout=IO_TIMEOUT)
        watch = stack.enter_context(SendWatch(receivers, bundle.size))
        most = inf if rate is None else rate / 8
        with open_session(
            member, rate=most, peer_timeout=peer_timeout, key=key, progress=watch.on_progress
        ) as session:
            if receivers is not None or not strategy.carousel:
                _wait_for_receivers(session, receivers, wait, keyed=key is not None)
            if strategy.carousel:  # its receivers send nothing: that no message arrives is no trouble
                endpoint._core.resources.isolation_logged = True
            with on_signal(session.stop) if strategy.carousel else nullcontext(list[int]()) as signals:
                sent = _sent_around if strategy.carousel else _sent
                reports = [*sent(session, bundle, strategy, watch)]
            seconds = watch.seconds
        outcome = outcome_of(member, group, bundle, strategy, reports, seconds)
        outcomes = [one["outcome"] for one in outcome["receivers"]]
        hint = network_hint(endpoint, outcomes, member.max_message_size)
    if as_json:
        json_output.result(outcome)
    else:
        _show(outcome, strategy.carousel)
    if hint:
        silent = MemberStatus.SILENT.value in outcomes
        why = f"was silent for {peer_timeout:g} s" if silent else "got no further"
        say(f"mcast: a receiver {why}{hint}", err=True)
    if signals:
        raise Failure("interrupted", by_signal(signals[0]))
    if not outcome["strategy_met"]:
        raise Failure(_unmet(strategy, outcome["receivers"]))


class SendWatch(Watch):
    """Shows how many have joined, then how much every receiver has."""

    def __init__(self, wanted: int | None, size: int | None) -> None:
        super().__init__("waiting for receivers")
        self._wanted, self._size = f" of {wanted}" if wanted else "", size
        self.before = 0
        """Bytes of the objects before this one."""

    def on_progress(self, progress: Progress) -> None:
        """Show how far the sender is."""
        if progress.name is not None:
            self.show("sending", self.before + progress.done, self._size)
        else:
            self.wait(f"waiting: {progress.receivers}{self._wanted} joined")


def _bundle(files: list[str]) -> Bundle:
    from mcast.cast.io.bundle import bundle_of

    try:
        return bundle_of(files)
    except OSError as error:
        named = "-" if error.filename is None else error.filename or "''"
        raise UsageError(f"cannot read {named}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _wait_for_receivers(session: ObjectSession, receivers: int | None, wait: float, keyed: bool) -> None:
    from mcast.api import TimedOut

    try:
        session.wait_for_receivers(receivers or 1, wait)
    except TimedOut as error:
        here = [f"{address} ({', '.join(names)})" for address, names in session.addresses.items()]
        few = f"{session.receivers} of {receivers or 1} receivers joined within {wait:g} s"
        found = ": ".join(filter(None, [few, ", ".join(here)]))
        raise Failure(f"{found}; {_HINT}{_KEY_HINT if keyed else ''}") from error
    if receivers is None:
        session.wait_for_receivers(timeout=_LINGER)


def _sent(session: ObjectSession, bundle: Bundle, strategy: Any, watch: SendWatch) -> Iterator[ObjectReport]:
    from mcast.api import McastError
    from mcast.cast.io.bundle import Content
    from mcast.cast.io.files import Source

    for path, label in bundle.items:
        try:
            data = b"" if label.kind is Content.FOLDER else Source(path)
            name = label.name.rpartition("/")[2]
            report = session.send(data, name=name, metadata=label.encode(), strategy=strategy)
        except McastError:
            raise
        except (OSError, ValueError) as error:
            raise Failure(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        watch.before += report.offered
        yield report


def _sent_around(
    session: ObjectSession, bundle: Bundle, strategy: Any, _: SendWatch
) -> Iterable[ObjectReport]:
    from mcast.api import McastError
    from mcast.cast import Object
    from mcast.cast.io.bundle import Content
    from mcast.cast.io.files import STANDARD, Source

    def data_of(item: Item) -> bytes | Path | Source:
        if item.label.kind is Content.FOLDER:
            return b""
        return Source(STANDARD) if item.path == STANDARD else Path(item.path)

    try:
        return session.send_carousel(
            [
                Object(data_of(item), item.label.name.rpartition("/")[2], item.label.encode())
                for item in bundle.items
            ],
            strategy,
        )
    except McastError:
        raise
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise Failure(": ".join(filter(None, [getattr(error, "filename", None), words]))) from error


def outcome_of(
    member: Membership,
    group: McastAddress,
    bundle: Bundle,
    strategy: Strategy,
    reports: list[ObjectReport],
    seconds: float,
) -> SendOutput:
    """Return the result for JSON.

    The promise to all receivers is to each of them, of all files: also to one that joined after the first.
    """
    endpoint = member.endpoint
    sent, cycles = sum(report.offered for report in reports), min(report.cycles for report in reports)
    names = [item.label.name for item in bundle.items]
    receivers = _receivers_of(dict(zip(names, reports, strict=True)))
    return {
        "backend": endpoint.backend.name,
        "group": str(group),
        "device": endpoint.device.name,
        "port": endpoint.port.port_num,
        "sender": str(endpoint.address),
        "size": sent,
        "strategy_met": all(report.strategy_met for report in reports)
        and (cycles > 0 or any(one["verified"] for one in receivers))
        and (strategy != type(strategy)() or all(one["verified"] for one in receivers)),
        "cycles": cycles,
        "parity": all(report.parity for report in reports),
        "segments": sum(report.segments for report in reports),
        "sent_again": sum(report.repairs for report in reports),
        "skipped": sum(report.skipped for report in reports),
        "seconds": seconds,
        "bytes_per_second": sent * max(1, cycles) / seconds if seconds > 0 else 0.0,
        "files": [
            {
                "name": item.label.name,
                "kind": kind_of(item.label),
                "size": one.size,
                "offered": one.offered,
                "blake3": one.digest.hex() if one.digest else None,
                "strategy_met": one.strategy_met,
            }
            for item, one in zip(bundle.items, reports, strict=True)
        ],
        "left_out": bundle.skipped,
        "receivers": receivers,
        "rejected": reports[-1].refused if reports else {},
    }


def kind_of(label: Label | None) -> Literal["file", "folder"]:
    """Return the kind of an object, as JSON has it; without a label it is a file."""
    from mcast.cast.io.bundle import Content

    return "folder" if label is not None and label.kind is Content.FOLDER else "file"


def _receivers_of(reports: dict[str, ObjectReport]) -> list[SendReceiver]:
    """Return one row for each receiver, over all files."""
    found: dict[int, dict[str, ReceiverReport]] = {}
    for name, report in reports.items():
        for account in report.receivers:
            found.setdefault(account.number, {})[name] = account
    rows: list[SendReceiver] = []
    for accounts in found.values():
        last = [*accounts.values()][-1]
        missed = {name: one.reason for name, one in accounts.items() if not one.complete}
        missed |= {name: "joined later, or had left" for name in reports if name not in accounts}
        rows.append(
            {
                "name": last.name,
                "address": last.address,
                "verified": not missed,
                "outcome": "verified" if not missed else next(iter(missed.values())),
                "asked": sum(one.requested for one in accounts.values()),
                "missed": missed,
            }
        )
    return rows


def _show(outcome: SendOutput, carousel: bool) -> None:
    from rich.filesize import decimal
    from rich.markup import escape
    from rich.table import Table

    out, receivers, files = console(), outcome["receivers"], outcome["files"]
    cycles = outcome["cycles"]
    what = f"{files[0]['name']}: " if len(files) == 1 else f"{len(files):,} files and folders: "
    what += f"{outcome['size']:,} bytes"
    if len(files) == 1 and (digest := files[0]["blake3"]):
        what += f", BLAKE3 {digest[:16]}..."
    segments, again, skipped = outcome["segments"], outcome["sent_again"], outcome["skipped"]
    sent = f"{segments:,} {plural('segment', segments)}"
    if skipped:
        sent = f"{segments - skipped:,} of {sent} sent, {skipped:,} were there already"
    if carousel:
        sent += " in each cycle" if cycles else ""
    else:
        sent += f", {again:,} {plural('repair', again)}"
        sent += "" if outcome["parity"] or not again else " without parity"
    out.print(
        f"{what}\n{outcome['sender']} -> {outcome['group']} on {outcome['backend']}, "
        f"{sent}, {decimal(int(outcome['bytes_per_second']))}/s",
        markup=False,
    )
    if receivers:
        say()
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("receiver", overflow="fold")
        table.add_column("address", no_wrap=True)
        table.add_column("lost", justify="right")
        table.add_column("outcome", overflow="fold")
        for receiver in receivers:
            colour = "green" if receiver["verified"] else "red"
            table.add_row(
                escape(receiver["name"]),
                receiver["address"],
                f"{receiver['asked']:,}",
                f"[{colour}]{escape(_words(receiver, len(files)))}[/]",
            )
        print_table(out, table)
    if carousel:
        say(f"\nsend: {cycles:,} {plural('cycle', cycles)}, without answers from receivers")
        return
    verified = sum(receiver["verified"] for receiver in receivers)
    each = (
        f"{segments:,} {plural('segment', segments)} each"
        if len(files) == 1
        else f"{len(files):,} files and folders each"
    )
    say(f"\nsend: {verified}/{len(receivers)} receivers verified, {each}")


def _unmet(strategy: Strategy, receivers: list[SendReceiver]) -> str:
    """Return the sentence for a strategy whose promise was not kept."""
    if strategy.carousel:
        return "the carousel ended before its first cycle was complete"
    name = "best-effort" if strategy.effort else "all"
    if strategy.receivers is not None:
        name = f"quorum:{strategy.receivers}"
    elif strategy.seconds is not None:
        name = f"deadline:{strategy.seconds:g}"
    having = sum(receiver["verified"] for receiver in receivers)
    who = f"{having or 'none'} of {len(receivers)} {plural('receiver', len(receivers))}"
    return f"the strategy {name} was not met: {who} {'have' if having > 1 else 'has'} all"


def _words(receiver: SendReceiver, files: int) -> str:
    missed = receiver["missed"]
    if files == 1 or not missed:
        return receiver["outcome"]
    more = f" and {len(missed) - _NAMED} more" if len(missed) > _NAMED else ""
    return f"lacks {', '.join([*missed][:_NAMED])}{more}: {receiver['outcome']}"
