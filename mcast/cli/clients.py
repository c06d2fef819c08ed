"""Who is on a fabric that several processes share, in words and for JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcast.api import Backend, ClientProcess


def others(backend: Backend) -> list[ClientProcess]:
    """The processes on the fabric besides this one."""
    return [guest for guest in backend.client_processes() if guest.pid != os.getpid()]


def words_of(guest: ClientProcess) -> str:
    """The program, its process and its ports, in a line."""
    where = "looks on" if guest.hosts == "all" else f"host {guest.hosts}: {', '.join(guest.devices)}"
    return f"{guest.name}, {where}"


def on_port(clients: Sequence[ClientProcess], port: str) -> str:
    """The programs that are the host with this port, `device` or `device/number`."""
    device = port.partition("/")[0]
    found = [guest for guest in clients if guest.hosts != "all" and device in guest.devices]
    return ", ".join(guest.name for guest in found)
