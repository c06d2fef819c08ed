"""The listener for changes of network interfaces."""

from __future__ import annotations

import os
import subprocess
import sys

from mcast.backends.rdma.net.links import Links


def test_what_listens_to_the_end_of_a_process_is_no_mistake_of_the_program() -> None:
    program = "from mcast.backends.rdma.net.links import links; links.changes()"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_change_the_number_stays() -> None:
    links = Links()
    before = links.changes()
    os.close(links._fd)
    links._fd = -1
    assert links.changes() != before  # what cannot be heard may be a change
