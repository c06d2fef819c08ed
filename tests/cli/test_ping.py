"""`mcast ping`: bad input, and what devices cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..commands import Run

BEYOND_THE_DEVICE = {
    "MTU": (("-S", "1025"), "mcast: -S 1025 is more than one MTU carries on roce0: 1024\n"),
    "priority": (("--service-level", "9"), "--service-level is 9: allowed"),
}


@pytest.mark.parametrize("case", BEYOND_THE_DEVICE)
def test_unsupported_by_the_device_is_a_usage_error(
    here: Run, third_party: Callable[..., dict[str, str]], case: str
) -> None:
    """An option that the device lacks is one sentence and status 2."""
    arguments, says = BEYOND_THE_DEVICE[case]
    done = here("ping", "239.1.1.1", "-b", "10.0.0.1", *arguments, "--backend", "acme", env=third_party())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr


BAD_INPUT = {
    "no group": ((), "give one group"),
    "two groups": (("239.1.1.1", "-m", "239.1.1.2"), "give one group"),
    "unicast": (("10.0.0.1",), "a unicast address"),
    "zero": (("-m", "0.0.0.0"), "the zero address"),
    "no MGID": (("-M", "239.1.1.1", "-b", "10.0.0.1"), "'239.1.1.1' is not a GID"),
    "MGID without a place": (("-M", "ff12::1"), "-M does not say which port: give"),
    "too short": (("239.1.1.1", "-S", "60"), "60 is out of range: give 61 to 65,536 bytes"),
    "no port space": (("239.1.1.1", "-p", "0x106"), "'0x106' is none of 0x111, 0x2"),
    "no number": (("239.1.1.1", "-p", "udp"), "'udp' is none of"),
    "no queue pair": (("239.1.1.1", "-c", "0"), "'-c': 0: give a whole number from 1 to 56"),
    "deaf": (("239.1.1.1", "--answer", "-o"), "a send-only member receives no ping"),
    "simulator": (("239.1.1.1", "--backend", "sim"), "'sim' is a fabric inside this process"),
    "two classes": (("239.1.1.1", "--dscp", "1", "--traffic-class", "4"), "--dscp is a part of"),
    "no address": (("239.1.1.1", "-b", "x"), "'x' is not an IPv4 or IPv6 address"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_status_2(here: Run, case: str) -> None:
    arguments, says = BAD_INPUT[case]
    done = here("ping", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mcast")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr
