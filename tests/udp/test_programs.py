"""Programs made of endpoints work on `udp`: top, replay, objects through loss, awaiting ends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import mcast.aio
from mcast import cast, open_endpoint
from mcast.backends.net import hostnet
from mcast.conformance.helpers import BOUND

from ..commands import MCAST, Run
from ..own_network import needs_namespaces
from .test_processes import GROUP, LO, UDP

ROOT = Path(__file__).parents[2]
DATA = os.urandom(2_000_000)


def test_top_shows_a_source() -> None:
    command: list[str | Path] = [
        MCAST,
        "top",
        GROUP,
        *UDP,
        *LO,
        "--interval",
        "0.3",
        "--count",
        "2",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        try:
            with (
                open_endpoint("udp", bind="127.0.0.1", sequence=True) as endpoint,
                endpoint.sender(GROUP) as out,
            ):
                while top.poll() is None:
                    out.send(b"x" * 100)
                    time.sleep(0.001)  # no faster than top reads: what overruns it is a gap
            found, _ = top.communicate(timeout=BOUND)
        finally:
            top.kill()
    (group,) = json.loads(found.splitlines()[-1])["groups"]
    assert group["messages"] > 0
    (source,) = group["sources"]
    assert "127.0.0.1" in json.dumps(source)
    assert source["gaps"] == 0


def test_a_capture_is_replayed(tmp_path: Path, mcast: Run) -> None:
    """A recording of one process is sent again by another, payload by payload."""
    taken, sent = tmp_path / "taken.pcapng", [b"message %d" % number for number in range(50)]
    command: list[str | Path] = [MCAST, "record", GROUP, "-o", taken, "-C", str(len(sent)), *UDP, *LO]
    with subprocess.Popen(command) as recording, open_endpoint("udp", bind="127.0.0.1") as endpoint:
        try:
            with endpoint.join(GROUP) as group:
                group.ready(timeout=BOUND)
                group.send_batch(sent)
                assert recording.wait(BOUND) == 0
                while group.recv(0) is not None:
                    pass
                done = mcast("replay", taken, "--max", *UDP, *LO)
                assert done.returncode == 0, done.stderr
                found = [group.recv(BOUND) for _ in sent]
        finally:
            recording.kill()
    assert [bytes(message.payload) for message in found if message is not None] == sent


@needs_namespaces
@pytest.mark.parametrize("closed", [False, True], ids=["open", "with a key"])
def test_a_file_comes_whole_through_loss(tmp_path: Path, closed: bool) -> None:
    """One datagram of a hundred is dropped where it is received; two processes."""
    lossy("udp dport 4791 numgen inc mod 100 0 counter drop")
    (tmp_path / "film").write_bytes(DATA)
    (tmp_path / "key").write_bytes(os.urandom(32))
    key = ("--key-file", "key") if closed else ()
    receiving = started(tmp_path, "recv", GROUP, "-o", "copy", *key)
    sending = started(tmp_path, "send", "film", GROUP, *key)
    for one in (sending, receiving):
        out, error = one.communicate(timeout=BOUND)
        assert one.returncode == 0, out + error
    assert (tmp_path / "copy").read_bytes() == DATA
    assert dropped() > 0


def lossy(rule: str) -> None:
    """Let this network drop what the rule says."""
    chain = "add chain ip lossy in { type filter hook input priority 0; }"
    lines = ("add table ip lossy", chain, f"add rule ip lossy in {rule}")
    subprocess.run([hostnet.program("nft"), "-f", "-"], input="\n".join(lines), check=True, text=True)


def dropped() -> int:
    """Return how many packets the rule has dropped."""
    found = json.loads(hostnet.run("nft", "-j", "list", "table", "ip", "lossy"))["nftables"]
    expressions = [one for rule in found for one in rule.get("rule", {}).get("expr", ())]
    return sum(one["counter"]["packets"] for one in expressions if "counter" in one)


def started(where: Path, *words: str) -> subprocess.Popen[str]:
    command: Sequence[str | Path] = [MCAST, *words, *UDP, *LO]
    return subprocess.Popen(command, cwd=where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_objects_pass_between_awaiting_ends() -> None:
    async def talk() -> bytes:
        one = mcast.aio.open_endpoint("udp", bind="127.0.0.1")
        other = mcast.aio.open_endpoint("udp", bind="127.0.0.1")
        async with one as here, other as there, here.join(GROUP) as group, there.join(GROUP) as heard:
            sending = asyncio.create_task(cast.send(group, DATA, receivers=1))
            async for found in cast.receive(heard, one_session=True):
                await sending
                assert found.data is not None
                return bytes(found.data)
        raise AssertionError

    assert asyncio.run(talk()) == DATA
