"""The listener for changes of network interfaces."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from mcast.backends.rdma.net.links import Links


def test_exit_watcher_is_no_finding() -> None:
    """A watcher of a process's end is no mistake of the program."""
    program = "from mcast.backends.rdma.net.links import links; links.changes()"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=500
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_change_counter_moves_with_each_change() -> None:
    """The number is another one after each change and stays without one."""
    links = Links()
    links.changes()
    links.close()
    heard, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard.setblocking(False)
    links._socket, links._pid = heard, os.getpid()
    found = []
    with kernel:
        for chunk in ((), (b"one",), (b"two", b"three"), ()):
            for message in chunk:
                kernel.send(message)
            found.append(links.changes())
    assert found[0] < found[1] < found[2] == found[3]
    links.close()


CHANGES = """
import fcntl, socket, struct
from mcast.backends.rdma.net.links import links

def change(mtu):
    request = struct.pack("16si16x", b"lo", mtu)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8922, request)  # SIOCSIFMTU

before = links.changes()
assert links.changes() == before, "nothing has changed"
change(1500)
after = links.changes()
assert after != before, "the kernel tells of an interface's new MTU before the ioctl returns"
assert links.changes() == after
"""


def test_the_kernel_tells_of_an_interface_s_new_mtu() -> None:
    in_a_namespace = ["unshare", "-rn", sys.executable, "-c", CHANGES]
    done = subprocess.run(in_a_namespace, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_cannot_be_heard_may_be_a_change() -> None:
    links = Links()
    before = links.changes()
    assert links._socket is not None
    links._socket.close()
    assert links.changes() != before
