"""Makes and destroys queue pairs in the lab's guest from several processes at once, and kills some of these.

usage: qp_churn.py ADDRESS... COUNT    COUNT lives of queue pairs by a process for each address and one more
       qp_churn.py ADDRESS FILE        one queue pair in a group; a line in FILE tells that it is there

A life: join a group, post receives and sends, and go: in order, by the end of the process, or by SIGKILL.
A line on file descriptor 3 tells of each.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import mcast.backends.rdma.qp  # noqa: F401  (imported for all processes)
from mcast import open_endpoint
from mcast.backends.rdma.backend import RdmaBackend

GROUP = "239.99.1.1"


def live(address: str, draw: random.Random) -> None:
    with (
        RdmaBackend() as backend,
        open_endpoint(backend, address) as receiver,
        open_endpoint(backend, address) as sender,
    ):
        group, out = receiver.join(GROUP), sender.sender(GROUP)
        for _ in range(draw.randrange(4)):
            for _ in range(draw.randrange(200)):
                out.send(bytes(draw.randrange(2048)))
            group.recv(timeout=0)
        match draw.randrange(3):
            case 0:
                os.kill(os.getpid(), signal.SIGKILL)
            case 1:
                os._exit(0)


def churn(addresses: list[str], count: int) -> int:
    """Each life in a process of its own; how many ended as they should."""
    ended, running, number = 0, set[int](), 0
    while number < count or running:
        if number < count and len(running) <= len(addresses):
            number += 1
            if (child := os.fork()) == 0:
                status = 1
                try:
                    live(addresses[number % len(addresses)], random.Random(number))
                    status = 0
                except BaseException:
                    traceback.print_exc()  # for os._exit shows nothing
                finally:
                    os._exit(status)
            running.add(child)
            continue
        child, status = os.wait()
        running.discard(child)
        ended += os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
        os.write(3, b"%d of %d lives\n" % (number - len(running), count))
    return ended


def hold(address: str, ready: Path) -> None:
    with RdmaBackend() as backend, open_endpoint(backend, address) as endpoint:
        endpoint.join(GROUP)
        ready.write_text("there\n")
        while True:
            time.sleep(60)


if __name__ == "__main__":
    *where, last = sys.argv[1:]
    if last.isdecimal():
        print(churn(where, int(last)))
    else:
        hold(where[0], Path(last))
