"""Environment of the tests and of their programs: the same, whoever starts them."""

from __future__ import annotations

import locale
import os
import signal
from fnmatch import fnmatchcase

FOREIGN = (
    *("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "PYTEST_ADDOPTS", "PYTEST_PLUGINS"),
    *("COLUMNS", "LINES", "TERMINAL_WIDTH", "TERM", "COLORTERM"),
    *("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "CLICOLOR*", "TTY_*"),
    *("LANGUAGE", "LC_*", "PYTHONUTF8", "PYTHONIOENCODING"),
    *("PYTHONUNBUFFERED", "PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONSAFEPATH"),
    *("MCAST_BACKEND", "MCAST_BIND"),
    *("OMPI_*", "PMI*", "SLURM_*"),
    *("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"),
)
"""Variables by which services, launchers, hooks and users change what programs print, read or do."""
UTF_8 = "C.UTF-8"


def become_known() -> None:
    """Leave to this process nothing of its parent's that tests would see."""
    for name in [name for name in os.environ if any(fnmatchcase(name, kind) for kind in FOREIGN)]:
        del os.environ[name]
    os.environ |= {
        "LC_ALL": UTF_8,
        "MCAST_SIM": "",
    }  # no fabric that the user serves here
    locale.setlocale(locale.LC_CTYPE, UTF_8)
    os.umask(0o022)
    # A shell's background job, nohup or a service's manager lets its programs ignore signals, or blocks them.
    for number in (signal.SIGTERM, signal.SIGCHLD):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # a program does not inherit a handler
        signal.signal(signal.SIGHUP, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
