"""The extension under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcast.backends.udp import _native

from ..card.build import ROOT
from ..sanitized import EXTENSION, check

SOURCES = ROOT / "mcast" / "backends" / "udp" / "csrc"
SOURCE_NAMES = "calls", "crc", "module", "ring"
TESTS = (
    "tests/udp/test_sanitized.py",
    "tests/udp/test_filter.py",
    "tests/udp/test_calls.py",
    "tests/udp/test_offloads.py::test_batches_arrive_as_they_were_sent",
    "tests/udp/test_offloads.py::test_each_message_of_a_run_is_judged_alone",
    "tests/udp/test_offloads.py::test_a_run_past_the_last_receive_is_counted_by_message",
    "tests/udp/test_commands.py::test_a_series_of_rows_keeps_its_order",
    "tests/udp/test_commands.py::test_own_messages_come_back_unless_blocked",
    "tests/udp/test_processes.py::test_more_groups_than_a_socket_may_join",
    "tests/udp/test_processes.py::test_the_first_overflow_says_what_to_type",
)
"""They judge mutated datagrams, and send and receive by sockets, in their own process."""

if EXTENSION in os.environ:

    def test_the_extension_is_the_one_with_sanitizers() -> None:
        assert f"{_native.__name__}={_native.__file__}" == os.environ[EXTENSION]

else:

    @pytest.mark.timeout(3600)  # against hangs alone: each test in there has a limit of its own
    def test_no_datagram_breaks_a_rule_of_c(tmp_path: Path, long: bool) -> None:
        sources = [SOURCES / f"{name}.c" for name in SOURCE_NAMES]
        check("mcast.backends.udp._native", sources, TESTS, tmp_path, long)
