"""The file protocol on endpoints of simulated fabrics."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random

import pytest

from mcast import McastAddress, open_endpoint
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Drop, Duplicate, Messages, Reorder
from mcast.cast.drive import DEPTH, ReceivingParty, SendingParty, run
from mcast.cast.files import Sink, Source, open_sink
from mcast.cast.packets import (
    Data,
    Done,
    End,
    Hello,
    Packet,
    Verdict,
    Welcome,
    decode,
    encode,
)
from mcast.cast.sender import Fate, Patience

from .network import number

GROUP = McastAddress.of("239.1.1.1")
RULES = {
    "nothing": None,
    "loss": (Messages(rate=0.03), Drop()),
    "doubles": (Messages(rate=0.1), Duplicate(2)),
    "disorder": (Messages(rate=0.1), Reorder(3)),
}


class Cast:
    """A transfer on one fabric: the sender here, receivers 1..n in threads of their own, each on its host."""

    def __init__(self, fabric: Fabric, receivers: int, tmp_path: Path) -> None:
        self.fabric, self.tmp_path = fabric, tmp_path
        self.parties: dict[int, ReceivingParty] = {}
        self._threads = [threading.Thread(target=self._receive, args=(n + 1,)) for n in range(receivers)]

    def _receive(self, number: int) -> None:
        path = str(self.tmp_path / f"copy {number}")
        with (
            open_fabric(self.fabric, host=number) as backend,
            open_endpoint(backend, loopback="off", receive_depth=DEPTH) as endpoint,
            closing(open_sink(path)) as sink,
        ):
            sink.open()
            self.parties[number] = ReceivingParty(endpoint, GROUP, sink, silence=5.0)
            run(self.parties[number])

    def send(self, name: str, wait: float = 20.0, source: Callable[[str], Source] = Source) -> SendingParty:
        for thread in self._threads:
            thread.start()
        try:
            with (
                open_fabric(self.fabric, host=0) as backend,
                open_endpoint(backend, loopback="off", receive_depth=DEPTH) as endpoint,
                closing(source(name)) as file,
            ):
                patience = Patience(wait=wait, silence=5.0)
                party = SendingParty(endpoint, GROUP, file, len(self._threads), patience)
                run(party)
                return party
        finally:
            for thread in self._threads:
                thread.join(200)


@pytest.mark.parametrize("fault", RULES)
@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_a_file_reaches_every_host(make: Callable[..., Fabric], fault: str, tmp_path: Path) -> None:
    data = Random(2).randbytes(300_000)
    (tmp_path / "file").write_bytes(data)
    fabric = make(4, clock="wall")
    cast = Cast(fabric, 3, tmp_path)
    rule = RULES[fault]
    if rule is not None:
        with fabric.rules.when(*rule):
            party = cast.send(str(tmp_path / "file"))
    else:
        party = cast.send(str(tmp_path / "file"))
    assert {peer.fate for peer in party.core.peers.values()} == {Fate.VERIFIED}
    assert {(tmp_path / f"copy {number}").read_bytes() == data for number in (1, 2, 3)} == {True}
    assert {path.name for path in tmp_path.iterdir()} == {"file", "copy 1", "copy 2", "copy 3"}
    if fault != "disorder":
        assert bool(party.core.repeated) == (fault == "loss")


@pytest.mark.parametrize("change", ["grows", "shrinks"])
def test_a_file_that_changes_while_it_is_sent(tmp_path: Path, change: str) -> None:
    data = Random(2).randbytes(300_000)
    (tmp_path / "file").write_bytes(data)

    class Changing(Source):
        def read(self, most: int) -> bytes | None:
            if change == "grows":
                with (tmp_path / "file").open("ab") as file:
                    file.write(bytes(1000))
            else:
                os.truncate(tmp_path / "file", 200_000)
            return super().read(most)

    party = Cast(Fabric.roce(2, clock="wall"), 1, tmp_path).send(str(tmp_path / "file"), source=Changing)
    (peer,) = party.core.peers.values()
    if change == "grows":
        assert (peer.fate, party.core.failure) == (Fate.VERIFIED, "")
        assert (tmp_path / "copy 1").read_bytes() == data
    else:
        assert party.core.failure == "the file has changed: 200,000 of its 300,000 bytes could be read"
        assert not (tmp_path / "copy 1").exists()


def test_a_pipe_is_sent_as_it_comes(tmp_path: Path) -> None:
    data = Random(3).randbytes(200_000)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    cast = Cast(Fabric.roce(2, clock="wall"), 1, tmp_path)

    def write() -> None:
        with fifo.open("wb", buffering=0) as pipe:
            pipe.write(data[:100])
            while not cast.parties or cast.parties[1].core.pieces < 1:
                cast.fabric.clock.run_out()
            pipe.write(data[100:])

    writer = threading.Thread(target=write)
    writer.start()
    party = cast.send(str(fifo))
    writer.join(100)
    assert [peer.fate for peer in party.core.peers.values()] == [Fate.VERIFIED]
    assert (tmp_path / "copy 1").read_bytes() == data


def test_the_receivers_that_did_not_come_are_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    fabric = Fabric.roce(2, clock="wall")
    with (
        open_fabric(fabric, host=0) as backend,
        open_endpoint(backend, loopback="off") as endpoint,
        closing(Source(str(tmp_path / "file"))) as source,
    ):
        party = SendingParty(endpoint, GROUP, source, 2, Patience(wait=0.2))
        run(party)
    assert party.core.failure == "0 of 2 receivers joined within 0.2 s"


@contextmanager
def listening(
    fabric: Fabric, sink: Sink, *more: Packet
) -> Iterator[tuple[ReceivingParty, Callable[[], list[Packet]]]]:
    """A receiver on host 0, and what it has said to the group since it was last asked."""
    with (
        open_fabric(fabric, host=0) as backend,
        open_endpoint(backend, loopback="off", receive_depth=DEPTH) as endpoint,
        open_fabric(fabric, host=1) as other,
        open_endpoint(other, loopback="off") as watching,
        watching.join(GROUP) as group,
        closing(sink),
    ):
        sink.open()
        party = ReceivingParty(endpoint, GROUP, sink, silence=5.0)
        for packet in (
            Hello(number(1), 5, "sender"),
            Welcome(number(1), party.number),
            Data(number(1), 0, b"piece"),
            *more,
        ):
            group.send(encode(packet))

        def heard() -> list[Packet]:
            return [decode(message.payload) for message in iter(lambda: watching.recv(0.0), None)]

        yield party, heard


def test_a_receiver_that_gives_up_says_so(tmp_path: Path) -> None:
    def give_up() -> None:
        if party.core.welcome:
            party.core.fail("no transfer began")

    with listening(Fabric.roce(2), open_sink(str(tmp_path / "copy"))) as (party, heard):
        run(party, give_up)
        assert Done(number(1), party.number, Verdict.FAILED, "no transfer began") in heard()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (OSError(28, "No space left on device", "/secret/path"), "No space left on device"),
        (RuntimeError("/secret/path"), "internal error"),
    ],
    ids=["interrupt", "error of the system", "any other"],
)
@pytest.mark.parametrize("where", ["write", "commit", "watch"])
def test_the_group_does_not_learn_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, said: str, where: str
) -> None:
    def fail(*_: object) -> bool:
        raise error

    def watch() -> None:
        if where == "watch" and party.core.welcome:
            fail()

    sink = open_sink(str(tmp_path / "copy"))
    if where != "watch":
        monkeypatch.setattr(sink, where, fail)
    ends = [End(number(1), 1, 5, hashlib.sha256(b"piece").digest())] if where == "commit" else []
    with listening(Fabric.roce(2), sink, *ends) as (party, heard):
        with suppress(type(error)):
            run(party, watch)
        words = {packet.text for packet in heard() if isinstance(packet, Done)}
    assert words == {said}
    if isinstance(error, OSError) and where != "watch":
        assert party.core.failure == f"{tmp_path / 'copy'}: No space left on device"
