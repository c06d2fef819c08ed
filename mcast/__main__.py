"""`python -m mcast` is the command `mcast`."""

from __future__ import annotations

import gc
import signal
import sys
from types import TracebackType


def main() -> None:
    """Run the command. Ctrl-C ends it without a traceback, whatever Python is at."""
    if sys.platform != "linux":
        from mcast.errors.install import NEEDS_LINUX

        sys.exit(NEEDS_LINUX)
    # Nearly all that a command makes while it starts stays to its end: looking for garbage among that takes a
    # tenth of the start.
    gc.set_threshold(50_000)
    # Not where SIGINT is ignored, as in a shell's background job.
    caught = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if caught:  # modules are read, and nothing is to tidy up yet: the signal alone ends the process
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mcast.cli import main as run

    sys.excepthook = _silently
    if caught:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    finally:
        if caught:  # all is tidied up
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _silently(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Show what nobody caught, but not Ctrl-C, for which Python then ends itself by the signal."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


if __name__ == "__main__":
    main()
