"""Pictures of the documentation, as SVG: drawn when the site is built, where they can be from the code.

Colours are those of the text, so that a picture suits a light and a dark page. The README's picture is a
file, which cannot know the colours of the page around it, and so has a background of its own.

usage: python scripts/pictures.py    writes the README's picture
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WIDTH, LINE, PAD = 720, 17, 10
NARROW = 360
"""Width of a picture whose text is at least 11 pixels high on a screen of 400 pixels."""

_GAP = 8


def svg(height: float, label: str, parts: Iterable[str], width: int = WIDTH) -> str:
    """A picture of the page's width; where the page is narrower than a wide one, its reader scrolls."""
    return (
        f'<div class="picture"><svg viewBox="0 0 {width} {height:g}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg></div>"
    )


def box(x: float, y: float, width: float, height: float, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="currentColor" '
        f'fill-opacity="0.04" stroke="currentColor" stroke-opacity="0.5"{dashes}/>'
    )


_HALO = ' stroke="var(--md-default-bg-color)" stroke-width="5" paint-order="stroke"'
"""Style of words that cross a line: the background around them hides it."""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    style = {"": "", "code": ' font-family="monospace"', "bold": ' font-weight="700"', "halo": _HALO}[kind]
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="currentColor" font-size="12.5"{style}>'
        f"{escape(words)}</text>"
    )


# --- hosts, a switch and a group ------------------------------------------------------------------


def group(_: str) -> str:
    """Draw a sender, a switch that copies its messages, and three hosts, of which two are members."""
    hosts = ((60, "host 2", "member"), (180, "host 3", "member"), (300, "host 4", "no member"))
    parts = [
        box(100, 1, 160, 62),
        text(180, 19, "host 1", "bold", "middle"),
        text(180, 36, 'group.send(b"…")', "code", "middle"),
        text(180, 53, "card: queue pair", "", "middle"),
        arrow_down(180, 64, 96),
        text(190, 84, "one message"),
        box(20, 98, 320, 42),
        text(180, 115, "switch", "bold", "middle"),
        text(180, 132, "239.1.1.1: ports 2 and 3", "", "middle"),
    ]
    for x, name, what in hosts:
        member = what == "member"
        parts += [arrow_down(x, 141, 181)] if member else [text(x, 166, "no copy", "", "middle")]
        parts += [box(x - 55, 183, 110, 62, dashed=not member), text(x, 201, name, "bold", "middle")]
        parts.append(text(x, 218, "group.recv()" if member else "", "code", "middle"))
        parts.append(text(x, 235, what, "", "middle"))
    return svg(247, "A switch copies one message of host 1 to the two members of the group", parts, NARROW)


def arrow_down(x: float, y: float, to: float) -> str:
    return line(f"M{x:g} {y:g}V{to:g}M{x - 4:g} {to - 7:g}L{x:g} {to:g}L{x + 4:g} {to - 7:g}")


def line(shape: str, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="3 4" stroke-opacity="0.4"' if dashed else ' stroke-opacity="0.7"'
    return f'<path d="{shape}" fill="none" stroke="currentColor" stroke-width="1.2"{dashes}/>'


# --- sequence diagrams ----------------------------------------------------------------------------


class Signal(NamedTuple):
    """A row of a sequence diagram: an arrow with words above it.

    source   number of the actor where the arrow begins
    targets  actors where it has a head; without any, the words are a note beside `source`
    lost     actors that the signal does not reach, marked by a cross
    """

    source: int
    targets: Sequence[int]
    words: str
    lost: Sequence[int] = ()


class SequenceDiagram(NamedTuple):
    """A sequence diagram: label, actors from left to right, signals from top to bottom."""

    label: str
    actors: Sequence[str]
    signals: Sequence[Signal]


SEQUENCES = {
    "join": SequenceDiagram(
        "A join, from the call to the membership",
        ("program", "mcast", "kernel", "fabric"),
        (
            Signal(0, [1], "Endpoint.join"),
            Signal(1, [2], "CmId.join_multicast_ex"),
            Signal(2, [3], "IGMP report, or request to the SA"),
            Signal(3, [2], "InfiniBand alone: MLID, Q_Key"),
            Signal(2, [1], "event: MULTICAST_JOIN"),
            Signal(1, [2], "attach the queue pair"),
            Signal(1, [0], "Membership"),
        ),
    ),
    "transfer": SequenceDiagram(
        "A transfer of one object to two receivers",
        ("sender", "receiver A", "receiver B"),
        (
            Signal(0, [1, 2], "OFFER, every 0.1 s"),
            Signal(1, [0], "JOIN"),
            Signal(2, [0], "JOIN"),
            Signal(0, [1, 2], "ADMIT: A and B are members"),
            Signal(0, [1, 2], "DESCRIBE: size, segment, k, name"),
            Signal(0, [1, 2], "DATA: block 0, source segments 0 to 6"),
            Signal(0, [2], "DATA: segment 7", lost=[1]),
            Signal(0, [1], "DATA: segment 8", lost=[2]),
            Signal(0, [1, 2], "SEAL: BLAKE3 digest of block 0"),
            Signal(2, [1, 0], "NACK: block 0 needs 1 segment"),
            Signal(1, [], "A needs 1, too, and sends nothing"),
            Signal(0, [1, 2], "DATA: 1 parity segment repairs both"),
            Signal(0, [1, 2], "FLUSH: all is sent; who has it?"),
            Signal(1, [0], "ACK: complete"),
            Signal(2, [0], "ACK: complete"),
            Signal(0, [1, 2], "DONE: A and B have it"),
        ),
    ),
}

_ROW = 34


def sequence(name: str) -> str:
    """Draw a sequence diagram of `SEQUENCES`."""
    label, actors, signals = SEQUENCES[name]
    each = NARROW / len(actors)
    places = [each * (at + 0.5) for at in range(len(actors))]
    height = 40 + _ROW * len(signals)
    parts = []
    for x, actor in zip(places, actors, strict=True):
        parts += [line(f"M{x:g} 26V{height:g}", dashed=True), box(x - each / 2 + 4, 1, each - 8, 25)]
        parts.append(text(x, 18, actor, "bold", "middle"))
    for row, signal in enumerate(signals):
        y = 62.0 + _ROW * row
        parts += _signal(signal, places, y)
    return svg(height, label, parts, NARROW)


def _signal(signal: Signal, places: Sequence[float], y: float) -> list[str]:
    start, ends = places[signal.source], [places[at] for at in (*signal.targets, *signal.lost)]
    left, right = min([start, *ends]), max([start, *ends])
    middle = min(max((left + right) / 2, 3.3 * len(signal.words)), NARROW - 3.3 * len(signal.words))
    parts = [text(middle, y - 5, signal.words, "halo", "middle")]
    if not ends:
        return parts
    toward = 1 if ends[0] > start else -1
    furthest = max(ends, key=lambda x: abs(x - start))
    shape = f"M{start:g} {y:g}H{furthest:g}"
    for at in signal.targets:
        x = places[at]
        shape += f"M{x - 7 * toward:g} {y - 4:g}L{x:g} {y:g}L{x - 7 * toward:g} {y + 4:g}"
    for at in signal.lost:
        x = places[at] - 12 * toward
        shape += f"M{x - 4:g} {y - 4:g}L{x + 4:g} {y + 4:g}M{x - 4:g} {y + 4:g}L{x + 4:g} {y - 4:g}"
    return [*parts, line(shape)]


# --- the life of a message ------------------------------------------------------------------------

STAGES = (
    ("your program", "Membership.send", "too large: MessageTooLarge"),
    ("send queue", "queue pair of the sender", ""),
    ("sender's card", "reads the payload", ""),
    ("switches", "a copy for each member's port", "member not known"),
    ("receiver's card", "queue pairs that are attached", "not attached, wrong Q_Key"),
    ("receive queue", "uses one posted receive", "no receive is free"),
    ("their program", "Membership.recv", ""),
)
"""Stages of a message: where, what happens, and why it may end there."""


def message(_: str) -> str:
    """Draw the stages of a message, and beside them where it is lost."""
    parts, y = [], 1.0
    for number, (where, what, lost) in enumerate(STAGES):
        parts += [box(1, y, 206, 44), text(10, y + 18, where, "bold")]
        parts.append(text(10, y + 35, what, "code" if "." in what else ""))
        if lost:
            words = wrapped(("refused: " if not number else "lost: ") + lost, 21)
            parts += [line(f"M208 {y + 22:g}H222")]
            parts += [
                text(227, y + 27 - LINE * (len(words) - 1) / 2 + LINE * at, one)
                for at, one in enumerate(words)
            ]
        if number:
            parts.append(arrow_down(104, y - 14, y - 1))
        y += 60
    return svg(y - 14, "The stages of a message, and where it can be lost", parts, NARROW)


def wrapped(words: str, width: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


# --- what stands in what ------------------------------------------------------------------------


class Box(NamedTuple):
    """A thing that others stand in, one below the other, or beside each other where `beside`."""

    words: Sequence[str]
    inside: Sequence[Box] = ()
    beside: bool = False
    dashed: bool = False


def nested(label: str, part: Box, width: int = NARROW) -> str:
    height, parts = _draw(part, 0.5, 0.5, width - 1)
    return svg(height + 1, label, parts, width)


def _draw(part: Box, x: float, y: float, width: float) -> tuple[float, list[str]]:
    """The height that the box takes, and its parts."""
    parts = [
        text(x + PAD, y + LINE * (line + 1), words, "" if line else "bold")
        for line, words in enumerate(part.words)
    ]
    inner = y + LINE * len(part.words) + PAD
    if part.beside:
        each = (width - PAD) / len(part.inside) - PAD
        drawn = [_draw(one, x + PAD + at * (each + PAD), inner, each) for at, one in enumerate(part.inside)]
        inner += max(height for height, _ in drawn) + PAD
    else:
        drawn = []
        for one in part.inside:
            drawn.append(_draw(one, x + PAD, inner, width - 2 * PAD))
            inner += drawn[-1][0] + PAD
    for _, found in drawn:
        parts += found
    height = inner - y
    return height, [box(x, y, width, height, part.dashed), *parts]


# --- the lab ------------------------------------------------------------------------------------


class Passage(NamedTuple):
    """Connection of this machine with a guest of the lab: the end here, the way, the end there."""

    here: Sequence[str]
    way: Sequence[str]
    ends: str
    """Where the arrow has heads: "<", ">" or both."""
    there: Sequence[str]


PASSAGES = (
    Passage(
        ["a kernel", "of /boot, or fetched from the", "distribution; unpacked once"],
        ["QEMU", "starts it"],
        ">",
        ["the kernel runs", "emulated, or by KVM", "where KVM works"],
    ),
    Passage(
        ["an initramfs, made anew", "busybox, ip, rdma,", "the kernel's own modules"],
        ["in its", "memory"],
        ">",
        ["guest.sh is init", "makes bridge, ports and", "Soft-RoCE devices; waits"],
    ),
    Passage(
        ["~/.cache/rdma-lab/guests", "the guest as it waits,", "if it is emulated"],
        ["kept;", "later resumed"],
        "<>",
        ["the guest goes on", "with the time of now, and", "random numbers of its own"],
    ),
    Passage(
        ["the files of this machine", "as they are"],
        ["9p,", "only read"],
        ">",
        ["an overlay on them", "what is written stays in", "the guest's memory"],
    ),
    Passage(["directories of --share"], ["9p"], "<>", ["the same directories", "written through"]),
    Passage(
        ["softib.ko", "built once for the kernel,", "from this package's sources"],
        ["InfiniBand", "alone"],
        ">",
        ["HCAs and switches", "OpenSM, then IPoIB: ready", "when each port is active"],
    ),
    Passage(
        ["rdma-lab run", "its output, its exit status,", "its limits in time"],
        ["virtio ports", "out, err, ctl"],
        "<",
        ["your command", "in the same directory, with", "the same environment"],
    ),
    Passage(
        ["its last lines", "are in the error, if", "the guest panics"],
        ["serial line"],
        "<",
        ["the kernel's log", "an oops is a panic, and", "ends the run"],
    ),
)


def lab_run(_: str) -> str:
    """A run of the lab, from top to bottom: what passes between this machine and the guest."""
    side, way = 270, WIDTH - 2 * 270
    parts = [
        text(PAD, 14, "this machine", "bold"),
        text(side + way + PAD, 14, "the guest, in QEMU", "bold"),
    ]
    y = 24.0
    for here, words, ends, there in PASSAGES:
        tall = max(len(here), len(there)) * LINE + PAD
        for x, lines in ((0.5, here), (side + way - 0.5, there)):
            parts.append(box(x, y, side, tall))
            parts += [
                text(x + PAD, y + LINE * (line + 1), one, "" if line else "bold")
                for line, one in enumerate(lines)
            ]
        middle = y + tall / 2
        parts.append(arrow(side + 8, side + way - 8, middle, ends))
        above, *below = words
        parts.append(text(WIDTH / 2, middle - 6, above, anchor="middle"))
        parts += [text(WIDTH / 2, middle + LINE, one, anchor="middle") for one in below]
        y += tall + _GAP
    return svg(y, "A run of the lab", parts)


def arrow(left: float, right: float, y: float, ends: str) -> str:
    """A level line with a head at the left ("<"), at the right (">"), or at both."""
    heads = [(left, 7)] if "<" in ends else []
    heads += [(right, -7)] if ">" in ends else []
    shape = "".join(f"M{x + by:g} {y - 4:g}L{x:g} {y:g}L{x + by:g} {y + 4:g}" for x, by in heads)
    return (
        f'<path d="M{left:g} {y:g}H{right:g}{shape}" fill="none" stroke="currentColor" '
        f'stroke-opacity="0.7" stroke-width="1.2"/>'
    )


def lab(kind: str) -> str:
    """Draw the parts of a guest of the lab; `kind` is roce or infiniband."""
    from rdma_lab.machine import PORTS

    numbers = range(1, PORTS + 1)
    program = Box(
        ["your command", "with your files, your environment and its exit status; files are written to a copy"]
    )
    libraries = Box(["librdmacm, libibverbs", "of this distribution"])
    if kind == "roce":
        kernel = Box(
            [
                "the kernel of this distribution",
                "rdma_cm, ib_uverbs, and Soft-RoCE: RDMA devices in software",
            ],
            [Box([f"rxe{n}", f"on e{n}, 10.77.0.{n}"]) for n in numbers],
            beside=True,
        )
        fabric = Box(
            ["bridge br0, with IGMP snooping and a querier"],
            [Box([f"port p{n}", f"veth pair e{n}, p{n}"]) for n in numbers],
            beside=True,
        )
        inside = [program, libraries, kernel, fabric]
    else:
        kernel = Box(
            ["the kernel of this distribution", "rdma_cm, ib_uverbs, ib_ipoib, and softib: HCAs in software"],
            [Box([f"softib{n}", f"ib{n}, 10.77.0.{n}"]) for n in numbers],
            beside=True,
        )
        fabric = Box(["switches of softib", "forward by the tables that OpenSM has written"])
        inside = [program, libraries, Box(["OpenSM", "the subnet manager, on softib1"]), kernel, fabric]
    guest = Box(["QEMU guest: a virtual machine, emulated or by KVM"], inside)
    return nested(f"The lab, {kind}", Box(["this machine, without an RDMA card"], [guest]), WIDTH)


def parts(_: str) -> str:
    """Draw the layers: the program, the endpoint, the contract, the providers."""
    providers = Box(
        ["provider"],
        [
            Box(["rdma", "kernel, card"]),
            Box(["udp", "UDP sockets"]),
            Box(["sim", "in memory"]),
        ],
        beside=True,
    )
    above = [
        Box(["your program"]),
        Box(["endpoint: mcast.open_endpoint", "joins again, numbers, probes, counts"]),
        Box(["contract: mcast.api", "the same rules for every provider"]),
        providers,
    ]
    return nested("The parts", Box(["one process"], above))


# --- the life of a membership ---------------------------------------------------------------------

_PLACES = {
    "JOINING": (60, 24),
    "JOINED": (270, 24),
    "LOST": (270, 150),
    "FAILED": (60, 150),
    "LEFT": (165, 214),
}
"""Where the middle of each state's box is."""
_ACROSS, _DOWN = 50, 17
"""Half of a box."""


def life(_: str) -> str:
    """Draw the states of a membership, and the changes between them."""
    from mcast.endpoint.membership import TRANSITIONS, Change

    changes: dict[tuple[str, str], list[str]] = {}
    for (state, change), step in TRANSITIONS.items():
        if state is not step.state and change is not Change.LEAVE:
            words = change.name.lower().replace("_", " ")
            changes.setdefault((state.name, step.state.name), []).append(words)
    parts = [text(165, 249, "by leave, from any state", "", "middle")]
    for name, (x, y) in _PLACES.items():
        parts += [
            box(x - _ACROSS, y - _DOWN, 2 * _ACROSS, 2 * _DOWN),
            text(x, y + 5, name.lower(), "", "middle"),
        ]
    for (one, other), words_of_all in changes.items():
        parts += _change(_PLACES[one], _PLACES[other], words_of_all)
    return svg(256, "The life of a membership", parts, NARROW)


def _change(start: tuple[int, int], end: tuple[int, int], words: list[str]) -> list[str]:
    """From box to box, across with the words above, or down or up with the words beside it."""
    (x, y), (to_x, to_y) = start, end
    if y == to_y:
        left, right = min(x, to_x) + _ACROSS, max(x, to_x) - _ACROSS
        above = [
            text((left + right) / 2, y - 6 - 15 * at, word, "", "middle")
            for at, word in enumerate(words[::-1])
        ]
        return [arrow(left, right, y, ">" if x < to_x else "<"), *above]
    down = 1 if y < to_y else -1
    x += 15 * down  # two that are opposite stand apart
    y, to_y = y + _DOWN * down, to_y - _DOWN * down
    side = "start" if down > 0 else "end"
    beside = [
        text(x + 8 * down, (y + to_y) / 2 + 15 * at - 5, word, "", side) for at, word in enumerate(words)
    ]
    return [line(f"M{x} {y}V{to_y}M{x - 4} {to_y - 7 * down}L{x} {to_y}L{x + 4} {to_y - 7 * down}"), *beside]


# --- the README's picture -----------------------------------------------------------------------

OVERVIEW = ROOT / "docs" / "assets" / "overview.svg"

_STYLE = """<style>
svg { color: #1f2328; font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
.paper { fill: #ffffff; stroke: #d0d7de; }
.group { fill: #dfe7fd; stroke: #3f51b5; }
@media (prefers-color-scheme: dark) {
  svg { color: #e6edf3; }
  .paper { fill: #161b22; stroke: #3d444d; }
  .group { fill: #26345e; stroke: #8ea2f0; }
}
</style>"""

_RUNGS = (
    ("sim", "simulator", "one process"),
    ("udp", "UDP sockets", "any host"),
    ("lab", "real kernel", "no card"),
    ("rdma", "cards", "a cluster"),
)
"""Each step from a laptop to a cluster: its name, and two lines of words."""


def overview() -> str:
    """Draw one sender, a group and its receivers, and the four places where the program runs."""
    width, height = 400, 262
    parts = [
        f'<rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>',
        box(135, 14, 130, 34),
        text(200, 36, "one sender", "bold", "middle"),
        *_arrow_down(200, 48, 200, 70),
        '<rect class="group" x="40" y="71" width="320" height="32" rx="16"/>',
        text(200, 92, "group 239.1.1.1", "bold", "middle"),
    ]
    for x in (75, 200, 325):
        parts += [*_arrow_down(x, 103, x, 125), box(x - 50, 126, 100, 34)]
        parts.append(text(x, 148, "receiver", "", "middle"))
    parts.append(text(200, 185, "the same program, in four places", "", "middle"))
    each = (width - 5 * 8) / 4
    for at, (name, *words) in enumerate(_RUNGS):
        left = 8 + at * (each + 8)
        middle = left + each / 2
        parts += [box(left, 194, each, 60), text(middle, 212, name, "bold", "middle")]
        parts += [text(middle, 229 + 16 * line, word, "", "middle") for line, word in enumerate(words)]
    label = "A sender, a group and three receivers; the program runs on sim, udp, lab and rdma"
    head = f'width="{width * 3 // 2}" height="{height * 3 // 2}" viewBox="0 0 {width} {height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {head} role="img" aria-label="{label}">\n'
        + "\n".join([_STYLE, *parts])
        + "\n</svg>\n"
    )


def _arrow_down(x: float, y: float, to_x: float, to_y: float) -> list[str]:
    """A line with a head at its lower end."""
    head = f"M{to_x - 4:g} {to_y - 7:g}L{to_x:g} {to_y:g}L{to_x + 4:g} {to_y - 7:g}"
    shape = f"M{x:g} {y:g}L{to_x:g} {to_y:g}{head}"
    return [f'<path d="{shape}" fill="none" stroke="currentColor" stroke-opacity="0.7" stroke-width="1.2"/>']


if __name__ == "__main__":
    OVERVIEW.write_text(overview(), "utf-8")
