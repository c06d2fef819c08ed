"""The causes of each errno, read from rows.toml: one row for each cause, the likeliest first."""

from __future__ import annotations

import errno as E
import tomllib
from pathlib import Path
from typing import Any

from mcast.errors.cause import ENOTSUPP, Cause, Phase, Row
from mcast.wire.kinds import LinkLayer

FILE = Path(__file__).with_name("rows.toml")


def _row(fields: dict[str, Any]) -> Row:
    name, phase, link_layer = fields["errno"], fields.get("phase"), fields.get("link_layer")
    return Row(
        phase=Phase(phase) if phase else None,
        errno=ENOTSUPP if name == "ENOTSUPP" else getattr(E, name),
        cause=Cause(fields["why"], fields["check"], fields["next_step"]),
        source=fields["source"],
        calls=tuple(fields.get("calls", ())),
        link_layer=LinkLayer(link_layer) if link_layer else None,
        status=fields.get("status", ""),
        only=fields.get("only", ""),
    )


ROWS: tuple[Row, ...] = tuple(map(_row, tomllib.loads(FILE.read_text("utf-8"))["row"]))
