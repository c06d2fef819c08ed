"""The exit statuses of the command: one table, for all sub-commands and for the page that shows them."""

from __future__ import annotations

from enum import IntEnum
from signal import SIGHUP, SIGINT, SIGPIPE, SIGTERM


class ExitStatus(IntEnum):
    """An exit status of any command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    TIMEOUT = 124
    LAB = 125
    NOT_FOUND = 127
    HANGUP = 128 + SIGHUP
    INTERRUPTED = 128 + SIGINT
    BROKEN_PIPE = 128 + SIGPIPE
    TERMINATED = 128 + SIGTERM


MEANINGS = {
    ExitStatus.DONE: "The command did what it was asked to do.",
    ExitStatus.FAILED: "The command ran without reaching what was asked for; a sentence or a table says why.",
    ExitStatus.USAGE: "The command did not begin: an argument, a file or a backend is not as it must be.",
    ExitStatus.TIMEOUT: "`mcast lab`: a time limit stopped the guest, as timeout(1) has it.",
    ExitStatus.LAB: "`mcast lab`: the lab failed, not the command in the guest, as env(1) has it.",
    ExitStatus.NOT_FOUND: "`mcast lab run`: there is no such command, as env(1) has it.",
    ExitStatus.HANGUP: "The terminal is gone (SIGHUP), which nohup(1) hides; otherwise as for 130.",
    ExitStatus.INTERRUPTED: "Ctrl-C, where that is no usual way to end the command; it has tidied up.",
    ExitStatus.BROKEN_PIPE: "Nobody reads the output any more (SIGPIPE), as in `mcast info | head -n 1`.",
    ExitStatus.TERMINATED: "SIGTERM; otherwise as for 130.",
}
"""Meaning of each exit status, for authors of scripts."""

OF_LAB = frozenset({ExitStatus.TIMEOUT, ExitStatus.LAB, ExitStatus.NOT_FOUND})
"""Statuses of `mcast lab` alone."""


def by_signal(number: int) -> ExitStatus:
    """The status of a command that this signal ended."""
    return ExitStatus(128 + number)
