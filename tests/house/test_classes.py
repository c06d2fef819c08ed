"""How much one class is: the names that its users see, and the state that its methods share.

Read from the syntax tree. A value (a named tuple, a dataclass, a model, an enumeration, a protocol) may have
any number of fields; what has state has few attributes, or a reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from .test_rooms import FILES, ROOT

METHODS, ATTRIBUTES = 20, 10
"""The most that a class has without a reason. Inherited ones count where they are written."""

VALUES = {"NamedTuple", "BaseModel", "Enum", "IntEnum", "IntFlag", "Flag", "Protocol", "_Event", "_Snapshot"}

REASONS = {
    "backends/rdma/native Native": "a method for each function of the C core",
    "backends/rdma/channel RdmaChannel": "a channel in C, and what of Python has to live as long",
    "backends/rdma/cm_id RdmaCmId": "an id in C, and what of Python has to live as long",
    "backends/rdma/qp RdmaQueuePair": "a queue pair in C, and what of Python has to live as long",
    "backends/sim/core/cm CmaId": "the fields of the kernel's rdma_cm_id",
    "backends/sim/core/fabric Parts": "an attribute for each part of a fabric",
    "backends/sim/core/port Port": "the fields of a port, as hosts, switches and the SM know them",
    "backends/sim/core/qp Qp": "the fields of a queue pair: one message changes queue, counters and state",
    "backends/sim/core/sa SubnetAdmin": "the tables of OpenSM, and its options as the rules ask for them",
    "backends/sim/lease SimBatch": "slices of bursts, their slots, and what counts the views of each",
    "backends/sim/fabric Fabric": "a method for each fault of a port, a switch, the SM or a queue pair",
    "backends/sim/shared/session ClientSession": "the tables of what one client has open",
    "backends/sim/shared/connection Connection": "a socket, what is under way there, and the memory shared",
    "backends/sim/shared/client SharedQueuePair": "a queue pair of the server's, as it is known here",
    "backends/sim/shared/client SharedBackend": "the way to the fabric's process, and what is open there",
    "backends/sim/shared/client SharedEventChannel": "a channel of the server's, and what wakes who reads",
    "backends/sim/shared/incoming Incoming": "one queue pair's messages, and what says that there are any",
    "backends/sim/scenario/play _Member": "what a scenario's file says of a member, and what it has seen",
    "cast/nack/arriving Arriving": "the windows of one object: its edges, and the blocks between them",
    "cast/nack/members Member": "what a sender knows of one receiver",
    "cast/nack/play Play": "one run: the ends, what is under way between them, what it cost",
    "cast/nack/sender _Plan": "what a sender has to say, of each kind, and when",
    "cast/nack/receiver ObjectReceiver": "one end of the protocol: a message may change each of its fields",
    "cast/nack/outgoing Outgoing": "one object under way: its edges, and what waits for repair",
    "cast/nack/sender ObjectSender": "one end of the protocol: a message may change each of its fields",
    "cast/objects/receiving _Arrival": "one object that comes: where its bytes go, and what of it waits",
    "cast/objects/receiving ObjectsIn": "what one call of `receive` was given, and its sessions",
    "contract/queue_pair QueuePair": "the verbs of a queue pair",
    "endpoint/awaiting Endpoint": "the descriptors that an event loop watches, and who waits for each",
    "endpoint/membership EndpointGroup": "what users and the table of states know of one membership",
    "endpoint/receiving Receiving": "the parts that a batch passes, each made once",
    "endpoint/station Station": "what an endpoint opened at its place, for the parts that share it",
}
"""File and class -> why it has more."""


class Size(NamedTuple):
    """The public names of a class, and the attributes that its methods assign."""

    methods: frozenset[str]
    attributes: frozenset[str]

    @property
    def is_small(self) -> bool:
        return len(self.methods) <= METHODS and len(self.attributes) <= ATTRIBUTES


def assigned(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns, one by one."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        yield from target.elts if isinstance(target, ast.Tuple) else [target] if target else []


def size_of(node: ast.ClassDef) -> Size:
    methods, attributes = set[str](), set[str]()
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            methods.add(part.name)
            receiver = next((one.arg for one in part.args.posonlyargs + part.args.args), "")
            changes = (one for one in ast.walk(part) if isinstance(one, ast.Assign | ast.AnnAssign))
            for name in (name for one in changes for name in assigned(one)):
                if isinstance(name, ast.Attribute) and ast.unparse(name.value) == receiver:
                    attributes.add(name.attr)
        elif isinstance(part, ast.Assign | ast.AnnAssign):
            made = isinstance(part.value, ast.Call)  # a function, by another
            (methods if made else attributes).update(ast.unparse(name) for name in assigned(part))
    attributes -= {"_ended_by", "__del__", "__slots__"} | {name for name in attributes if name.isupper()}
    return Size(frozenset(name for name in methods if not name.startswith("_")), frozenset(attributes))


def sizes(text: str) -> Iterator[tuple[str, Size]]:
    """Each class of a text that is no value."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
            made = {ast.unparse(one).partition("(")[0] for one in node.decorator_list}
            if not (bases & VALUES or made & {"dataclass"}):
                yield node.name, size_of(node)


def test_a_class_is_small_or_says_why_not() -> None:
    large = {
        f"{file} {name}": size
        for file in FILES
        for name, size in sizes((ROOT / f"{file}.py").read_text())
        if not size.is_small
    }
    assert {name: size for name, size in large.items() if name not in REASONS} == {}
    assert REASONS.keys() - large.keys() == set(), "they are small: their reasons can go"


def test_names_and_state_are_seen() -> None:
    methods = "\n".join(f"    def m{number}(self): self.b, self.c = 1, 2" for number in range(METHODS))
    text = (
        f"class Large:\n    a: int = 1\n    more = decorated(function)\n{methods}\n    def _n(self): pass\n"
    )
    ((name, size),) = sizes(text)
    assert (name, size.is_small, len(size.methods)) == ("Large", False, METHODS + 1)
    assert size.attributes == {"a", "b", "c"}
    state = "\n".join(f"        self.a{number}: int = 0" for number in range(ATTRIBUTES + 1))
    ((_, size),) = sizes(f"class State:\n    def __init__(self):\n{state}\n")
    assert (size.is_small, len(size.attributes)) == (False, ATTRIBUTES + 1)
    assert (
        list(sizes("class Value(NamedTuple):\n    a: int\n@dataclass(frozen=True)\nclass Other:\n    b: int"))
        == []
    )
