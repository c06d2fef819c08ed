"""How commands read sizes, rates, times, factors and strategies, and what they say of what they refuse."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from typer import TyperException

    from mcast.cast.nack.strategy import Strategy

LONGEST = 604_800.0
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

_NO_UNIT, _TIMES = {"": 1}, {"": 1, "X": 1}
_WHOLE = "[0-9]{1,20}"
_FRACTION = r"[0-9]{1,20}(?:\.[0-9]{1,9})?(?:e[0-9]{1,2})?"
_PER_SECOND = "(?:/s)?"
_BITS_PER_SECOND = "(?:bit(?:/s)?|bps|/s)?"

_MIB = 1 << 20


def size(text: str) -> int:
    """A number of bytes up to MAX_SIZE: 4194304, 4096K, 4M, 4MiB, 4MB or 1G."""
    wanted = _bytes(text)
    if wanted > MAX_SIZE:
        raise typer.BadParameter(f"{text} is too much: at most 1G is made up; give a FILE to send more")
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
        wanted = int(text) if isinstance(text, int) or (text.isdecimal() and len(text) < 20) else 0
        if not wanted:
            wanted, rest = divmod(_bytes(str(text)), _MIB)
            if rest:
                raise typer.BadParameter(f"{_short(str(text))} is no whole number of MiB")
        return int(_within(text, wanted, least, most, " MiB"))

    return read


def seconds(least: float, most: float) -> Callable[[str | float], float]:
    """The reader of a time: a number of seconds, or one with us, ms, s, min or h."""

    def read(text: str | float) -> float:
        from mcast.contract.seconds import seconds_in

        wanted = seconds_in(str(text).strip())
        if wanted is None:
            try:
                wanted = float(text)
            except ValueError:
                raise typer.BadParameter(
                    f"{_short(str(text))!r} is no time: write seconds, or a number with us, ms, s, min or h"
                ) from None
        return _within(text, wanted, least, most, " s")

    return read


def microseconds(least: float, most: float) -> Callable[[str | float], float]:
    """The reader of a time in microseconds: their number, or a time with us, ms, s, min or h."""

    def read(text: str | float) -> float:
        from mcast.contract.seconds import seconds_in

        wanted, timed = _amount(str(text), _NO_UNIT, _FRACTION), seconds_in(str(text).strip())
        if timed is not None:
            wanted = round(timed * 1e6, 3)
        if wanted is None:
            raise typer.BadParameter(
                f"{_short(str(text))!r} is no time: write microseconds, or a number with us, ms, s, min or h"
            )
        return _within(text, wanted, least, most, " us")

    return read


def factor(least: float, most: float) -> Callable[[str | float], float]:
    """The reader of how many times as much: 10, 0.5 or 10x."""

    def read(text: str | float) -> float:
        wanted = _amount(str(text), _TIMES, _FRACTION)
        if wanted is None:
            raise typer.BadParameter(
                f"{_short(str(text))!r} is no factor: write a number, perhaps with x, like 10x"
            )
        return _within(text, wanted, least, most)

    return read


WAITING = seconds(0.1, LONGEST)
"""How long an end of a transfer may be waited for."""


def _within(text: str | float, wanted: float, least: float, most: float, unit: str = "") -> float:
    if not least <= wanted <= most:
        bounds = f"{_plainly(least)} to {_plainly(most)}{unit}"
        raise typer.BadParameter(f"{_short(str(text))} is out of range: give {bounds}")
    return wanted


def _plainly(number: float) -> str:
    return f"{number:,}".removesuffix(".0")


def rate(text: str) -> float:
    """Messages for each second, more than none: 25000, 25K, 2.5M/s or 1Mi, by powers of 1000 but for Ki, Mi
    and Gi."""
    return _rate(text, _PER_SECOND)


def bit_rate(text: str) -> float:
    """Bits for each second, more than none: 10G, 2.5Gbit/s or 800Mbps, by powers of 1000 but for Ki, Mi and
    Gi."""
    return _rate(text, _BITS_PER_SECOND)


def _rate(text: str, ending: str) -> float:
    wanted = _amount(text, RATES, _FRACTION, ending)
    if wanted is None or not wanted:
        raise typer.BadParameter(
            f"{_short(text)!r} is no rate: write a number, perhaps with K, M or G, like 10G"
        )
    return wanted


def strategy(text: str) -> Strategy:
    """What a sender does with slow receivers; one sentence says which texts there are."""
    from mcast.cast.nack.strategy import Strategy

    try:
        found = Strategy.of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if found.seconds is not None:
        _within(text, found.seconds, 0, LONGEST, " s")
    return found


def key_file(path: str) -> bytes:
    """The key in a file; one sentence says why the file has none."""
    from pathlib import Path

    from mcast.cast.nack.closed import letters_of

    try:
        key = Path(path).read_bytes()
        letters_of(key)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise typer.BadParameter(f"{path}: {error}") from None
    return key


KeyFile = Annotated[
    Any,  # bytes, or None
    typer.Option("--key-file", parser=key_file, metavar="PATH", help="Hear holders of this key alone."),
]

StrategyOption = Annotated[
    Any,  # a Strategy, whose module the help does not load
    typer.Option(
        parser=strategy,
        metavar="WHAT",
        help="all, quorum:K, deadline:SECONDS, best-effort, or carousel, which nobody answers; carousel:3 "
        "goes round three times, carousel:10min for ten minutes.",
    ),
]


def _bytes(text: str) -> int:
    wanted = _amount(text, SIZES, _WHOLE)
    if wanted is None:
        raise typer.BadParameter(
            f"{_short(text)!r} is no size: write bytes, or a number with K, M or G, like 4M or 4MiB"
        )
    return int(wanted)


def _amount(text: str, units: Mapping[str, int], number: str, ending: str = "") -> float | None:
    found = re.fullmatch(f"({number})({'|'.join(units)}){ending}", text.strip(), re.ASCII | re.IGNORECASE)
    if found is None:
        return None
    return (int(found[1]) if found[1].isdecimal() else float(found[1])) * units[found[2].upper()]


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:20]}..."


def number_refused(error: TyperException) -> str | None:
    """What is wrong with a number, in words, where pydantic has refused the number for typer."""
    option, errors = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
    if option is None or errors is None:
        return None
    found = errors()[0]
    info = option.type_descriptor.parameter_info
    kind = "a whole number" if found["type"].startswith("int_") else "a number"
    if found["type"] in ("greater_than_equal", "less_than_equal"):
        kind = "a whole number" if isinstance(info.min or info.max, int) else "a number"
    elif not found["type"].startswith(("int_", "float_")):
        return None
    name = max(option.opts, key=len) if option.param_type_name == "option" else option.human_readable_name
    least, most = (_plainly(one) for one in (info.min or 0, info.max or 0))
    if info.min is None:
        bounds = "" if info.max is None else f" of at most {most}"
    else:
        bounds = f" of at least {least}" if info.max is None else f" from {least} to {most}"
    return f"{name} is {_short(str(found['input']))}: give {kind}{bounds}"
