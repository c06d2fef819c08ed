"""The errors of running a command in the lab, each with the exit status that env(1) and timeout(1) use."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar

from rdma_lab.result import LabResult


class LabError(Exception):
    """The lab could not do its part; `console` holds the last lines of the guest's console, oldest first.

    `result` is that of the guest, with the class's exit status; None if no guest was started.

    Each class has the exit status of `rdma-lab`, `exit_code`:

    LabUnavailableError   125: no QEMU, no kernel, a kernel without rdma_rxe, a wrong option
    GuestPanicError       125: the guest's kernel panicked
    GuestStoppedError     125: the guest or QEMU ended before the command did
    LabTimeoutError       124, also a TimeoutError: not ready, or the command not done, in time
    CommandNotFoundError  127, also a FileNotFoundError: found before anything is booted
    FaultError            2: no such thing to break in a running guest
    """

    exit_code: ClassVar[int] = 125
    result: LabResult | None = None

    def __init__(self, message: str, console: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.console = console

    def __str__(self) -> str:
        if not self.console:
            return self.message
        lines = (f"  {line}" for line in self.console)
        return "\n".join([self.message, "the end of the guest's console:", *lines])


class LabUnavailableError(LabError):
    """This host cannot boot the machine that was asked for; the message ends with what to do."""


class GuestPanicError(LabError):
    """The guest's kernel panicked (an oops panics too)."""


class GuestStoppedError(LabError):
    """The guest could not be set up, or ended without an exit code."""


class LabTimeoutError(LabError, TimeoutError):
    """The guest was stopped because a time limit was reached."""

    exit_code = 124


class CommandNotFoundError(LabError, FileNotFoundError):
    """The command is not on the PATH; the guest has the same files, so nothing was booted."""

    exit_code = 127


class FaultError(LabError):
    """There is no such thing to break in the running guest; the message names what there is."""

    exit_code = 2


def meant(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that refuses `word`, if a known word is like it: "; did you mean ...?"."""
    return "".join(f"; did you mean {found}?" for found in get_close_matches(word, list(known), 1, 0.75))
