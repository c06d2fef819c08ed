"""The listener for changes of network interfaces."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from mcast.backends.rdma.net.links import Links


def test_what_listens_to_the_end_of_a_process_is_no_mistake_of_the_program() -> None:
    program = "from mcast.backends.rdma.net.links import links; links.changes()"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_number_is_another_one_after_each_change_and_stays_without_one() -> None:
    links = Links()
    links.changes()
    os.close(links._fd)
    heard, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard.setblocking(False)
    links._fd = heard.detach()
    found = []
    with kernel:
        for news in ((), (b"one",), (b"two", b"three"), ()):
            for message in news:
                kernel.send(message)
            found.append(links.changes())
    assert found[0] < found[1] < found[2] == found[3]
    os.close(links._fd)


def test_what_cannot_be_heard_may_be_a_change() -> None:
    links = Links()
    before = links.changes()
    os.close(links._fd)
    links._fd = -1
    assert links.changes() != before
