"""The findings of `mcast doctor`: one for each thing about a host that was inspected."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Level(Enum):
    """Severity of a finding. A problem keeps multicast from working, a warning may.

    NOTE is for what cannot be seen from here, and for what matters to few programs.
    INFO is for what the provider lacks on a host that has nothing for it to use, such as libraries where
    there is no card. It is a problem for a user who asks for the provider.
    """

    OK = "ok"
    NOTE = "note"
    INFO = "info"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """Result of one check.

    check    subject of the check, a word or two, such as memlock
    subject  device, port or interface; "" for the host
    level    a problem keeps multicast from working, a warning may
    seen     finding, a sentence
    fix      command or step that repairs it; "" if there is nothing to repair
    """

    check: str
    subject: str
    level: Level
    seen: str
    fix: str = ""
