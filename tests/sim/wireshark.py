"""Packets in the eyes of other programs: tshark's fields, scapy's ICRC."""

from __future__ import annotations

import json
import shutil
import subprocess
import warnings
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from mcast.backends.model.times import NS

Row = dict[str, str]
Shown = Callable[[dict[str, list[str]]], bool]


class Decoded:
    """Return the fields that tshark reads in a file: for each packet, field -> its values as text."""

    def __init__(self, file: Path) -> None:
        command = [_tshark(), "-r", str(file), "-T", "json", "--no-duplicate-keys"]
        command += ["-o", "ip.check_checksum:TRUE"]
        # Wireshark 4.0's EoIB heuristic reads the first bytes of every payload, even of an empty one.
        command += ["--disable-protocol", "infiniband.eoib"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        self.decoded = [_flat(packet["_source"]["layers"]) for packet in json.loads(done.stdout)]

    def rows(self, shown: Shown, *fields: str) -> list[Row]:
        """The fields of the packets that are shown, as text; "" for a field that is not there."""
        found = [packet for packet in self.decoded if shown(packet)]
        return [{field: ",".join(dict.fromkeys(p.get(field, ()))) for field in fields} for p in found]

    def column(self, shown: Shown, field: str) -> list[str]:
        return [row[field] for row in self.rows(shown, field)]


def _tshark() -> str:
    found = shutil.which("tshark")
    if found is None:
        pytest.fail("these tests decode packets with tshark: apt-get install tshark", pytrace=False)
    return found


def _flat(layers: Any) -> dict[str, list[str]]:
    """Every field at any depth, with all its values."""
    found: dict[str, list[str]] = defaultdict(list)

    def walk(node: Any, name: str) -> None:
        if isinstance(node, dict):
            found[name] += []
            for key, value in node.items():
                walk(value, key)
        elif isinstance(node, list):
            for item in node:
                walk(item, name)
        else:
            found[name].append(str(node))

    walk(layers, "layers")
    return dict(found)


def nanoseconds(time: str) -> int:
    """Of a time since 1970, which tshark 4.0 shows as seconds, and 4.6 as a date."""
    whole, _, fraction = time.removesuffix("Z").partition(".")
    seconds = int(whole) if whole.isdecimal() else datetime.fromisoformat(f"{whole}Z").timestamp()
    return int(seconds) * NS + int(fraction)


def has(field: str, value: str | None = None) -> Shown:
    """Packets with that field, and that value among its values."""
    return lambda packet: field in packet and (value is None or value in packet[field])


def is_message(packet: dict[str, list[str]]) -> bool:
    """A datagram of a user, not a MAD."""
    return "infiniband.deth" in packet and "infiniband.mad" not in packet


def every(packet: dict[str, list[str]]) -> bool:
    return True


def scapy_icrc(frame: bytes) -> tuple[bytes, bytes]:
    """The ICRC that the frame carries, and the one that scapy computes for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from scapy.contrib.roce import BTH
        from scapy.layers.l2 import Ether
    bth = Ether(frame)[BTH]
    return bth.icrc.to_bytes(4), bth.compute_icrc(None)
