"""Run a program of this host that starts others, such as make, so that none of them outlives the call.

A signal raises its exception in the main thread, at any line, so also after the program has started and
before Popen has returned. A thread of its own therefore starts it, and always knows which one it was.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path


def run(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Return the command's status and output. An exception, KeyboardInterrupt included, ends its children.

    They are a group of processes of their own, and share the pipes for the output. When these end, the last
    child has ended, and a temporary folder can be removed.
    """
    starting: Future[subprocess.Popen[str]] = Future()

    def start() -> None:
        if not starting.set_running_or_notify_cancel():
            return
        try:
            starting.set_result(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env=env,
                    cwd=cwd,
                    process_group=0,
                )
            )
        except Exception as error:
            starting.set_exception(error)

    try:
        threading.Thread(target=start).start()
        process = starting.result()
        out, err = process.communicate()
    except BaseException:
        if not starting.cancel() and starting.exception() is None:
            process = starting.result()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
