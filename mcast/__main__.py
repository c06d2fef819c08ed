"""`python -m mcast` is the command `mcast`."""

from __future__ import annotations

import sys
from signal import SIGINT


def main() -> None:
    """Run the command. Ctrl-C ends it without a traceback even while its modules are being imported."""
    try:
        from mcast.cli import main as run
    except KeyboardInterrupt:
        sys.exit(128 + SIGINT)
    run()


if __name__ == "__main__":
    main()
