"""Pitfalls of users (docs/pitfalls.md): each line has its proof and its section in the docs, by number.

The table is `users.toml`; the proofs that no other file has are below it.
"""

from __future__ import annotations

import ast
import asyncio
import errno as E
import inspect
import re
import threading
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mcast import Membership, Sender, aio
from mcast.api import Message, NotSupported, TimedOut
from mcast.backends.sim.lease import SimBatch
from mcast.errors.cause import ENOTSUPP
from mcast.testing.plugin import McastEndpoints, McastFabric

ROOT = Path(__file__).parents[2]
LINES = range(1, 26)
ANSWERS = {"impossible", "explained"}


def lines() -> Mapping[int, Mapping[str, list[str]]]:
    table = tomllib.loads(Path(__file__).with_name("users.toml").read_text("utf-8"))
    return {int(number): line for number, line in table.items()}


def unproven(table: Mapping[int, Mapping[str, list[str]]]) -> list[str]:
    """Return the faults of the table, a sentence each."""
    wrong = [f"line {number} is missing" for number in LINES if number not in table]
    wrong += [f"there is no line {number}" for number in table if number not in LINES]
    for number, line in table.items():
        if not line["tests"] or not line["answer"] or not ANSWERS.issuperset(line["answer"]):
            wrong.append(f"line {number} has no test, or no answer")
        for test in line["tests"]:
            file, _, name = test.partition("::")
            if name not in names_in(ROOT / file):
                wrong.append(f"line {number}: there is no {test}")
    return wrong


def names_in(path: Path) -> set[str]:
    """Names of the tests in a file that pytest would collect; none if there is no such file."""
    if not path.exists() or not path.name.startswith("test_"):
        return set()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.name
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, functions) and node.name.startswith("test_")
    }


def test_each_line_is_proven() -> None:
    assert unproven(lines()) == []


def test_a_gap_in_the_table_is_noticed() -> None:
    table = dict(lines())
    table[26] = table.pop(7)
    table[1] = {**table[1], "tests": ["tests/endpoint/test_users.py::test_nothing"]}
    table[2] = {**table[2], "tests": []}
    table[3] = {**table[3], "tests": ["tests/commands.py::run", "tests/endpoint/nowhere.py::test_x"]}
    assert unproven(table) == [
        "line 7 is missing",
        "there is no line 26",
        "line 1: there is no tests/endpoint/test_users.py::test_nothing",
        "line 2 has no test, or no answer",
        "line 3: there is no tests/commands.py::run",
        "line 3: there is no tests/endpoint/nowhere.py::test_x",
    ]


def test_each_line_has_its_section_in_the_docs() -> None:
    page = (ROOT / "docs" / "pitfalls.md").read_text("utf-8")
    sections = re.split(r"^## (\d+)\. ", page, flags=re.M)
    assert [int(number) for number in sections[1::2]] == list(LINES)
    assert [
        number for number, text in zip(LINES, sections[2::2], strict=True) if "```python" not in text
    ] == []


# --- proofs ---------------------------------------------------------------------------------------

GROUP = "239.25.1.1"
EACH_FABRIC = pytest.mark.mcast(fabric=["roce", "infiniband"])
MEMBERS = (Sender, Membership, aio.Sender, aio.Membership)


@pytest.mark.parametrize("member", MEMBERS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_a_send_takes_no_destination(member: type[Sender | aio.Sender]) -> None:
    parameters = [inspect.signature(getattr(member, call)).parameters for call in ("send", "send_batch")]
    assert [list(one)[1:] for one in parameters] == [
        ["payload", "imm", "timeout"],
        ["payloads", "imm", "timeout"],
    ]


@pytest.mark.parametrize("member", MEMBERS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_a_leave_takes_no_address(member: type[Sender | aio.Sender]) -> None:
    assert list(inspect.signature(member.leave).parameters) == ["self"]


@pytest.mark.mcast(fabric="infiniband", clock="wall")
def test_ready_waits_for_late_switches(mcast_endpoints: McastEndpoints, mcast_fabric: McastFabric) -> None:
    mcast_fabric.program_late(3600)
    one, other = mcast_endpoints(2)
    mine, theirs = one.join(GROUP), other.join(GROUP)
    heard: list[bytes] = []

    def hear() -> None:
        while message := theirs.recv(timeout=10):
            heard.append(bytes(message.payload))
            if heard[-1] == b"after":
                return

    hearer = threading.Thread(target=hear)
    hearer.start()
    mine.send(b"before")
    with pytest.raises(TimedOut):
        mine.ready(timeout=0.05)
    mcast_fabric.program_late(0)
    assert {peer.qp_num for peer in mine.ready(timeout=10)} == {other.qp_num}
    mine.send(b"after")
    hearer.join(timeout=20)
    assert heard == [b"after"]


@EACH_FABRIC
def test_a_message_of_one_mtu_arrives_as_it_was_sent(mcast_endpoints: McastEndpoints) -> None:
    one, other = mcast_endpoints(2)
    group = one.join(GROUP)
    other.join(GROUP)
    payload = bytes(number % 251 for number in range(one.port.active_mtu))
    group.send(payload)
    with other.recv_batch(timeout=1) as batch:
        assert [bytes(message.payload) for message in batch] == [payload]
        assert list(batch.lengths) == [len(payload)]


@pytest.mark.mcast(clock="wall")
@pytest.mark.parametrize("awaited", [False, True])
def test_an_ipv6_group_on_roce_is_refused_with_the_alternative(
    mcast_endpoints: McastEndpoints, awaited: bool
) -> None:
    async def join_awaited() -> None:
        (endpoint,) = mcast_endpoints.aio()
        await endpoint.join("ff12::1")

    def join() -> None:
        (endpoint,) = mcast_endpoints()
        endpoint.join("ff12::1")

    with pytest.raises(NotSupported, match="join an IPv4 group") as refused:
        asyncio.run(join_awaited()) if awaited else join()
    assert refused.value.errno == ENOTSUPP != E.EOPNOTSUPP
    assert "ENOTSUPP" in str(refused.value)
    assert "Unknown error" not in str(refused.value)


class StrictBatch(SimBatch):
    """A batch that is as strict as the real provider's: no part of a payload may outlive its lease."""

    def _message(self, index: int) -> Message:
        message = super()._message(index)
        memory = bytearray(message.payload)
        self.memories = [*getattr(self, "memories", []), memory]
        return message._replace(payload=memoryview(memory).toreadonly())

    def __iter__(self) -> Iterator[Message]:
        return (self[index] for index in range(len(self)))

    def _release(self) -> None:
        for memory in getattr(self, "memories", []):
            memory.clear()  # BufferError while a view of it is there
        super()._release()


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "numbered"])
@pytest.mark.parametrize("way", ["recv", "member.recv", "batches", "awaited", "two groups"])
def test_no_view_of_a_receive_buffer_outlives_its_lease(
    mcast_endpoints: McastEndpoints, monkeypatch: pytest.MonkeyPatch, way: str, sequence: bool
) -> None:
    monkeypatch.setattr("mcast.backends.sim.backend.SimBatch", StrictBatch)
    sender, receiver = mcast_endpoints(2, sequence=sequence)
    group, member = sender.join(GROUP), receiver.join(GROUP)
    other = receiver.join("239.25.1.2") if way == "two groups" else None

    async def awaited() -> list[bytes]:
        (endpoint,) = mcast_endpoints.aio(sequence=sequence)
        async with endpoint.join(GROUP) as joined:
            group.send_batch(SENT)
            return [bytes(m.payload) for _ in SENT if (m := await joined.recv(5))]

    if way == "awaited":
        assert asyncio.run(awaited()) == SENT
        return
    group.send_batch(SENT)
    if way == "batches":
        got = [bytes(message.payload) for batch in receiver.batches(timeout=1) for message in batch]
    else:
        if other is not None:
            assert other.recv(timeout=0) is None  # reads what is the other group's
        recv = receiver.recv if way == "recv" else member.recv
        got = [bytes(message.payload) for _ in SENT if (message := recv(1))]
    assert got == SENT
    assert receiver.stats().receive_free == receiver.stats().receive_depth


SENT = [b"one", b"two", b"three"]
