"""Parsers of sizes, rates, times, factors and strategies, with the errors for what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mcast.cast.protocol.strategy import Strategy

MAX_SECONDS = 604_800.0
"""The longest time that an option takes, in seconds: a week, which each timer of the system can wait for."""

MAX_SIZE = 1 << 30
"""The largest made-up file in bytes, because it takes room on the disk."""

MAX_SEED = (1 << 64) - 1

MAX_RECEIVERS = 8192
"""The most receivers of a session of `mcast.cast`, whose own constant would load the protocol."""

MAX_PORTS = 65_000
"""The most ports of a simulated fabric, whose own constant would load the scenarios."""

SIZES = {"": 1, "B": 1} | {
    f"{letter}{ending}": 1000**power if ending == "B" else 1024**power
    for power, letter in enumerate("KMG", 1)
    for ending in ("", "I", "IB", "B")
}
"""Unit of a size -> bytes. As dd(1) has it, 4M is 4MiB, and 4MB is 4,000,000 bytes."""

RATES = {
    f"{letter}{ending}": 1024**power if ending else 1000**power
    for power, letter in enumerate(("", "K", "M", "G"))
    for ending in ("", "I")[: 1 + power]
}
"""Unit of a rate -> what it multiplies: as on links, 10G is 10 000 000 000 a second; 10Gi is more."""

_TIMES = {"": 1, "X": 1}
_PER_SECOND = "(?:/s)?"
_BITS_PER_SECOND = "(?:bit(?:/s)?|bps|/s)?"

_MIB = 1 << 20


def size(text: str) -> int:
    """A number of bytes up to MAX_SIZE: 4194304, 4096K, 4M, 4MiB, 4MB or 1G."""
    wanted = _bytes(text)
    if wanted > MAX_SIZE:
        raise typer.BadParameter(
            f"{text} is too large: the generated file has at most 1G; name a FILE to send more"
        )
    return wanted


def message_size(least: int, most: int) -> Callable[[str | int], int]:
    """The reader of a number of bytes in one message, such as 1024 or 1K."""

    def read(text: str | int) -> int:
        wanted = _bytes(str(text))
        return int(_within(text, wanted, least, most, " bytes"))

    return read


def memory(least: int, most: int) -> Callable[[str | int], int]:
    """The reader of a number of MiB, or of a size with a unit, such as 2G, that is so many whole MiB."""

    def read(text: str | int) -> int:
        from mcast.arguments.amounts import parse_int

        wanted = parse_int(str(text))
        if wanted is None:
            wanted, rest = divmod(_bytes(str(text)), _MIB)
            if rest:
                raise typer.BadParameter(
                    f"{_short(str(text))} is not a whole number of MiB: give, for example, 512, 512M or 2G"
                )
        return int(_within(text, wanted, least, most, " MiB"))

    return read


def seconds(least: float, most: float) -> Callable[[str | float], float]:
    """The reader of a time: a number of seconds, or one with us, ms, s, min or h."""

    def read(text: str | float) -> float:
        from mcast.arguments.seconds import parse_seconds

        wanted = text if isinstance(text, float) else parse_seconds(str(text), unit=False)  # a default
        if wanted is None:
            raise typer.BadParameter(
                f"{_short(str(text))!r} is not a time: give seconds, or a number with a unit: us, ms, s, min "
                "or h"
            )
        return _within(text, wanted, least, most, " s")

    return read


def microseconds(least: float, most: float) -> Callable[[str | float], float]:
    """The reader of a time in microseconds: their number, or a time with us, ms, s, min or h."""

    def read(text: str | float) -> float:
        from mcast.arguments.amounts import parse_number
        from mcast.arguments.seconds import parse_seconds

        wanted, timed = parse_number(str(text)), parse_seconds(str(text))
        if timed is not None:
            wanted = round(timed * 1e6, 3)
        if wanted is None:
            raise typer.BadParameter(
                f"{_short(str(text))!r} is not a time: give microseconds, or a number with a unit: us, ms, "
                "s, min or h"
            )
        return _within(text, wanted, least, most, " us")

    return read


def factor(least: float, most: float) -> Callable[[str | float], float]:
    """The reader of how many times as much: 10, 0.5 or 10x."""

    def read(text: str | float) -> float:
        from mcast.arguments.amounts import parse_quantity

        wanted = parse_quantity(str(text), _TIMES)
        if wanted is None:
            raise typer.BadParameter(
                f"{_short(str(text))!r} is not a factor: give a number, such as 10, 0.5 or 10x"
            )
        return _within(text, wanted, least, most)

    return read


WAITING = seconds(0.1, MAX_SECONDS)
"""Parser of the time to wait for an end of a transfer."""


def _within(text: str | float, wanted: float, least: float, most: float, unit: str = "") -> float:
    if not least <= wanted <= most:
        bounds = f"{_plainly(least)} to {_plainly(most)}{unit}"
        raise typer.BadParameter(f"{_short(str(text))} is out of range: give {bounds}")
    return wanted


def _plainly(number: float) -> str:
    return f"{number:,}".removesuffix(".0")


def rate(text: str) -> float:
    """Return messages per second, more than none.

    Written as 25000, 25K, 2.5M/s or 1Mi: powers of 1000, except Ki, Mi and Gi.
    """
    return _rate(text, _PER_SECOND)


def bit_rate(text: str) -> float:
    """Return bits per second, more than none.

    Written as 10G, 2.5Gbit/s or 800Mbps: powers of 1000, except Ki, Mi and Gi.
    """
    return _rate(text, _BITS_PER_SECOND)


def _rate(text: str, ending: str) -> float:
    from mcast.arguments.amounts import parse_quantity

    wanted = parse_quantity(text, RATES, ending=ending)
    if wanted is None or not wanted:
        raise typer.BadParameter(
            f"{_short(text)!r} is not a rate: give a number, such as 25000, 10K, 2.5M or 10G"
        )
    return wanted


def strategy(text: str) -> Strategy:
    """Parse a strategy for slow receivers; the error names the choices."""
    from mcast.cast.protocol.strategy import Strategy

    try:
        found = Strategy.of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if found.seconds is not None:
        _within(text, found.seconds, 0, MAX_SECONDS, " s")
    return found


def key_file(path: str) -> bytes:
    """The key in a file; one sentence says why the file has none."""
    from pathlib import Path

    from mcast.cast.protocol.auth import authenticator_for

    try:
        key = Path(path).read_bytes()
        authenticator_for(key)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise typer.BadParameter(f"{path}: {error}") from None
    return key


KeyFile = Annotated[
    Any,  # bytes, or None
    typer.Option(
        "--key-file", parser=key_file, metavar="PATH", help="Accept only messages made with this key."
    ),
]

StrategyOption = Annotated[
    Any,  # a Strategy, whose module the help does not load
    typer.Option(
        parser=strategy,
        metavar="WHAT",
        help="all, quorum:K, deadline:SECONDS, best-effort, or carousel, without answers; carousel:3 "
        "sends three cycles, carousel:10min for ten minutes.",
    ),
]


def _bytes(text: str) -> int:
    from mcast.arguments.amounts import parse_quantity

    wanted = parse_quantity(text, SIZES, whole=True)
    if wanted is None:
        raise typer.BadParameter(
            f"{_short(text)!r} is not a size: give a number of bytes, such as 4096, 4K, 4M or 4MiB"
        )
    return int(wanted)


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:20]}..."


def number_option(
    *names: str,
    min: float | None = None,
    max: float | None = None,
    is_whole: bool = True,
    metavar: str = "N",
    help: str = "",
) -> Any:
    """An option that takes a number within bounds, in the grammar of all numbers."""

    def read(given: object) -> float:
        from mcast.arguments.amounts import parse_int, parse_number

        text = str(given)
        found = (parse_int if is_whole else parse_number)(text)
        if found is None or not (min is None or found >= min) or not (max is None or found <= max):
            kind = "a whole number" if is_whole else "a number"
            more = ", its exponent of at most two digits" if found is None and "e" in text.lower() else ""
            wanted = f"give {kind}{_bounds(min, max)}{'' if is_whole else more}"
            raise typer.BadParameter(f"{_short(text)}: {wanted}")
        return found

    return typer.Option(*names, min=min, max=max, parser=read, metavar=metavar, help=help)


def _bounds(least: float | None, most: float | None) -> str:
    if least is None:
        return "" if most is None else f" of at most {_plainly(most)}"
    if most is None:
        return f" of at least {_plainly(least)}"
    return f" from {_plainly(least)} to {_plainly(most)}"
