"""Pictures of the documentation, as SVG: drawn when the site is built, where they can be from the code.

Colours are those of the text, so that a picture suits a light and a dark page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WIDTH, LINE, PAD = 720, 17, 10

_STEP, _GAP = 210, 8
_COLUMN = (WIDTH - _STEP - 2 * _GAP) // 2


def svg(height: float, label: str, parts: Iterable[str]) -> str:
    """A picture of the page's width; where the page is narrower, its reader scrolls."""
    return (
        f'<div class="picture"><svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg></div>"
    )


def box(x: float, y: float, width: float, height: float, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="currentColor" '
        f'fill-opacity="0.04" stroke="currentColor" stroke-opacity="0.5"{dashes}/>'
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    style = {"": "", "code": ' font-family="monospace"', "bold": ' font-weight="700"'}[kind]
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="currentColor" font-size="12.5"{style}>'
        f"{escape(words)}</text>"
    )


# --- the path of a join, and of a message -------------------------------------------------------


class Step(NamedTuple):
    """A row of a path: what is done, and the names that do it in the simulator and in the real stack."""

    words: str
    simulator: list[str]
    real: list[str]


def path(heading: str) -> str:
    """Draw the path that docs/dev/layout.md has under `heading`."""
    steps = steps_of((ROOT / "docs/dev/layout.md").read_text("utf-8"), heading)
    parts = [text(_STEP + _GAP + PAD, 14, "simulator", "bold")]
    parts.append(text(_STEP + 2 * _GAP + _COLUMN + PAD, 14, "real stack", "bold"))
    y = 24.0
    for number, step in enumerate(steps, 1):
        words = wrapped(f"{number}. {step.words}", 30)
        tall = max(len(words), len(step.simulator), len(step.real)) * LINE + PAD
        parts += [text(0, y + LINE * (line + 1), one) for line, one in enumerate(words)]
        columns: list[tuple[int, int, list[str]]] = [(_STEP + _GAP, _COLUMN, step.simulator)]
        if step.real == ["the same"]:
            columns = [(_STEP + _GAP, WIDTH - _STEP - _GAP, step.simulator)]
        else:
            columns.append((_STEP + 2 * _GAP + _COLUMN, _COLUMN, step.real))
        for x, width, names in columns:
            parts.append(box(x, y, width, tall))
            parts += [
                text(
                    x + PAD,
                    y + LINE * (line + 1),
                    name,
                    "code" if re.search(r"\w[._]\w", name) and " " not in name else "",
                )
                for line, name in enumerate(names)
            ]
        y += tall + _GAP
    return svg(y, heading, parts)


def steps_of(page: str, heading: str) -> list[Step]:
    """The rows of the table under that heading."""
    section = page.partition(f"## {heading}\n")[2].partition("\n#")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*\|$", section, re.M)
    ]
    if len(rows) < 3:
        raise ValueError(f"docs/dev/layout.md has no table under {heading!r}")
    return [Step(words, names_in(simulator), names_in(real)) for words, simulator, real in rows[2:]]


def names_in(cell: str) -> list[str]:
    """The names of a cell, each on a line, without their files; a cell without names is words."""
    named = re.findall(r"`([\w.]+)` in `", cell)
    rest = re.sub(r"`[\w.]+` in `[\w./]+`(, called in `[\w./]+`)?,?|\(.*?\)", "", cell)
    words = " ".join(re.sub(r"`(?:\w+/)*([\w.]+)`", r"\1", rest).partition(", called in")[0].split()).strip(
        " ,;"
    )
    if named:
        return named + ([words] if words else [])
    return wrapped(words, 34)


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


def nested(label: str, part: Box) -> str:
    height, parts = _draw(part, 0.5, 0.5, WIDTH - 1)
    return svg(height + 1, label, parts)


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
    return nested(f"The lab, {kind}", Box(["this machine, without an RDMA card"], [guest]))


def parts(_: str) -> str:
    """Draw the layers: the program, the endpoint, the contract, the providers."""
    providers = Box(
        ["a provider"],
        [
            Box(["rdma", "librdmacm, libibverbs", "kernel, card, switches"]),
            Box(["sim", "a fabric in this process", "RoCE or InfiniBand"]),
            Box(["sim-shared", "a fabric that", "many processes share"]),
        ],
        beside=True,
    )
    above = [
        Box(["your program", "mcast.open_endpoint, or mcast.aio.open_endpoint"]),
        Box(["endpoint", "joins again, numbers messages, waits for members, counts"]),
        Box(["the contract, mcast.api", "the rules, which refuse what the real stack would do in silence"]),
        providers,
    ]
    return nested("The parts", Box(["one process"], above))
