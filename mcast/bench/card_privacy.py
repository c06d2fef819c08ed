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

_GUID = r"0x[0-9a-fA-F]{12,}|(?<![0-9a-fA-F])[0-9a-fA-F]{12,}|\b(?:[0-9a-fA-F]{4}:){3}[0-9a-fA-F]{4}\b(?!:)"
"""Also inside a word: udev calls interfaces and devices `enx` or `rocex` and a MAC address or GUID."""
_MAC = r"\b(?:[0-9a-fA-F]{2}[:-]){5,19}[0-9a-fA-F]{2}\b"
_IP = r"(?:(?<!\w)[0-9a-fA-F.]+)?:[0-9a-fA-F:.]+|(?<!\d)\d{1,3}(?:\.\d{1,3}){3}(?!\d)"
_QUOTED = r"""(?<=')/[^'\n]+(?=')|(?<=")/[^"\n]+(?=")"""
_PATH = rf"""{_QUOTED}|(?<![\w/.~])(?:~\w*|\.\.?)?/+(?![/\s])[^\s'"<>|;]*[^\s'"<>|;/.,:!?()\[\]]"""
"""Without quotes it ends at a space. A URL is one, too: it may name a host."""
_FORMS = re.compile(f"(?P<hex>{_GUID})|(?P<mac>{_MAC})|(?P<ip>{_IP})|(?P<path>{_PATH})")
_HEX = re.compile(_GUID)
_GLUED = re.compile(r"[0-9a-fA-F.]*:[0-9a-fA-F:.]+")
"""An IPv6 address that letters stand before, with nothing between."""

_ZONE = re.compile(r"(?<=>%)\w[\w.-]*")
"""The zone of an address that was replaced: an interface, perhaps of another host or network namespace."""

_NOBODY = {"", "root", "localhost", "(none)", "local", "localdomain", "lan", "home", "internal"}
"""Names that say nothing of a host, its domain or a user."""

_SYSTEM = re.compile(r"/(?:proc|sys/class|sys/module|sys/kernel|dev/infiniband)/[\w./-]+")
"""Paths that every host has. What is in others, as in /dev/shm or in control groups, users have named."""

_MAX_ADDRESS = 45
"""Maximum length of an address: an IPv6 address that ends like an IPv4 address."""


def own_names() -> dict[str, str]:
    """Return the names of this host and of its user -> what they are. Nothing is asked on the network."""
    found: dict[str, str] = {}
    for host in (platform.node(), os.uname().nodename):
        name, _, domain = host.partition(".")
        found |= {host: "host", name: "host", domain: "domain"}
    # To measure a card often takes sudo, which makes a root of the user
    found |= dict.fromkeys([user_name(), Path.home().name, os.environ.get("SUDO_USER", "")], "user")
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
        named = self.words(_GLUED.sub(lambda found: self._addresses(found[0]), formed))
        return _ZONE.sub(lambda found: self._mark("interface", found[0].lower()), named)

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
                if _SYSTEM.fullmatch(said) is None or ".." in said:
                    return self._mark("path", said)
                return _HEX.sub(lambda found: self._mark("number", found[0]), said)
            case _:
                return self._addresses(said)

    def _addresses(self, said: str) -> str:
        """Replace what of these digits, colons and dots is an address: the longest parts first.

        Not all need be: a colon may end a word before the address, or a sentence behind it.
        """
        for size in range(min(len(said), _MAX_ADDRESS), 2, -1):
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
