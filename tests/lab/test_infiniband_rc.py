"""Reliable connections on the lab's InfiniBand: rdma-core's examples, perftest and rping, in one guest.

Counters of the port that move by the packets of each message are the evidence that verbs carried it.
"""

from __future__ import annotations

import io
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from rdma_lab import LabMachine

from ..sim.wireshark import Decoded
from .guest_run import OUTPUT_TIMEOUT

SCRIPT = Path(__file__).with_name("infiniband_rc.sh")
ERRORS = Path(__file__).with_name("rc_errors.c")
ITERATIONS, PATH_MTU = 50, 1024
"""Of ibv_rc_pingpong."""
RETRY_EXCEEDED = 12
"""IBV_WC_RETRY_EXC_ERR"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),  # against hangs of this process: the guest is bounded by its progress
]


class Output(NamedTuple):
    """Output and exit status of each program, by its name in the script."""

    folder: Path

    def __call__(self, name: str, status: int = 0) -> str:
        text = (self.folder / f"{name}.out").read_text()
        assert int((self.folder / f"{name}.status").read_text()) == status, text
        return text


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Output:
    shared = tmp_path_factory.mktemp("infiniband_rc")
    compiled = ("gcc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", shared / ERRORS.stem, ERRORS)
    subprocess.run([*compiled, "-libverbs"], check=True)
    lab = LabMachine(2, pytestconfig.getoption("--lab-kernel"), share=[shared], fabric="infiniband")
    written = io.BytesIO()
    try:
        result = lab.run(["sh", str(SCRIPT), str(shared)], output_timeout=OUTPUT_TIMEOUT, stdout=written)
    finally:
        print(written.getvalue().decode())
    assert result.exit_code == 0
    return Output(shared)


def test_the_hca_announces_rc(output: Output) -> None:
    attributes = dict(re.findall(r"^\s*(\w+):\s+(.*)$", output("devinfo"), re.MULTILINE))
    assert attributes["max_qp_rd_atom"] == attributes["max_qp_init_rd_atom"] == "16"
    assert attributes["atomic_cap"] == "ATOMIC_GLOB (2)"


@pytest.mark.parametrize("size", [1, 2048, 5000, 1_000_000])
def test_rc_pingpong_passes(output: Output, size: int) -> None:
    """The data are validated; a port's counters move by each packet, and by one ACK for each message."""
    for side in ("server", "client"):
        text = output(f"pingpong.{size}.{side}")
        assert f"{2 * size * ITERATIONS} bytes in" in text
        assert "invalid data" not in text
    before, after = (int((output.folder / f"{name}.{size}").read_text()) for name in ("before", "after"))
    sent = ITERATIONS * (-(-size // PATH_MTU) + 1)
    assert sent <= after - before <= 2 * sent + 100  # receives that are not posted yet cost RNR NAKs


@pytest.mark.parametrize("name", ["events", "srq", "mended"])
def test_pingpong_variants_pass(output: Output, name: str) -> None:
    for side in ("server", "client"):
        assert "iters in" in output(f"{name}.{side}")


def test_uc_is_refused(output: Output) -> None:
    assert "Couldn't post send" in output("uc.client", status=1)


def test_rping_verifies_data(output: Output) -> None:
    """It connects by rdma_cm, and moves data by RDMA READ and WRITE."""
    assert "server ping data" in output("rping.server")


@pytest.mark.parametrize(
    "name", ["send_bw", "write_bw", "read_bw", "atomic_bw", "send_lat", "write_lat", "read_lat"]
)
def test_perftest_measures(output: Output, name: str) -> None:
    measured(output, name, 50)


@pytest.mark.parametrize("name", ["send_lat_events", "ud_lat_events"])
def test_answer_does_not_overtake_completion(output: Output, name: str) -> None:
    """A message completes at its sender before its receiver can answer it.

    perftest 4.5 takes the next event of its two completion queues for that of its own message. If the answer
    is first, the completion stays in a queue with room for one, and the next one overruns it.
    """
    measured(output, name, 300)


def measured(output: Output, name: str, iterations: int) -> None:
    for side in ("server", "client"):
        assert "Transport type : IB" in output(f"{name}.{side}")
    assert re.search(rf"^ \d+ +{iterations} +\d", output(f"{name}.client"), re.MULTILINE)


FLUSHED, RNR_EXCEEDED = "Work Request Flushed Error", "RNR retry counter exceeded"
RETRIES_EXCEEDED = "transport retry counter exceeded"
INVALID, ACCESS = "remote invalid request error", "remote access error"


@pytest.mark.parametrize(
    ("name", "ended"),
    [
        ("send", f"success, success, ERR, RTS, {RNR_EXCEEDED}, 0"),  # the second finds no receive
        ("write", "success, -, RTS, RTS, success, 0"),
        ("no_receive", f"{RNR_EXCEEDED}, -, ERR, RTS, {FLUSHED}, 0"),
        ("short_receive", f"{INVALID}, local length error, ERR, ERR, {FLUSHED}, 0"),
        ("wrong_key", f"{ACCESS}, {FLUSHED}, ERR, ERR, {FLUSHED}, 0"),
        ("beyond_the_end", f"{ACCESS}, {FLUSHED}, ERR, ERR, {FLUSHED}, 0"),
        ("read_only", f"{ACCESS}, {FLUSHED}, ERR, ERR, {FLUSHED}, 0"),
        ("no_atomics", f"{INVALID}, {FLUSHED}, ERR, ERR, {FLUSHED}, 0"),
        ("partition", f"{RETRIES_EXCEEDED}, -, ERR, RTS, {FLUSHED}, 3"),  # packets: the first, and two more
    ],
)
def test_request_ends_at_both_ends(output: Output, name: str, ended: str) -> None:
    """The statuses and states of rc_errors.c, which tells what each word is of."""
    assert f"{name}: {ended}" in output("errors").splitlines()


def test_lost_packets_are_sent_again(output: Output) -> None:
    for side in ("server", "client"):
        text = output(f"lossy.{side}")
        assert "10 iters in" in text
        assert "invalid data" not in text


def test_tshark_decodes_the_tap(output: Output) -> None:
    """The packets of a message of 5000 bytes, and its ACK; some more than once."""
    packets = Decoded(output.folder / "lossy.pcapng").decoded
    opcodes = {
        int(packet["infiniband.bth.opcode"][0], 0) for packet in packets if "infiniband.bth.opcode" in packet
    }
    assert opcodes >= {0, 1, 2, 17}  # SEND first, middle, last; acknowledge
    assert not any("_ws.malformed" in packet for packet in packets)


def test_a_cut_cable_exceeds_the_retries(output: Output) -> None:
    """Of the side that sends; the other one waits for a message, and is stopped by SIGTERM."""
    statuses = {
        side: int((output.folder / f"cut.{side}.status").read_text()) for side in ("server", "client")
    }
    failed = [side for side, status in statuses.items() if status == 1]
    assert failed
    assert set(statuses.values()) <= {1, 128 + 15}
    for side in failed:
        assert f"transport retry counter exceeded ({RETRY_EXCEEDED})" in output(f"cut.{side}", status=1)


def test_the_kernel_complains_of_nothing(output: Output) -> None:
    """But one: rdmavt's own copy of a work request, which Debian's fortified memcpy reports once."""
    complaints = re.findall(r"(?:WARNING|BUG|Oops).*", output("log"))
    assert [one for one in complaints if "rdmavt/qp.c" not in one] == []
