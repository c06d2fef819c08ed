"""Take what names the host, its user or its network out of a text.

Two rules work together. Whatever has the form of an address, a GUID or a path is replaced, no matter whose it
is. The names of the host, of its user, of its devices and of its interfaces have no form, and are replaced
where they are words. Each gets a number, so that equal things stay equal: `<address 1>`, `<group 2>`.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

_GUID = r"0x[0-9a-fA-F]{12,}|\b[0-9a-fA-F]{16,}\b|\b(?:[0-9a-fA-F]{4}:){3}[0-9a-fA-F]{4}\b(?!:)"
_MAC = r"\b(?:[0-9a-fA-F]{2}[:-]){5,19}[0-9a-fA-F]{2}\b"
_IP = r"(?:(?<!\w)[0-9a-fA-F.]+)?:[0-9a-fA-F:.]+|(?<!\d)\d{1,3}(?:\.\d{1,3}){3}(?!\d)"
_PATH = r"""(?<=')/[^'\n]+(?=')|(?<=")/[^"\n]+(?=")|(?<![\w/.<~])(?:~\w*)?/(?:[\w.+@-]+/)*[\w.+@-]+"""
_FORMS = re.compile(f"(?P<hex>{_GUID})|(?P<mac>{_MAC})|(?P<ip>{_IP})|(?P<path>{_PATH})")
_GLUED = re.compile(r"[0-9a-fA-F.]*:[0-9a-fA-F:.]+")
"""An IPv6 address that letters stand before, with nothing between."""

_NOBODY = {"", "root", "localhost", "(none)"}
"""Names that say nothing of a host or a user."""

_SYSTEM = ("/proc/", "/sys/", "/dev/")
"""Paths that every host has."""


def own_names() -> dict[str, str]:
    """Return the names of this host and of its user -> what they are. Nothing is asked on the network."""
    found: dict[str, str] = {}
    for host in (platform.node(), os.uname().nodename):
        found |= {host: "host", host.partition(".")[0]: "host"}
    found |= {user_name(): "user", Path.home().name: "user"}
    return {name: kind for name, kind in found.items() if name not in _NOBODY}


def user_name() -> str:
    """Return the name of the user; "" if the number of the user has none."""
    with suppress(KeyError, OSError):
        return getpass.getuser()
    return ""


class Redactor:
    """Replaces what may name somebody. One instance for a report, so that equal things get equal marks.

    names  name -> what it is, such as "host": replaced where it is a word
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._kinds = {name.lower(): kind for name, kind in names.items() if name}
        self._marks: dict[tuple[str, str], str] = {}
        longest_first = sorted(self._kinds, key=len, reverse=True)
        either = "|".join(map(re.escape, longest_first))
        self._names = re.compile(rf"(?<![^\W_])(?:{either})(?![^\W_])", re.IGNORECASE) if either else None

    def text(self, text: str) -> str:
        """Return the text without addresses, GUIDs, paths and names."""
        formed = _FORMS.sub(self._form, text)
        return self.words(_GLUED.sub(lambda found: self._addresses(found[0]), formed))

    def words(self, text: str) -> str:
        """Return the text without names alone: a version may have the form of an address."""
        if self._names is None:
            return text
        return self._names.sub(
            lambda found: self._mark(self._kinds[found[0].lower()], found[0].lower()), text
        )

    def _form(self, found: re.Match[str]) -> str:
        said = found[0]
        match found.lastgroup:
            case "hex":
                return self._mark("number", said)
            case "mac":
                return self._mark("address", said)
            case "path":
                return said if said.startswith(_SYSTEM) else self._mark("path", said)
            case _:
                return self._addresses(said)

    def _addresses(self, said: str) -> str:
        """Replace what of these digits, colons and dots is an address: the longest parts first.

        Not all need be: a colon may end a word before the address, or a sentence behind it.
        """
        for size in range(len(said), 2, -1):
            for start in range(len(said) - size + 1):
                end = start + size
                with suppress(ValueError):
                    address = ip_address(said[start:end])
                    mark = self._mark("group" if address.is_multicast else "address", str(address))
                    return self._addresses(said[:start]) + mark + self._addresses(said[end:])
        return said

    def _mark(self, kind: str, what: str) -> str:
        number = 1 + sum(known == kind for known, _ in self._marks)
        return self._marks.setdefault((kind, what), f"<{kind} {number}>")
