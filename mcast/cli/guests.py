"""Who is on a fabric that several processes share, in words and for JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcast.api import Backend, Guest


def others(backend: Backend) -> list[Guest]:
    """The processes on the fabric besides this one."""
    return [guest for guest in backend.guests() if guest.pid != os.getpid()]


def as_json(guests: Sequence[Guest]) -> list[dict[str, Any]]:
    """The guests as values for JSON."""
    return [guest._asdict() for guest in guests]


def words_of(guest: Guest) -> str:
    """The program, its process and its ports, in a line."""
    where = "looks on" if guest.hosts == "all" else f"host {guest.hosts}: {', '.join(guest.devices)}"
    return f"{guest.name}, {where}"


def on_port(guests: Sequence[Guest], port: str) -> str:
    """The programs that are the host with this port, `device` or `device/number`."""
    device = port.partition("/")[0]
    found = [guest for guest in guests if guest.hosts != "all" and device in guest.devices]
    return ", ".join(guest.name for guest in found)
