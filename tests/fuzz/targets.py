"""Targets of fuzzing: everything that reads bytes or text of strangers. A target always returns.

A target takes any bytes. It lets through the errors that its subject promises, and states what must hold.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from ipaddress import IPv4Address
from math import inf
from pathlib import Path
from random import Random
from typing import Any, cast

import typer
from blake3 import blake3

from mcast.api import (
    Backend,
    Batch,
    DeviceInfo,
    PortSpace,
    QpInit,
    TimedOut,
    UnusableDevice,
    list_rows,
    open_backend,
)
from mcast.backends.rdma.sa import umad
from mcast.backends.sim import Fabric
from mcast.backends.sim.scenario import model as scenario_model
from mcast.backends.sim.scenario.fault_syntax import parse_fault
from mcast.backends.sim.scenario.faults import format_fault
from mcast.backends.sim.served import frames
from mcast.backends.sim.served.server import Client, FabricServer
from mcast.backends.sim.testbed import SimObserver
from mcast.backends.sim.trace import timeline
from mcast.backends.sim.trace.events import Trace
from mcast.bench.echo import Answerer, Pinger
from mcast.capture.replay import COPY_REASON, summarize
from mcast.cast.io.bundle import Folder, Label
from mcast.cast.io.driver import SessionContext, SessionSteps
from mcast.cast.io.receiving import Received, ReceivingSession
from mcast.cast.io.sending import SendingSession
from mcast.cast.io.sinks import Offered
from mcast.cast.protocol import packets
from mcast.cast.protocol.receiver import MAX_PARTIAL_OBJECTS, ObjectReceiver, ReceiverConfig
from mcast.cast.protocol.sender import ObjectSender
from mcast.cast.protocol.strategy import all_receivers
from mcast.cli import mgid, options, terminal, values
from mcast.endpoint import sequence
from mcast.endpoint.ports import choose
from mcast.errors.sa_refusal import PortView, refusal_causes
from mcast.pcapng.reader import CaptureError
from mcast.wire import probe
from mcast.wire.addresses import Gid, McastAddress, Mgid
from mcast.wire.mapping import ipoib_broadcast_mgid
from mcast.wire.mcmember import RECORD_SIZE, McMemberRecord
from mcast.wire.probe import Peer
from tests.cast.batches import GappedBatch, batch_of
from tests.cast.io.alone import SEGMENT, SESSION, Alone, K, cut
from tests.sanitized import EXTENSION

HERE = Path(__file__).parent
MAX_INPUT = 4096
"""Bytes of an input: what one MTU carries, and more than any text needs."""

_KEY = bytes(range(32))
_OFFER = packets.encode(packets.Offer(0, 0, 0, 0, 0, 0, ""))[4]
_HOSTS = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
_SENDER, _RECEIVER, _STRANGER = _HOSTS
_PEER = Peer(Gid("::ffff:10.0.0.2"), 17)


def _chunks(data: bytes) -> Iterator[bytes]:
    """Short messages: each a length, then its bytes."""
    while data:
        size = data[0]
        yield data[1 : 1 + size]
        data = data[1 + size :]


def cast_object(data: bytes) -> None:
    """A message of the protocol of objects is rejected, or is written again as it was read."""
    with suppress(packets.Rejected):
        spoken = packets.decode(data)
        assert packets.decode(packets.encode(spoken)) == spoken


def cast_objects(data: bytes) -> None:
    """Both ends of a session hear what a stranger makes up, in its own name, the other end's, or another's.

    Each chunk: the speaker and whether time passes, the kind, the body, to which the number is added.
    """
    salts = {host: packets.number_at(host, 1) for host in _HOSTS}
    session = salts[_SENDER]
    sender = ObjectSender(session, "sender", 1024, 0.0)
    receiver = ObjectReceiver(
        session, ReceiverConfig(salts[_RECEIVER], "receiver", 8, 1024, True), Random(1), 0.0
    )
    sender.on_packet(packets.Join(session, salts[_RECEIVER], 8, 1024, 1, 0, 0, 0, "receiver"), _RECEIVER, 0.0)
    receiver.on_packet(packets.Admit(session, {salts[_RECEIVER]: (0, 0)}), 0.0)
    receiver.on_packet(sender.begin(0.0, all_receivers(), 20_000, k=4), 0.0)
    now = 0.0
    for chunk in _chunks(data):
        if len(chunk) < 2:
            continue
        who, kind, body = chunk[0], chunk[1], chunk[2:]
        now += (who >> 2) ** 2 / 64
        host = _HOSTS[who % 3]
        speaks = packets.MEMBER_KINDS.get(kind, 0)
        body = (
            body[:speaks] + salts[host].to_bytes(8) + body[speaks:] if kind in packets.MEMBER_KINDS else body
        )
        message = packets.HEADER.pack(packets.MAGIC, kind, session) + body
        with suppress(packets.Rejected):
            spoken = packets.decode_from(message, host)
            sender.on_packet(spoken, host, now)
            if isinstance(spoken, packets.Data):
                receiver.on_data(spoken.object, spoken.block, 1 << spoken.esi, 1, now)
            else:
                receiver.on_packet(spoken, now)
        said = len(sender.messages(now))
        for end in [*receiver.object_receivers()]:
            for ready in end.take_ready():
                end.checked(ready.block, False, now)
            end.ended.clear()
            said += len(end.messages(now))
        assert said < 2000
    assert len(sender.members) <= 3
    assert len(receiver.others) <= MAX_PARTIAL_OBJECTS
    for _ in range(400):  # nobody speaks any more: both come to an end
        now += 1.0
        sender.end(bytes(32))
        sender.messages(now)
        receiver.messages(now)
    assert receiver.finished
    assert not sender.members.pending


class _ClosedEnd:
    """An end of a closed group, in virtual time. `forged` messages are those that it has to refuse."""

    def __init__(self, host: str, at: SendingSession | ReceivingSession, turns: SessionSteps[None]) -> None:
        self.host, self.at, self._turns = host, at, turns
        self.said: list[bytes] = []
        self.until = 0.0
        self.forged = 0
        self.leaves = self.over = False

    def feed(self, message: bytes, source: str, forged: bool = False) -> None:
        """A message comes, in a turn of its own."""
        if not self.over:
            self.forged += forged and not self.leaves
            self.goes(batch_of((message, source)))

    def goes(self, heard: Batch) -> None:
        try:
            turn = self._turns.send(heard) if self.until else next(self._turns)
        except StopIteration:
            self.over = True
        else:
            for batch in turn.post:
                self.said += map(bytes, list_rows(batch) if isinstance(batch, memoryview) else batch)
            assert turn.until is not None
            self.until = max(turn.until, 1e-6)


def closed_messages(data: bytes) -> None:
    """An enemy without the key stands between the two ends of a closed group, and has all messages first.

    Each byte says what becomes of one: it is changed, cut, lost, said again, to its author, by another host,
    or under another key. No wrong byte arrives, both ends come to an end, and all that is forged is counted.
    """
    clock, rule, body = [0.0], iter(data), Random(5).randbytes(9000)
    found: list[Received] = []
    hosts = (_SENDER, _RECEIVER)
    seats = [SessionContext(packets.number_at(host, 1), host, 1024, lambda: clock[0], host) for host in hosts]
    out = SendingSession(seats[0], 1 << 20, inf, 5.0, _KEY)
    into = ReceivingSession(seats[1], None, lambda _: None, 1 << 20, 1 << 20, 5.0, _KEY, None)

    def sends() -> SessionSteps[None]:
        with suppress(TimedOut):
            yield from out.wait_for_receivers(1, 20.0)
            yield from out.send(body, all_receivers(), "", b"")
        sender.leaves = True
        yield from out.close("")

    def takes() -> SessionSteps[None]:
        while (one := (yield from into.next(30.0))) is not None:
            found.append(one)
        receiver.leaves = True
        yield from into.leave("")

    sender, receiver = _ClosedEnd(_SENDER, out, sends()), _ClosedEnd(_RECEIVER, into, takes())
    ends = [sender, receiver]
    for end in ends:
        end.goes(batch_of())
    while not (sender.over and receiver.over):
        for author, other in (ends, reversed(ends)):
            said, author.said = author.said, []
            for message in said:
                what = next(rule, 0) % 16
                where = next(rule, 0) * len(message) >> 8 if what in (1, 2) else 0
                if what == 1:
                    message = (
                        message[:where] + bytes((message[where] ^ 1 + where % 255,)) + message[where + 1 :]
                    )
                elif what == 2:
                    message = message[:where]
                elif what == 3:  # from somewhere else, and then not at all
                    other.feed(message, _HOSTS[2], forged=True)
                elif what == 4:
                    signed = message[:-16]
                    message = signed + blake3(signed, key=bytes(32)).digest(length=16)
                if what == 5:  # back to its author: kind by kind, either nonsense or heard before
                    author.feed(message, author.host)
                    author.feed(message, other.host, forged=True)
                if what not in (3, 6):
                    other.feed(message, author.host, forged=what in (1, 2, 4))
                if what == 7:  # an end that knows the session has heard all but its first invitation
                    other.feed(message, author.host, forged=message[4] != _OFFER)
        for end in ends:
            if not end.over and not end.said:
                end.goes(batch_of())
        if not any(end.said for end in ends):
            due = min((end.until for end in ends if not end.over), default=0.0)
            clock[0] = max(clock[0] + 1e-6, due)
        assert clock[0] < 1000.0, "an end hangs"
        assert len(into.sessions) <= 2
    assert all(bytes(one.data or b"") == body for one in found)
    assert len(found) <= 1
    assert sum(out.core.rejected.values()) >= sender.forged
    assert sum(into.rejected.values()) + len(into._deferred) >= receiver.forged


_OBJECT = Random(7).randbytes(6 * SEGMENT * K + 500)
_BLOCKS = cut(_OBJECT)
_INFOS = [block.info for block in _BLOCKS]
_PARITY = 0 if EXTENSION in os.environ else 3
"""liberasurecode does not find its parts beside a sanitizer."""


def _segment(block: int, esi: int) -> bytes:
    """A DATA packet of the object; one that is not in it has zeros."""
    payload = bytes(SEGMENT)
    if block < len(_BLOCKS) and (esi < _INFOS[block].segments or K <= esi < K + _PARITY):
        payload = bytes(_BLOCKS[block].segment(esi))
    return packets.encode(packets.Data(SESSION, 0, block, esi, payload))


def _batch_messages(rule: Iterator[int]) -> Iterator[tuple[bytes, str]]:
    """Messages of one batch, true and false, and where each comes from."""

    def at(limit: int) -> int:
        return next(rule, 0) % limit

    while (what := next(rule, 15) % 16) != 15:
        source = "10.0.0.3"
        message = _segment(at(8), at(8)) if what < 12 else b""
        if what == 6:
            message = message[: 1 + at(len(message))]
        elif what == 7:
            message += bytes(1 + at(200))
        elif what == 8:
            place = at(30)
            message = message[:place] + bytes((message[place] ^ 1 << at(8),)) + message[place + 1 :]
        elif what == 9:
            source = _HOSTS[at(2)]
        elif what == 12:
            block = at(7)
            infos = tuple(_INFOS[max(0, block - at(3)) : block + 1][::-1])
            message = packets.encode(packets.Seal(SESSION, 0, block, at(2), 2, 1, 1000, infos))
        elif what == 13:
            sent = at(8)
            message = packets.encode(
                packets.Flush(SESSION, 0, sent, len(_BLOCKS), at(1 + sent // 4), 2, 1, 1000, 0, _DIGEST, 0, 0)
            )
        elif what == 14:
            block, size = at(7), 1 + at(8)
            yield from ((_segment(block, esi), source) for esi in range(size))
            continue
        yield message or bytes((what,)), source


_DIGEST = blake3(_OBJECT).digest()


def segment_batches(data: bytes) -> None:
    """Batches of segments, seals and nonsense: in C and in Python the receiver is the same after each.

    The same bytes are in place, the same segments are missing, and the same messages are refused.
    """
    rule = iter(data)
    memories = bytearray(len(_OBJECT)), bytearray(len(_OBJECT))
    ends = [
        Alone(memory, len(_OBJECT), parity=_PARITY, in_c=in_c)
        for memory, in_c in zip(memories, (True, False), strict=True)
    ]
    for _ in range(len(data)):
        messages = batch_of(*_batch_messages(rule))
        gaps = [next(rule, 0) % 3 for _ in messages] if next(rule, 0) % 2 else [0] * len(messages)
        found = [end.on_batch(GappedBatch([*messages], gaps)) for end in ends]
        assert memories[0] == memories[1]
        assert _state_of(ends[0]) == _state_of(ends[1])
        if found[0] or found[1]:
            assert [one and bytes(one.data or b"") for one in found] == [_OBJECT] * 2
            return


def _state_of(end: Alone) -> list[object]:
    """The state of a receiver, as far as segments change it."""
    core = end.receiving.sessions[SESSION].core
    assert core.incoming is not None
    blocks = {
        number: (one.segments, one.verifying, one.mismatches, one.info)
        for number, one in core.incoming._open.items()
    }
    known = core.incoming.base, core.incoming.total, core.incoming.unrecoverable
    return [blocks, *known, core.rejected, end.receiving.rejected, core.finished, core._state]


def cast_labels(data: bytes) -> None:
    """Read the label of a file of `mcast send`: none, or a label that is written again as it was read.

    Its name leads to a place inside the receiver's folder, or is refused.
    """
    label = Label.decode(data)
    if label is not None and len(data) <= packets.MAX_METADATA:
        assert Label.decode(label.encode()) == label
    with suppress(OSError):
        found = Folder(_folder()).path_of(Offered(data.decode(errors="replace")[:64], 1, data, "", "", 0))
        assert not found.is_absolute()
        assert not {"", ".", ".."} & set(found.parts)


def probes(data: bytes) -> None:
    """A probe is none, or is written again as it was read; pings and answers are counted."""
    found = probe.parse(memoryview(data))
    if found is not None:
        assert probe.parse(memoryview(found.pack())) == found
    pinger = Pinger({_PEER.gid}, {_PEER.qp_num}, 0, send_only=False)
    pinger.ask(1, _PEER.qp_num, _PEER.gid, 0.0)
    Answerer().on_message(memoryview(data), _PEER)
    pinger.on_message(memoryview(data), _PEER, 1.0)
    for member in pinger.members.values():
        assert pinger.loss(member) == 0.0


def sequence_headers(data: bytes) -> None:
    """Any order of any headers: no gap is negative, and no more streams are kept than allowed."""
    sources = sequence.Sources(limit=4)
    for chunk in _chunks(data):
        head = sequence.pack(0, 0)[:8]
        for message in (chunk, head + chunk):
            sources.take(_PEER.gid, sum(chunk) % 6, memoryview(message))
    assert len(sources) <= 4 * sequence.MAX_STREAMS
    assert all(stream.gaps >= 0 for stream in sources.snapshot())


def capture(data: bytes) -> None:
    """A pcapng or pcap file, and every packet in it, down to its messages."""
    with suppress(CaptureError):
        contents, every = summarize(io.BytesIO(data)), summarize(io.BytesIO(data), keep_copies=True)
        assert contents.messages + contents.skipped.get(COPY_REASON, 0) == every.messages
        assert (
            contents.skipped.items() - {(COPY_REASON, contents.skipped.get(COPY_REASON))}
            == every.skipped.items()
        )
        assert 0 <= contents.pause <= contents.span


def _scenario(data: bytes, suffix: str) -> None:
    file = _folder() / f"scenario.{suffix}"
    file.write_bytes(data)
    with suppress(scenario_model.BadScenario):
        scenario_model.load(file)


@cache
def _folder() -> Path:
    made = tempfile.mkdtemp(prefix="mcast-fuzz-")
    atexit.register(shutil.rmtree, made)
    return Path(made)


def scenario_toml(data: bytes) -> None:
    """A scenario in TOML is one, or BadScenario."""
    _scenario(data, "toml")


def scenario_yaml(data: bytes) -> None:
    """A scenario in YAML is one, or BadScenario."""
    _scenario(data, "yaml")


def fault_words(data: bytes) -> None:
    """Words of `mcast sim ctl`: a fault that is the same in its own words, or BadScenario."""
    words = data.decode(errors="replace").split()[:32]
    shape = scenario_model.ScenarioTopology(link_layer="infiniband", ports=3, switches=3)
    ports = {"ib0": 0, "ib1": 1, "ib2": 2}
    with suppress(scenario_model.BadScenario):
        fault = scenario_model.make_fault(parse_fault(words or ["drop"], ports), shape)
        assert scenario_model.make_fault(parse_fault(format_fault(fault).split(), ports), shape) == fault


def trace_lines(data: bytes) -> None:
    """Lines of a trace: one that is drawn, and written again as it was read, or a ValueError."""
    with suppress(ValueError):
        trace = Trace.load(data.decode(errors="replace"))
        assert [*Trace.load(str(trace))] == [*trace]
        assert timeline.page(trace, "of a stranger")


def addresses(data: bytes) -> None:
    """Text of groups, GIDs and MGIDs: a value that is written again as the same one, or a ValueError."""
    text = data.decode(errors="replace")
    with suppress(ValueError):
        group = McastAddress.of(text)
        assert McastAddress.of(str(group)) == group
    for kind in (Gid, Mgid):
        with suppress(ValueError):
            assert kind(str(kind(text))) == kind(text)
    with suppress(typer.BadParameter):
        mgid._explain(mgid._given(text), ipoib_broadcast_mgid())


def endpoint_text(data: bytes) -> None:
    """Read the options of an endpoint: --bind, --device and sizes, in one sentence where they are wrong."""
    text = data.decode(errors="replace")
    with suppress(terminal.Failure, ValueError):
        choose(_known(), None, *options.port_of(text))
    with suppress(ValueError):
        choose(_known(), text, None, 1)
    with suppress(typer.BadParameter):
        assert 0 <= values.size(text) <= values.MAX_SIZE


class _Devices:
    def __init__(self, devices: tuple[DeviceInfo, ...]) -> None:
        self._devices, self.name = devices, "sim"

    def devices(self) -> tuple[DeviceInfo, ...]:
        return self._devices

    def unusable_devices(self) -> tuple[UnusableDevice, ...]:
        return ()


@cache
def _known() -> Backend:
    """A backend as far as a place is chosen on it."""
    with open_backend("sim") as backend:
        return cast(Backend, _Devices(tuple(backend.devices())))


def sa_records(data: bytes) -> None:
    """An MCMemberRecord is written again as it was read; it explains what is wrong with another."""
    first, second = data[:RECORD_SIZE], data[RECORD_SIZE : 2 * RECORD_SIZE]
    with suppress(ValueError):
        asked = McMemberRecord.unpack(first)
        assert McMemberRecord.unpack(asked.pack()) == asked
        group = McMemberRecord.unpack(second)
        mask = int.from_bytes(data[2 * RECORD_SIZE :][:4])
        for cause in refusal_causes(mask, asked, group, PortView((0xFFFF,), 4, 3), mask):
            assert str(cause)


class _Library:
    """libibumad, as far as it is asked; the answers are somebody else's, with the transaction's number."""

    def __init__(self, answers: bytes) -> None:
        self._answers, self._asked = list(_chunks(answers)), b""

    def umad_size(self) -> int:
        return 56

    def umad_set_addr(self, *_: object) -> int:
        return 0

    def umad_send(self, port: int, agent: int, out: Any, *_: object) -> int:
        self._asked = out.raw[56:]
        return 0

    def umad_recv(self, port: int, back: Any, *_: object) -> int:
        if not self._answers:
            return -110
        answer = self._answers.pop(0)
        if answer[:1] != b"\0":
            answer = answer[:12].ljust(12, b"\0") + self._asked[12:16] + answer[12:]
        ctypes.memmove(ctypes.byref(back, 56), answer, min(len(answer), 256))
        return 0

    def umad_status(self, back: Any) -> int:
        return int(back.raw[56])


def sa_answers(data: bytes) -> None:
    """MADs that claim to be the SA's answers: a record, None, or Silent."""
    attributes = umad.PortAttributes(_PEER.gid, (0xFFFF,), 100, 1, 0)
    asking = umad.SubnetAdministrator(_Library(data), 0, 0, attributes, timeout=1.0)
    with suppress(umad.SaUnreachable):
        group = asking.group(Gid("ff12::1"))
        assert group is None or len(group.mgid) == 16
    with suppress(umad.SaUnreachable):
        mask = asking.capability_mask2()
        assert mask is None or 0 <= mask < 1 << 27


class _Served:
    """A served fabric of which one client is in order; what another one sends is carried out at once."""

    def __init__(self, make: Callable[..., Fabric]) -> None:
        self.said: list[str] = []
        path = Path(tempfile.mkdtemp(prefix="mcast-fuzz-")) / "fabric.sock"
        atexit.register(shutil.rmtree, path.parent)
        self.fabric = make(ports=3, clock="wall")
        self.server = FabricServer(self.fabric, path, say=self.said.append)
        atexit.register(self.close)
        client, self._theirs = self.connect()
        for name, arguments in _IN_ORDER:
            self._theirs.send(frames.encode_request(name, 1, arguments))
            assert self.serve(client)
            drain(self._theirs)
        self.before = self.tables()

    def close(self) -> None:
        self._theirs.close()
        self.server.close()
        self.fabric.close()

    def tables(self) -> object:
        """Return the state of the client that works, and leftovers of the other."""
        ports = self.fabric.ports
        return sorted(SimObserver(self.fabric).leftovers()), [len(port.ids) for port in ports]

    def serve(self, client: Client) -> bool:
        """Take a turn for what the client has sent; whether it is still there."""
        self.server._read(client)
        self.server.step()
        return client.socket in self.server.clients

    def connect(self) -> tuple[Client, socket.socket]:
        """A client, and its end of the socket."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        client = Client(ours, 0, "somebody")
        self.server.add_client(client)
        return client, theirs


def drain(theirs: socket.socket) -> None:
    """Read what was answered, and close the descriptors that came with it."""
    with suppress(BlockingIOError):
        while True:
            data, descriptors, _, _ = socket.recv_fds(theirs, 1 << 16, 4)
            for descriptor in descriptors:
                os.close(descriptor)
            if not data:
                return


_IN_ORDER: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("attach", (frames.VERSION, 0, None)),
    ("event_channel", ()),
    ("create_id", (1, PortSpace.UDP)),
    ("bind_addr", (2, IPv4Address("10.0.0.1"))),
    ("create_qp", (2, QpInit(busy_poll=0.0))),
    ("attach_mcast", (3, Gid("ff0e::1"), 49153)),
)
_served = cache(_Served)


def served_frames(data: bytes) -> None:
    """Bytes to the server of a fabric: its other client keeps what it has, and nothing is left.

    Each chunk is a text, and after a zero byte its payloads; or, after 255, bytes as they are.
    """
    served = _served(Fabric.infiniband if data[:1] == b"i" else Fabric.roce)
    client, theirs = served.connect()
    with theirs:
        for chunk in _chunks(data[1:]):
            text, _, tail = chunk.partition(b"\0")
            whole = chunk[:1] == b"\xff"
            theirs.send(chunk[1:] if whole else frames.encode(frames.REQUEST, 1, text, tail))
            if not served.serve(client):
                break
            drain(theirs)
    if client.socket in served.server.clients:
        served.server._end(client)
    assert served.tables() == served.before
    assert not [line for line in served.said if "internal error of the server" in line]
    served.said.clear()


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        cast_object,
        cast_objects,
        closed_messages,
        segment_batches,
        cast_labels,
        probes,
        sequence_headers,
        capture,
        scenario_toml,
        scenario_yaml,
        fault_words,
        trace_lines,
        addresses,
        endpoint_text,
        sa_records,
        sa_answers,
        served_frames,
    )
}


def seeds(target: str) -> list[bytes]:
    """The inputs in the repository: what a target shall begin with, and what it has once failed on."""
    return [file.read_bytes() for file in sorted((HERE / "corpus" / target).iterdir())]
