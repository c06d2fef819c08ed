"""`mcast listen`: the messages that come to groups, as text, as bytes, or as lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mcast.cli.listening import DEFAULT_DEPTH, Demo, Groups, MaxMessages, MaxSeconds, listening, opened
from mcast.cli.options import BackendName, Bind, Device, Json, with_settings
from mcast.cli.signals import interruptible
from mcast.cli.terminal import Failure, UsageError, say
from mcast.wire.addresses import Gid
from mcast.wire.mapping import ipv4_group_of

if TYPE_CHECKING:
    from mcast.api import Message
    from mcast.cli.outputs import ListenOutput
    from mcast.endpoint.blocking import Endpoint
    from mcast.endpoint.policy import MessagesMissing
    from mcast.endpoint.settings import Settings

_POLL_INTERVAL = 0.2
"""The longest wait in one call, in seconds."""
_BATCH = 64
_WIDTH = 16
"""Bytes in a line of --hex."""


@with_settings(DEFAULT_DEPTH)
def listen(
    groups: Groups,
    as_hex: Annotated[bool, typer.Option("--hex", help="Print the bytes of each message.")] = False,
    count: MaxMessages = None,
    seconds: MaxSeconds = None,
    bind: Bind = None,
    device: Device = None,
    backend: BackendName = None,
    demo: Demo = False,
    *,
    settings: Settings,
    as_json: Json = False,
) -> None:
    """Print the messages sent to groups.

    A message is a line of text, in which bytes that are not text are escaped; with --json it is a line of
    JSON, which has the bytes as hexadecimal digits, and as text if they are UTF-8. A message of a sender with
    sequence=True is shown with its number, such as #7, and without the header; the first one after a gap
    says which numbers are missing. Pings of `mcast ping` are answered and not shown, except most of those
    with -S. Listening ends after --count, --seconds or with Ctrl-C. The status is 1 if fewer messages than
    --count arrived.
    """
    if as_hex and as_json:
        raise UsageError("--hex and --json are two forms of the same: give one of them")
    from mcast.endpoint.numbering import HeaderReader

    form = _as_json if as_json else _as_hex if as_hex else _as_text
    came = 0
    with (
        interruptible(),
        opened(backend, demo, bind) as fabric,
        listening(fabric, groups, bind, device, settings, demo) as endpoint,
    ):
        readers = {member.mgid: HeaderReader(member.group) for member in endpoint.groups}
        try:
            for message in _messages(endpoint, count, seconds):
                came += 1
                reader = readers.get(message.group)
                shown, gaps = (message, iter(())) if reader is None else reader.read(message)
                say(*form(shown, list(gaps)))
        except KeyboardInterrupt:
            pass  # the usual way to end this command
    if count is not None and came < count:
        raise Failure(f"{came:,} of {count:,} messages arrived")


def _messages(endpoint: Endpoint, count: int | None, seconds: float | None) -> Iterator[Message]:
    """Up to `count` messages, until `seconds` have passed. A message is valid until the next is asked for."""
    clock = endpoint.backend.now
    end = None if seconds is None else clock() + seconds
    while count is None or count > 0:
        left = _POLL_INTERVAL if end is None else min(end - clock(), _POLL_INTERVAL)
        if left <= 0:
            return
        with endpoint.recv_batch(min(_BATCH, count or _BATCH), left) as batch:
            yield from batch
            count = None if count is None else count - len(batch)


def _address_of(gid: Gid) -> str:
    return str(gid.ipv4 or gid)


def _head(message: Message) -> str:
    number = "" if message.number is None else f"  #{message.number}"
    return f"{_address_of(message.source)} -> {ipv4_group_of(message.group) or message.group}{number}"


def _as_text(message: Message, gaps: Sequence[MessagesMissing] = ()) -> list[str]:
    text = bytes(message.payload).decode("utf-8", "backslashreplace")
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    return [*map(str, gaps), f"{_head(message)}  {shown}"]


def _as_hex(message: Message, gaps: Sequence[MessagesMissing] = ()) -> list[str]:
    data = bytes(message.payload)
    lines = [*map(str, gaps), f"{_head(message)}  {len(data):,} bytes"]
    for start in range(0, len(data), _WIDTH):
        part = data[start : start + _WIDTH]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"  {start:04x}  {part.hex(' '):{3 * _WIDTH}} {shown}")
    return lines


def _as_json(message: Message, gaps: Sequence[MessagesMissing] = ()) -> list[str]:
    data = bytes(message.payload)
    try:
        text: str | None = data.decode()
    except UnicodeDecodeError:
        text = None
    fields: ListenOutput = {
        "time": time.time(),
        "source": _address_of(message.source),
        "qp": message.src_qp,
        "group": str(ipv4_group_of(message.group) or message.group),
        "bytes": len(data),
        "text": text,
        "hex": data.hex(),
        "number": message.number,
        "missing": [(gap.first, gap.last) for gap in gaps],
    }
    return [json.dumps(fields)]
