"""`mcast recv`: what the next `mcast send` sends to a group, verified."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from mcast.cli.signals import interruptible
from mcast.cli.terminal import STANDARD, Failure, UsageError, console, json_output
from mcast.cli.values import WAITING, KeyFile
from mcast.wire.addresses import McastAddress

if TYPE_CHECKING:
    from mcast.cast import Missed, Offered, Received
    from mcast.cast.io.bundle import Folder, OneFile
    from mcast.cast.io.files import Sink
    from mcast.cli.outputs import RecvOutput
    from mcast.endpoint.blocking import Endpoint, Membership
    from mcast.endpoint.settings import Settings

_NAMED = 3
"""Maximum number of missed files that are named; JSON has all."""


@with_settings(OBJECTS_DEPTH)
def recv(
    group: GroupArgument,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Output: a file, - for stdout, or a folder, such as in/."
        ),
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files that the folder has already.")
    ] = False,
    key: KeyFile = None,
    bind: Bind = None,
    device: Device = None,
    backend: BackendName = None,
    wait: Annotated[
        float | None,
        typer.Option(
            parser=WAITING, metavar="SECONDS", help="Give up if no transfer begins within this time."
        ),
    ] = None,
    peer_timeout: Annotated[
        float,
        typer.Option(parser=WAITING, metavar="SECONDS", help="Give up when the sender is silent this long."),
    ] = 10.0,
    *,
    settings: Settings,
    as_json: Json = False,
) -> None:
    """Receive what the next `mcast send` sends to GROUP.

    FILE gets its name when it is complete, verified and on the disk; it then replaces an older file, unless
    that is read-only. An interrupted transfer leaves .FILE.part: the next recv verifies it, and requests the
    rest. Stdout, a pipe or a device gets the bytes as they arrive. In a folder each file has the name that
    the sender gives; an existing file is accepted if it is equal, and replaced only with --overwrite. Files
    and folders get the times of the sender's. The exit status is 0 if everything arrived and was verified,
    otherwise 1.
    """
    from mcast.cast import receive
    from mcast.cast.io.driver import IO_TIMEOUT

    apart = json_output.on_stderr = output == STANDARD
    refuse_in_process(backend, "send")
    with ExitStack() as stack:
        stack.enter_context(interruptible())
        target = _target(stack, output, overwrite)
        endpoint = stack.enter_context(endpoint_at(backend, bind, device, settings))
        member = endpoint.join(group, timeout=IO_TIMEOUT)
        where = f"{group} as {endpoint.address} ({endpoint.device.name})"
        _name_first(stack, _nobody_sends(endpoint, group))
        watch = stack.enter_context(ReceiveWatch(f"listening to {where}"))
        came = TransferResult(target)
        objects = receive(
            member,
            came.offered,
            timeout=wait,
            missed=came.missed,
            max_size=0,
            peer_timeout=peer_timeout,
            key=key,
            one_session=True,
            progress=watch.on_progress,
        )
        with closing(objects):
            for received in objects:
                watch.before += received.size
                came.whole.append(received)
                if came.ended:
                    break
        if came.sender is None:
            why = _why_none(endpoint, group, came.late)
            raise Failure(f"no transfer began on {where} within {wait:g} s{why}")
        hint = network_hint(endpoint, (one.reason for one in came.lacks), member.max_message_size)
        outcome = outcome_of(member, group, output, came, came.sender, watch)
    if as_json:
        json_output.result(outcome)
    elif outcome["verified"] and (not apart or console(stderr=True).is_terminal):
        _show(outcome, apart)
    if not outcome["verified"]:
        raise Failure(f"{outcome['failure']}{hint}")


def _nobody_sends(endpoint: Endpoint, group: McastAddress) -> str:
    """Return the lines of the commonest cause, which no endpoint can know."""
    from mcast.api import Cause

    ping = f"`mcast ping {group} --backend {endpoint.backend.name}`"
    return Cause(
        f"nobody sends to {group} yet", f"{ping} at the sender: mcast recv answers", "start `mcast send`"
    ).shown("likely")


def _name_first(stack: ExitStack, cause: str) -> None:
    """Have the endpoint log this cause before its own ones, until the stack is closed."""

    def add(record: logging.LogRecord) -> bool:
        match record.args:
            case (name, why, str(likely)) if likely.count("\n  likely: ") > 1:
                record.args = (name, why, f"\n{cause}{likely}")
        return True

    logger = logging.getLogger("mcast")
    logger.addFilter(add)
    stack.callback(logger.removeFilter, add)


def _why_none(endpoint: Endpoint, group: McastAddress, late: bool) -> str:
    """Return why no transfer has begun, as the end of a sentence and lines of causes.

    The causes are left out if the endpoint has logged them while it waited.
    """
    if late:
        return "; one that began earlier is under way, which cannot be joined: wait for its end"
    if endpoint.stats().received:
        return (
            ", but messages arrived: their sender only pings, waits for more receivers, has another key, or "
            "is not heard any more"
        )
    if endpoint._core.resources.isolation_logged:
        return ""
    causes = [cause.shown("likely") for cause in endpoint.backend.suspicions()]
    if len(causes) > 1:  # one alone is no guess: nobody can be heard without a link
        causes.insert(0, _nobody_sends(endpoint, group))
    return "".join(f"\n{cause}" for cause in causes)


def _target(stack: ExitStack, output: str, overwrite: bool) -> Folder | OneFile:
    """Where the files go; the stack closes it, whenever a signal comes."""
    from mcast.cast.io.bundle import Folder, OneFile

    if not output:  # of a shell's variable that is not set; as a path it would be the folder here
        raise UsageError(f"cannot write '': {os.strerror(errno.ENOENT)}")
    try:
        if output.endswith("/") or (output != STANDARD and Path(output).is_dir()):
            return stack.enter_context(closing(Folder(Path(output), overwrite)))
        target = stack.enter_context(closing(OneFile(output)))
        target.open()  # not before: what is made there is the stack's by then
        return target
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from None


class ReceiveWatch(Watch):
    """Shows where the command listens, then how much has come."""

    def __init__(self, waiting: str) -> None:
        super().__init__(waiting)
        self.before = 0
        """Bytes of the objects before this one."""

    def on_progress(self, offered: Offered, done: int) -> None:
        """Show how far an object is."""
        from mcast.cast.io.bundle import Label

        label = Label.decode(offered.metadata)
        self.show("receiving", self.before + done, offered.size if label is None else label.size)


class TransferResult:
    """Result of one transfer: received and missed objects."""

    def __init__(self, target: Folder | OneFile) -> None:
        self._target = target
        self.whole: list[Received] = []
        self.lacks: list[Missed] = []
        self.late: bool = False
        """True if this receiver came too late for a transfer that was under way."""
        self.sender: Offered | None = None
        """Announcement of the sender's first object; None before a sender is heard."""
        self.files: int | None = None
        """Number of objects that the sender announced; None if only the end will tell."""

    @property
    def ended(self) -> bool:
        """True if nothing more is to come."""
        return len(self.whole) + len(self.lacks) >= (self.files or 1)

    def offered(self, offered: Offered) -> Sink | None:
        """Where an object goes."""
        from mcast.cast.io.bundle import Label

        if self.sender is None:
            label = Label.decode(offered.metadata)
            self.sender, self.files = offered, label and label.files
        return self._target(offered)

    def missed(self, missed: Missed) -> None:
        """An object has not come whole. One that was too late waits for the next transfer."""
        if missed.late and not self.whole:
            self.late, self.sender = True, None
        else:
            self.lacks.append(missed)

    @property
    def failure(self) -> str:
        """Why not all is there; empty if all is."""
        if self.lacks:
            named = dict(map(self._named, self.lacks[:_NAMED]))
            more = f"; and {len(self.lacks) - _NAMED} more" if len(self.lacks) > _NAMED else ""
            return "; ".join(f"{name}: {why}" for name, why in named.items()) + more
        if self.sender is not None and not self.ended:
            return f"{self.sender.address} ended after {len(self.whole)} of {self.files} files and folders"
        return ""

    def _named(self, missed: Missed) -> tuple[str, str]:
        from mcast.cast.io.bundle import ONE_FILE_ONLY, SAME_NAME

        hints = {
            ONE_FILE_ONLY: "name a folder, such as -o in/",
            SAME_NAME: "rename one of them at the sender",
            os.strerror(errno.EACCES): "the file or its folder is read-only here",
            os.strerror(errno.EEXIST): "--overwrite replaces it",
        }
        words = [missed.reason, hints.get(missed.reason)]
        if missed.part_file is not None:
            words.append(
                f"the part that arrived stays in {missed.part_file.name}, "
                "and the next recv goes on from there"
            )
        return self.name_of(missed.offered), ": ".join(filter(None, words))

    def name_of(self, offered: Offered) -> str:
        """Return the name that the user knows an object by."""
        from mcast.cast.io.bundle import Label

        label = Label.decode(offered.metadata)
        return self._target.name or (label.name if label is not None else offered.name)


def outcome_of(
    member: Membership,
    group: McastAddress,
    output: str,
    came: TransferResult,
    sender: Offered,
    watch: ReceiveWatch,
) -> RecvOutput:
    """Return the result for JSON."""
    from mcast.cast.io.bundle import Label
    from mcast.cli.send import kind_of

    endpoint, size = member.endpoint, sum(one.size for one in came.whole)
    return {
        "backend": endpoint.backend.name,
        "output": "stdout" if output == STANDARD else output,
        "verified": bool(came.whole) and not came.failure,
        "failure": came.failure,
        "group": str(group),
        "device": endpoint.device.name,
        "port": endpoint.port.port_num,
        "receiver": str(endpoint.address),
        "sender": sender.sender,
        "sender_address": sender.address,
        "size": size,
        "seconds": watch.seconds,
        "bytes_per_second": size / watch.seconds if watch.seconds > 0 else 0.0,
        "files": [
            {
                "name": came.name_of(one.offered),
                "kind": kind_of(Label.decode(one.offered.metadata)),
                "size": one.size,
                "blake3": one.digest.hex(),
            }
            for one in came.whole
        ],
        "missed": {came.name_of(one.offered): one.reason for one in came.lacks},
        "rejected": came.whole[-1].refused if came.whole else {},
    }


def _show(outcome: RecvOutput, apart: bool) -> None:
    from rich.filesize import decimal

    files = outcome["files"]
    what = f"{outcome['size']:,} bytes"
    what += (
        f", BLAKE3 {files[0]['blake3'][:16]}..."
        if len(files) == 1
        else f", {len(files):,} files and folders,"
    )
    into = outcome["output"]
    if into.endswith("/"):  # a folder: the first name says what came
        into += files[0]["name"] + (", ..." if len(files) > 1 else "")
    console(stderr=apart).print(
        f"{into}: {what} verified\n"
        f"{outcome['sender_address']} ({outcome['sender']}) -> {outcome['group']} -> {outcome['receiver']} "
        f"({outcome['device']})\n{outcome['backend']}, {decimal(int(outcome['bytes_per_second']))}/s",
        markup=False,
    )
