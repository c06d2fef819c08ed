"""JSON output of the commands: the fields of each object that `--json` prints.

A field that is there stays there, with its type, unit and meaning; fields may be added (docs/json.md).
`docs/schemas` is made from these types by `make generated`, and no command imports this module: a field costs
a command no time.

A result that is a named tuple stands for the object with its fields and public properties, which the table in
its docstring describes. Here are the outputs that are put together otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NotRequired, TypeVar

from typing_extensions import TypedDict

from mcast.api import ClientProcess
from mcast.backends.sim.scenario.model import Scenario
from mcast.backends.sim.scenario.runner import MemberResult, ObservedEvent
from mcast.bench.intervals import IntervalResult
from mcast.bench.measure import BenchResult
from mcast.bench.ping import AnswerResult, PingedMember, PingPort, PingResult
from mcast.cli.mgid import SharedName
from mcast.endpoint.watching import GroupRates, Rates, SequenceCounts
from mcast.errors.cause import Cause
from mcast.errors.finding import Finding
from mcast.testing.transfer import TransferCosts

Output = TypeVar("Output", bound=type)
EXTENDED: dict[object, tuple[type, ...]] = {}
"""Output -> named tuples whose fields it has, too."""


def extends(*kinds: type) -> Callable[[Output], Output]:
    """Declare that an output also has the fields of these named tuples."""

    def declare(output: Output) -> Output:
        EXTENDED[output] = kinds
        return output

    return declare


INLINE = frozenset({PingPort, Rates, SequenceCounts})
"""Named tuples whose fields stand in place of a field that holds one."""


class ErrorOutput(TypedDict):
    """A command that ended without a result. Stderr has the sentence, too."""

    error: str
    """Sentence for people, whose words may change."""
    status: int
    """Exit status of the command."""


# --- mcast info --------------------------------------------------------------------------


class PortOutput(TypedDict):
    """A port of a device."""

    device: str
    """Name of the device."""
    port: int
    """Number of the port, from 1."""
    state: str
    """Name of the state in ibv_port_state, such as ACTIVE."""
    link_layer: Literal["InfiniBand", "Ethernet"]
    mtu: int
    """Active MTU in bytes: maximum payload of a message."""
    rate: float
    """Gbit/s."""
    addresses: list[str]
    """IP addresses."""
    driver: str | None
    """Driver of the device; null if unknown or if there is none."""
    no_multicast: str | None
    """Reason why the device cannot do multicast; null if it can."""


class LeftOutDevice(TypedDict):
    """A device that cannot be used."""

    device: str
    """Name of the device."""
    reason: str
    """Kind of the problem, such as "port down"."""
    detail: str
    """Finding, a sentence."""
    fix: str
    """Command or step that repairs it."""


class ProviderOutput(TypedDict):
    """A provider on this host."""

    available: bool
    """True if the provider can be opened."""
    detail: str
    """Finding, a sentence."""
    reason: str | None
    """Kind of the problem, such as "no device"; null if it is available."""
    fix: str | None
    """Command or step that makes it available; null if there is nothing to repair."""
    ports: list[PortOutput]
    left_out: list[LeftOutDevice]
    """Devices that the provider leaves out."""
    clients: list[ClientProcess]
    """Other processes on the provider's network, where that is known."""


class InfoOutput(TypedDict):
    """Providers on this host, and their ports."""

    version: str
    """Version of mcast."""
    python: str
    """Version of Python."""
    system: str
    """Name, release and architecture of the operating system."""
    providers: dict[str, ProviderOutput]
    """Name of the provider -> its state."""


# --- mcast doctor ------------------------------------------------------------------------


class DoctorOutput(TypedDict):
    """Findings about this host."""

    problems: int
    """Number of problems."""
    warnings: int
    """Number of warnings."""
    providers: dict[str, list[Finding]]
    """Name of the provider -> its findings."""


@extends(Cause)
class CauseOutput(TypedDict):
    """A row of the errno atlas."""

    phase: str
    """Step in which the error happens, such as join; "any"."""
    errno: str
    """Name of the errno."""
    where: str
    """Calls, link layer and status that the row is for; "everywhere"."""
    source: str
    """Source of this knowledge."""


class ExplanationOutput(TypedDict):
    """Causes of the error that was given, the likeliest of each phase first."""

    explained: str
    """The error as it was given."""
    causes: list[CauseOutput]


# --- mcast groups ------------------------------------------------------------------------


class GroupMemberOutput(TypedDict):
    """A member of a group."""

    port: str
    """Port of the member, as the tables name it."""
    seen_in: list[Literal["host", "switch", "sa"]]
    """Tables that have the member: the host's own list, the switch's snooping table, the SA's table."""
    send_only: bool
    """True if the port only sends to the group."""


class GroupOutput(TypedDict):
    """A group that exists."""

    group: str
    """IPv4 group of the MGID; the MGID if it stands for none."""
    mgid: str
    mlid: int
    """MLID on InfiniBand, 0 on Ethernet."""
    members: list[GroupMemberOutput]


class GroupsOutput(TypedDict):
    """Groups and their members, as far as this host can see."""

    backend: str
    """Name of the provider."""
    groups: list[GroupOutput]
    unseen: list[str]
    """Members that cannot be seen from here, in sentences."""
    clients: list[ClientProcess]
    """Other processes on the provider's network, where that is known."""


# --- mcast mgid --------------------------------------------------------------------------


class LinkLayerSection(TypedDict):
    """An address on one link layer; fields that do not apply are left out."""

    title: str
    """Link layer, and the way to join."""
    mgid: NotRequired[str | None]
    """MGID; null if the link layer refuses the group."""
    refused: NotRequired[str]
    """Kind of group that is refused, and what to do instead."""
    ip: NotRequired[str]
    """Destination address in the IP header."""
    udp_port: NotRequired[int]
    """Destination port in the UDP header."""
    mac: NotRequired[str]
    """Destination MAC address."""
    flags: NotRequired[int]
    """Flags of the MGID, 4 bits."""
    scope: NotRequired[int]
    """Scope of the MGID, 4 bits."""
    signature: NotRequired[int]
    """Signature in the MGID, 16 bits."""
    pkey: NotRequired[int]
    """P_Key."""
    qkey: NotRequired[int | None]
    """Q_Key; null for that of the IPoIB broadcast group."""
    mlid: NotRequired[int | None]
    """MLID; 0 on Ethernet, null where the SA chooses it."""
    stands_for: NotRequired[str | list[str]]
    """Groups that the MGID or the MAC address stands for: a list of groups, or a sentence."""
    as_ipv6_group: NotRequired[str]
    """MGID that the given one becomes if it is joined as an IPv6 group."""


class AddressOutput(TypedDict):
    """Explanation of one address."""

    given: str
    kind: str
    """Kind of the address, in words."""
    meaning: str
    """Purpose of such addresses, in words; may be empty."""
    sections: list[LinkLayerSection]
    shared: list[SharedName]


class CollisionOutput(TypedDict):
    """An MGID or a MAC address that several of the given addresses have."""

    same: str
    """Link layer and kind of address."""
    name: str
    """The MGID or the MAC address."""
    addresses: list[str]
    """The addresses that were given."""


class MgidOutput(TypedDict):
    """Addresses of groups on each link layer."""

    addresses: list[AddressOutput]
    collisions: list[CollisionOutput]


# --- mcast demo, send, recv --------------------------------------------------------------


class DemoReceiver(TypedDict):
    """A receiver in this process."""

    device: str
    port: int
    """Number of the port, from 1."""
    address: str
    """IP address."""
    bytes: int
    """Bytes that the receiver has."""
    lost: int
    """Segments that it asked for again."""
    seconds: float
    """Time until its copy was verified; 0 without one."""
    bytes_per_second: float
    blake3: str | None
    """Digest of its copy, in hexadecimal; null without a copy."""
    outcome: str
    """"verified", or the reason why not."""
    verified: bool
    """True if the copy is complete and equal to what was sent."""


class DemoOutput(TypedDict):
    """A file that was multicast in this process."""

    backend: str
    """Name of the provider."""
    file: str | None
    """Path of the file; null for one that was generated."""
    size: int
    """Bytes of the file."""
    blake3: str
    """Digest of the file, in hexadecimal."""
    group: str
    sender: str
    """IP address of the sender."""
    message_size: int
    """Maximum payload of a message, in bytes."""
    messages: int
    """Source segments of the file."""
    sent_again: int
    """Segments, source and parity, sent in addition."""
    receivers: list[DemoReceiver]


class SentFile(TypedDict):
    """A file or a folder that was sent."""

    name: str
    """Path as the receivers see it."""
    kind: Literal["file", "folder"]
    size: int | None
    """Bytes of the file; null for a stream that was cut short."""
    offered: int
    """Bytes that were read from it."""
    blake3: str | None
    """Digest in hexadecimal; null if the object was cut short."""
    strategy_met: bool
    """True if the strategy's promise was kept for this file."""


class SendReceiver(TypedDict):
    """A receiver, over all files."""

    name: str
    """Name that the receiver gives itself."""
    address: str
    verified: bool
    """True if the receiver has verified every file."""
    outcome: str
    """"verified", or the first reason why not."""
    asked: int
    """Segments that it asked for again."""
    missed: dict[str, str]
    """Name of a file that it lacks -> reason."""


class SendOutput(TypedDict):
    """Files that were sent, and the receivers that have them."""

    backend: str
    """Name of the provider."""
    group: str
    device: str
    port: int
    """Number of the port, from 1."""
    sender: str
    """IP address of the sender."""
    size: int
    """Bytes that were read from all files."""
    strategy_met: bool
    """True if the strategy's promise was kept for each file; then the exit status is 0."""
    cycles: int
    """Complete cycles of a carousel; 0 for other strategies."""
    parity: bool
    """True if losses were repaired by parity, False if by source segments again."""
    segments: int
    """Source segments of all files."""
    sent_again: int
    """Segments, source and parity, sent in addition."""
    skipped: int
    """Segments that were not sent because all receivers had them from an earlier run."""
    seconds: float
    bytes_per_second: float
    files: list[SentFile]
    left_out: dict[str, str]
    """Path of what is not sent of a folder -> reason, such as "a named pipe"."""
    receivers: list[SendReceiver]
    rejected: dict[str, int]
    """Reason -> number of messages that were rejected."""


class ReceivedFile(TypedDict):
    """A file or a folder that was received and verified."""

    name: str
    kind: Literal["file", "folder"]
    size: int
    """Bytes; 0 for a folder."""
    blake3: str
    """Digest in hexadecimal."""


class RecvOutput(TypedDict):
    """Files that were received."""

    backend: str
    """Name of the provider."""
    output: str
    """Path that was written to; "stdout"."""
    verified: bool
    """True if everything arrived and was verified; then the exit status is 0."""
    failure: str
    """Reason of a failure; "" without one."""
    group: str
    device: str
    port: int
    """Number of the port, from 1."""
    receiver: str
    """IP address of the receiver."""
    sender: str
    """Name that the sender gives itself."""
    sender_address: str
    """Source address of the sender."""
    size: int
    """Bytes of the files that arrived."""
    seconds: float
    bytes_per_second: float
    files: list[ReceivedFile]
    missed: dict[str, str]
    """Name of a file that is missing -> reason."""
    rejected: dict[str, int]
    """Reason -> number of messages that were rejected."""


# --- mcast listen, top, record, replay ---------------------------------------------------


class ListenOutput(TypedDict):
    """A message that was received."""

    time: float
    """Time at which it was read, in seconds since 1970."""
    source: str
    """IPv4 address or GID of the sender."""
    qp: int
    """Number of the sender's queue pair."""
    group: str
    """IPv4 group; the MGID if it stands for none."""
    bytes: int
    """Bytes of the payload."""
    text: str | None
    """Payload as text; null if it is not UTF-8."""
    hex: str
    """Payload in hexadecimal."""
    number: int | None
    """Number that the sender gave the message; null if it numbers none."""
    missing: list[tuple[int, int]]
    """First and last number of each gap that ends before this message."""


class ReceiveQueueOutput(TypedDict):
    """The receive queue."""

    depth: int
    """Receives of the queue pair."""
    free: int
    """Receives that are free now."""
    low_water: int
    """Minimum of free receives so far."""
    empty: int | None
    """Times that no receive was free; null where this is unknown."""


class TopOutput(TypedDict):
    """Sample of what sources send to groups, and of what is lost."""

    time: float
    """Time at which it was taken, in seconds since 1970."""
    seconds: float
    """Seconds since the last sample."""
    groups: list[GroupRates]
    receive_queue: ReceiveQueueOutput
    dropped: dict[str, int]
    """Reason -> messages lost or not delivered since the start."""
    port_counters: dict[str, int]
    """Counters of the port under the device's own names."""
    events: list[str]
    """Events since the last sample, in words."""
    clients: list[ClientProcess]
    """Other processes on the provider's network, where that is known."""


class RecordOutput(TypedDict):
    """Recording of messages in a capture file."""

    backend: str
    """Name of the provider."""
    file: str
    """Output file; "-" for stdout."""
    groups: list[str]
    device: str
    port: int
    """Number of the port, from 1."""
    messages: int
    bytes: int
    """Bytes of payload."""
    sources: int
    """Number of queue pairs that sent."""
    seconds: float
    dropped: dict[str, int]
    """Reason -> messages that are not in the file."""
    receive_empty: int | None
    """Times that no receive was free, so that messages may be missing; null where this is unknown."""


class ReplayedGroup(TypedDict):
    """A group of the capture."""

    recorded: str
    """MGID in the file."""
    group: str
    """Group that its messages were sent to."""
    messages: int


class ReplayOutput(TypedDict):
    """Messages of a capture that were sent again."""

    backend: str
    """Name of the provider."""
    file: str
    """Capture file; "-" for stdin."""
    sender: str
    """IP address of the sender."""
    device: str
    port: int
    """Number of the port, from 1."""
    groups: list[ReplayedGroup]
    sent: int
    """Number of messages."""
    seconds: float
    recorded_seconds: float
    """Time from the first message of the file to the last."""
    longest_pause_seconds: float
    """Longest time between two messages of the file."""
    skipped: dict[str, int]
    """Reason -> packets of the file that were left out."""


# --- mcast bench -------------------------------------------------------------------------


@extends(BenchResult)
class BenchOutput(TypedDict):
    """A measurement by one command, or by the ranks of an MPI job."""

    intervals: list[IntervalResult]
    """With --interval."""


@extends(IntervalResult)
class BenchEndOutput(TypedDict):
    """A measurement by --server or --client."""

    role: Literal["server", "client"]
    backend: str
    """Name of the provider."""
    group: str
    device: str
    port: int
    """Number of the port, from 1."""
    address: str
    """IP address."""
    size: NotRequired[int]
    """Bytes of a message; of a client."""
    receivers: NotRequired[list[PingedMember]]
    """Servers that answered before the measurement; of a client."""
    intervals: list[IntervalResult]
    """With --interval."""


# --- mcast conformance -------------------------------------------------------------------

Outcome = Literal["passed", "failed", "not-applicable", "deviation"]


class CellOutput(TypedDict):
    """A clause or a fact on a provider."""

    outcome: Outcome
    tests: list[str]
    """Names of the tests that show it."""
    reason: str | None
    """Reasons of tests that did not pass; null without one."""


class ConformanceOutput(TypedDict):
    """Outcome of each clause and fact on each provider."""

    providers: dict[str, dict[str, CellOutput]]
    """Name of the provider -> id of the clause or fact -> outcome."""
    unavailable: dict[str, str]
    """Name of a provider that cannot run here -> reason, and what to do."""
    results: list[tuple[str, str | None, list[str], Outcome | Literal["skipped"], str]]
    """Each test: its name, the provider (null: for all), ids of clauses and facts, outcome, reason."""
    hosts: dict[str, str]
    """Name of the provider -> Python and kernel with which it was tested; with --lab those of the guest."""


# --- mcast sim ---------------------------------------------------------------------------


class SimRunOutput(TypedDict):
    """Result of a scenario."""

    scenario: Scenario
    """The scenario with all its defaults."""
    members: list[MemberResult]
    seen: list[ObservedEvent]
    """Events in the order of time."""


OUTPUTS: dict[str, object] = {
    "info": InfoOutput,
    "doctor": DoctorOutput | ExplanationOutput,
    "demo": DemoOutput,
    "send": SendOutput,
    "recv": RecvOutput,
    "ping": PingResult | AnswerResult,
    "groups": GroupsOutput,
    "mgid": MgidOutput,
    "listen": ListenOutput,
    "top": TopOutput,
    "record": RecordOutput,
    "replay": ReplayOutput,
    "bench": BenchOutput | BenchEndOutput,
    "conformance": ConformanceOutput,
    "sim cast": TransferCosts,
    "sim run": SimRunOutput,
}
"""Command with --json -> what it prints. A union has one type for each use of the command."""

LINES = ("listen", "top")
"""Commands that print an object on each line, without an end."""
