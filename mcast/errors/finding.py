"""What is found out about a host: one finding for each thing that is looked at."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Level(Enum):
    """How a thing is: a problem keeps multicast from working, a warning may."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """What was seen of one thing.

    check    what was looked at, a word or two, such as `memlock`
    subject  the device, port or interface it was looked at on; "" for the host
    seen     what was seen, a sentence
    fix      the one command, or step, that mends it; "" if there is nothing to mend
    """

    check: str
    subject: str
    level: Level
    seen: str
    fix: str = ""
