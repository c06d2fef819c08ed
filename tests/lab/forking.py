"""Runs steps one after the other, each in a process forked from this one, which has imported what they need.

usage: forking.py STEPS, a JSON list of ["pytest", ARGUMENT...] and ["mcast", OUTPUT-FILE, WORD...]

An emulated guest needs ten seconds to import pytest and mcast. The RDMA libraries are not loaded here: each
step finds them new.
"""

from __future__ import annotations

import asyncio  # noqa: F401  (this and others: for those who come after)
import gc
import json
import os
import sys
import traceback
import unittest.mock  # noqa: F401
from collections.abc import Callable

import hypothesis  # noqa: F401
import pytest
import pytest_timeout  # noqa: F401

import mcast.backends.rdma.backend
import mcast.backends.rdma.channel
import mcast.backends.rdma.qp
import mcast.backends.rdma.testbed
import mcast.cli
import mcast.conformance.facts
import mcast.conformance.log
import mcast.endpoint.blocking
import rdma_lab.machine  # noqa: F401


def run_pytest(*arguments: str) -> int:
    return pytest.main([*arguments])


def run_mcast(output: str, *words: str) -> int:
    with open(output, "wb") as file:  # noqa: PTH123  (its descriptor is what is wanted)
        os.dup2(file.fileno(), 1)
    sys.argv = ["mcast", *words]
    try:
        mcast.cli.main()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 1
    return 0


STEPS: dict[str, Callable[..., int]] = {"pytest": run_pytest, "mcast": run_mcast}


def main(steps: list[list[str]]) -> int:
    """The first status that is not 0, or 0."""
    gc.freeze()  # what was imported stays: no step looks through it again
    statuses = []
    for kind, *words in steps:
        print(f"step: {kind} {' '.join(words)}", flush=True)
        child = os.fork()
        if child == 0:
            status = 70
            try:
                status = STEPS[kind](*words)
            except BaseException:
                traceback.print_exc()  # for os._exit shows nothing
            finally:
                sys.stdout.flush()
                os._exit(status)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return next((abs(status) for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
