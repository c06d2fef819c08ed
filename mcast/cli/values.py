"""How commands read sizes and rates with units and strategies, and what they say of a number out of range."""

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

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def size(text: str) -> int:
    """A number of bytes up to MAX_SIZE: 4194304, 4096K, 4M or 1G."""
    wanted = _bytes(text)
    if wanted > MAX_SIZE:
        raise typer.BadParameter(f"{text} is too much: at most 1G is made up; give a FILE to send more")
    return wanted


def message_size(least: int, most: int) -> Callable[[str | int], int]:
    """The reader of a number of bytes in one message, such as 1024 or 1K."""

    def read(text: str | int) -> int:
        wanted = _bytes(str(text))
        if not least <= wanted <= most:
            raise typer.BadParameter(f"{_short(str(text))} is out of range: give {least} to {most:,} bytes")
        return wanted

    return read


def rate(text: str) -> float:
    """Something for each second, more than none: 25000, 25K, 2.5M or 10G, by powers of 1000."""
    wanted = _amount(text, _DECIMAL, r"[0-9]{1,20}(?:\.[0-9]{1,9})?(?:e[0-9]{1,2})?")
    if wanted is None or not wanted:
        raise typer.BadParameter(
            f"{_short(text)!r} is no rate: write a number, perhaps with K, M or G, like 10G"
        )
    return wanted


def strategy(text: str) -> Strategy:
    """What a sender does with slow receivers; one sentence says which texts there are."""
    from mcast.cast.nack.strategy import Strategy

    try:
        return Strategy.of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


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
    typer.Option(parser=strategy, metavar="WHAT", help="all, quorum:K, deadline:SECONDS or best-effort."),
]


def _bytes(text: str) -> int:
    wanted = _amount(text, _BINARY, "[0-9]{1,20}")
    if wanted is None:
        raise typer.BadParameter(
            f"{_short(text)!r} is no size: write bytes, or a number with K, M or G, like 4M"
        )
    return int(wanted)


def _amount(text: str, units: Mapping[str, int], number: str) -> float | None:
    found = re.fullmatch(f"({number})([KMG]?)", text.strip(), re.ASCII | re.IGNORECASE)
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
    least, most = (f"{one:,}".removesuffix(".0") for one in (info.min or 0, info.max or 0))
    if info.min is None:
        bounds = "" if info.max is None else f" of at most {most}"
    else:
        bounds = f" of at least {least}" if info.max is None else f" from {least} to {most}"
    return f"{name} is {_short(str(found['input']))}: give {kind}{bounds}"
