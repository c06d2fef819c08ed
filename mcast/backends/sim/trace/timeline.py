"""A trace as one HTML page that needs no other file.

It shows the memberships over time, the lost messages, and the reason of each loss.

`timeline_data.py` decides what the page shows, and this file draws it. Times are virtual.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import chain, islice, pairwise
from string import Template
from typing import NamedTuple

from mcast.backends.sim.trace.events import Trace
from mcast.backends.sim.trace.timeline_data import Lane, Mark, Note, State, TimelineData, timeline_data
from mcast.wire.addresses import Gid

MAX_LANES, MAX_NOTES = 300, 1_000
"""Maximum number of lanes and notes that a page draws; its totals count everything."""
COLUMNS = 400
"""Number of columns of a page; marks in the same column become one."""
IDLE_SHARE = 0.25
"""A time in which nothing happens is cut short if it is more than this share of the rest."""
BREAK_WIDTH = 2.5
"""The width of such a cut, in percent."""
LETTER_WIDTH = 1.25
"""The width of a letter of a fault's name where the page is narrowest, in percent."""
NAME_ROWS = 6
"""Maximum number of rows of fault names; a fault without room has its name in its title alone."""


_COUNTED = (
    "Marks are what the fabric did with each copy. Numbers are what the applications counted: "
    "what was sent while a member waited for its membership is lost, too."
)


class Count(NamedTuple):
    """Message counts of a group, or of a member.

    `lost` maps each reason to a count; `expected` is 0 where it is not known.
    """

    sent: int
    received: int
    lost: Counter[str]
    expected: int = 0


_NOTHING = Count(0, 0, Counter())


class RunCounts(NamedTuple):
    """A run's own count, by queue pair; it stands on the page in place of the trace's.

    The trace knows what came to a queue pair. The run knows what each application wanted, so also what it
    missed while it was no member. `seconds` is how long the run was to last, `table` a row for each member.
    """

    seconds: float
    by_qp: dict[int, Count]
    table: Sequence[Sequence[str]]


def page(trace: Trace, title: str, counted: RunCounts | None = None) -> str:
    """The page. The same trace, and the same count, give the same page."""
    data = timeline_data(trace)
    axis = Axis(data.times)
    counts = {id(lane): _count(lane, counted) for lane in data.lanes}
    total = _sum(counts.values())
    lost = total.lost.total()
    groups: dict[Gid, list[Lane]] = defaultdict(list)
    for lane in data.lanes:
        groups[lane.group].append(lane)
    drawn = {id(lane) for lane in islice(chain.from_iterable(groups.values()), MAX_LANES)}
    template = Template(files("mcast.backends.sim.trace").joinpath("timeline.html").read_text("utf-8"))
    return template.substitute(
        title=escape(title),
        verdict=f"{lost:,} lost" if lost else "nothing lost",
        verdict_class="bad" if lost else "good",
        details=escape(
            f"{data.link_layer}, {len(data.ports)} ports, seed {data.seed}, "
            f"{f'{counted.seconds:g} s' if counted else duration(data.end)} of virtual time, "
            f"{len(trace):,} events"
        ),
        cards="".join(_cards(data, total)),
        ticks="".join(_ticks(axis)),
        lines="".join(_lines(axis, data.faults)),
        faults=_faults(axis, data.faults),
        control=_row("control", "SA, IGMP, events", _notes(axis, data.control)),
        groups="".join(
            _group(axis, data, group, [(lane, counts[id(lane)]) for lane in lanes], drawn)
            for group, lanes in groups.items()
        ),
        caption=_COUNTED if counted else "",
        undrawn=_undrawn(len(data.lanes) - len(drawn)),
        members=_members(counted),
        losses=_losses(data, counts, counted is None),
        notes=_note_table(sorted([*data.faults, *data.control], key=lambda note: note.t)),
    )


def _sum(counts: Iterable[Count]) -> Count:
    found = [_NOTHING, *counts]
    return Count(
        sum(count.sent for count in found),
        sum(count.received for count in found),
        sum((count.lost for count in found), Counter[str]()),
        sum(count.expected for count in found),
    )


def _count(lane: Lane, counted: RunCounts | None) -> Count:
    if counted is not None:
        return counted.by_qp.get(-1 if lane.qp is None else lane.qp, _NOTHING)
    lost: Counter[str] = Counter()
    for mark in lane.lost:
        lost[mark.reason] += mark.messages
    sent, received = (sum(mark.messages for mark in marks) for marks in (lane.sent, lane.received))
    return Count(sent, received, lost)


def duration(ns: int) -> str:
    """A time, in the unit that suits it."""
    for size, unit in ((10**9, "s"), (10**6, "ms"), (10**3, "µs")):
        if ns >= size:
            return f"{ns / size:.6g} {unit}"
    return f"{ns} ns" if ns else "0"


class Axis:
    """Where a time stands, in percent of the width; long times in which nothing happens are cut short."""

    def __init__(self, times: Sequence[int]) -> None:
        self.times: list[int] = sorted({0, *times})
        self.end: int = self.times[-1]
        left = self.end
        self.breaks: list[tuple[int, int]] = []
        for length, start, stop in sorted(((b - a, a, b) for a, b in pairwise(self.times)), reverse=True):
            if len(self.times) < 8 or length <= left * IDLE_SHARE:
                break
            self.breaks.append((start, stop))
            left -= length
        self.breaks.sort()
        self._scale = (100 - BREAK_WIDTH * len(self.breaks)) / max(left, 1)
        self._knots = [(0, 0.0)]
        for start, stop in self.breaks:
            at = self.at(start)
            self._knots += [(start, at), (stop, at + BREAK_WIDTH)]

    def at(self, t: int) -> float:
        index = bisect_right(self._knots, t, key=lambda knot: knot[0]) - 1
        start, left = self._knots[index]
        if index % 2:
            return left + BREAK_WIDTH * (t - start) / (self._knots[index + 1][0] - start)
        return left + (t - start) * self._scale

    def ticks(self) -> list[int]:
        """Times worth a label: round ones, and where time goes on after a cut; none too near to another."""
        step = _round_step((100 / max(self._scale, 1e-12)) / 7)
        edges = [stop for _, stop in self.breaks]
        inside = [start for start, _ in self.breaks]
        rounds = [t for t in self._rounds(step) if not any(a < t < b for a, b in self.breaks)]
        chosen: list[int] = []
        for t in [0, *edges, *rounds, *inside]:
            if all(abs(self.at(t) - self.at(other)) > 8 for other in chosen) and self.at(t) < 96:
                chosen.append(t)
        return sorted(chosen)

    def _rounds(self, step: int) -> Iterator[int]:
        """Multiples of the step, cuts left out."""
        t = 0
        while t <= self.end:
            yield t
            cut = next((stop for start, stop in self.breaks if start < t + step < stop), None)
            t = t + step if cut is None else -(-cut // step) * step


def _round_step(ns: float) -> int:
    step = 1
    while step * 10 <= ns:
        step *= 10
    return next(step * factor for factor in (1, 2, 5, 10) if step * factor >= ns)


# --- parts of the page -------------------------------------------------------------------


def _cards(data: TimelineData, total: Count) -> Iterator[str]:
    members = [lane for lane in data.lanes if lane.id is not None]
    lost = total.lost.total()
    due = ((total.expected, "copies expected", ""),) if total.expected else ()
    groups = len({lane.group for lane in members})
    for number, words, kind in (
        (groups, "group" if groups == 1 else "groups", ""),
        (len(members), "member" if len(members) == 1 else "members", ""),
        (total.sent, "messages sent", ""),
        *due,
        (total.received, "copies received", "good"),
        (lost, "copies lost", "bad" if lost else ""),
        (len(data.faults), "faults", "fault" if data.faults else ""),
    ):
        yield f'<article class="{kind}"><b>{number:,}</b><span>{words}</span></article>'


def _ticks(axis: Axis) -> Iterator[str]:
    for t in axis.ticks():
        yield f'<span class="tick" style="left:{axis.at(t):.3f}%">{duration(t)}</span>'
    for start, stop in axis.breaks:
        yield (
            f'<i class="cut" style="left:{axis.at(start):.3f}%;width:{BREAK_WIDTH}%" '
            f'title="{duration(stop - start)} in which nothing happens"></i>'
        )


def _lines(axis: Axis, faults: Iterable[Note]) -> Iterator[str]:
    for place in dict.fromkeys(f"{axis.at(note.t):.3f}" for note in faults):
        yield f'<i style="left:{place}%"></i>'


def _row(kind: str, label: str, lane: str, more: str = "") -> str:
    cells = f'<div class="label">{label}</div><div class="lane">{lane}</div>'
    return f'<div class="row {kind}"{more}>{cells}</div>\n'


def _faults(axis: Axis, faults: Sequence[Note]) -> str:
    """The faults' row: a mark for each, and its name under the mark where other names leave room."""
    if not faults:
        return ""
    ends: list[float] = []
    names = []
    for note in faults:
        mark, width = axis.at(note.t), len(note.text) * LETTER_WIDTH + 2
        left = mark if mark + width <= 100 or mark < 50 else mark - width
        row = next((row for row, end in enumerate(ends) if end <= left), len(ends))
        if row >= NAME_ROWS:
            continue
        ends[row:] = [left + width, *ends[row + 1 :]]
        side = f"left:{mark:.3f}%" if left == mark else f"right:{100 - mark:.3f}%"
        names.append(f'<span class="name" style="{side};top:{25 + 17 * row}px">{escape(note.text)}</span>')
    height = f' style="height:{32 + 17 * len(ends)}px"'
    return _row("faults", "faults", _notes(axis, faults) + "".join(names), height)


def _notes(axis: Axis, notes: Iterable[Note]) -> str:
    columns: dict[tuple[int, str], list[Note]] = defaultdict(list)
    for note in notes:
        columns[int(axis.at(note.t) * COLUMNS / 100), note.kind].append(note)
    return "".join(
        f'<i class="note {kind}" style="left:{axis.at(found[0].t):.3f}%" title="{_listed(found)}"></i>'
        for (_, kind), found in columns.items()
    )


def _listed(notes: Sequence[Note], most: int = 12) -> str:
    lines = [f"{duration(note.t)}  {note.text}" for note in notes[:most]]
    if len(notes) > most:
        lines.append(f"… and {len(notes) - most} more")
    return escape("\n".join(lines))


def _group(
    axis: Axis, data: TimelineData, group: Gid, everyone: Sequence[tuple[Lane, Count]], drawn: Container[int]
) -> str:
    sent, received, lost, _ = _sum(count for _, count in everyone)
    name = data.names.get(group, "") if group.is_multicast else "to one port"
    bad = f' · <b class="bad">{lost.total():,} lost</b>' if lost else ""
    heading = (
        f'<div class="row group"><div class="label"><b>{escape(name)}</b> <code>{escape(str(group))}</code>'
        f'<span class="soft">{len(everyone)} members · {sent:,} sent · {received:,} received{bad}</span>'
        f"</div></div>\n"
    )
    lanes = (_lane(axis, data, lane, count.lost.total()) for lane, count in everyone if id(lane) in drawn)
    return f"<section>{heading}{''.join(lanes)}</section>"


def _lane(axis: Axis, data: TimelineData, lane: Lane, lost: int) -> str:
    who = "attached only" if lane.id is None else f"id {lane.id}"
    qp = "no QP" if lane.qp is None else f"QP {lane.qp}"
    count = f'<em class="bad">{lost:,} lost</em>' if lost else ""
    address = escape(data.ports.get(lane.port, ""))
    label = f'<b title="{address}">{escape(lane.port)}</b> <span class="soft">{who} · {qp}</span>{count}'
    bars = "".join(
        f'<i class="span {_css(span.state)}" style="{_extent(axis, span.start, span.end)}" '
        f'title="{span.state.value}: {duration(span.start)} to {duration(span.end)}"></i>'
        for span in lane.spans
    )
    down = "".join(
        f'<i class="down" style="{_extent(axis, start, stop)}" '
        f'title="link down: {duration(start)} to {duration(stop)}"></i>'
        for start, stop in data.down.get(lane.port, ())
    )
    marks = "".join(
        part for what in ("sent", "received", "lost") for part in _marks(axis, what, getattr(lane, what))
    )
    words = escape(f"{lane.port} {lane.group} {data.names.get(lane.group, '')} {who} {qp}".lower())
    return _row("member", label, bars + down + marks, f' data-lost="{lost}" data-words="{words}"')


def _css(state: State) -> str:
    return state.name.lower().replace("_", "-")


def _extent(axis: Axis, start: int, stop: int) -> str:
    left = axis.at(start)
    return f"left:{left:.3f}%;width:{axis.at(stop) - left:.3f}%"


def _marks(axis: Axis, what: str, marks: Iterable[Mark]) -> Iterator[str]:
    """Messages as ticks; those that are too near to each other become one tick."""
    columns: dict[int, list[Mark]] = defaultdict(list)
    for mark in marks:
        columns[int(axis.at(mark.t) * COLUMNS / 100)].append(mark)
    for column, found in columns.items():
        reasons: Counter[str] = Counter()
        for mark in found:
            reasons[mark.reason] += mark.messages
        first, last = duration(found[0].t), duration(found[-1].t)
        when = first if first == last else f"{first} to {last}"
        text = "\n".join(
            f"{count:,} {what}{': ' if reason else ''}{reason}" for reason, count in reasons.items()
        )
        yield (
            f'<i class="mark {what}" style="left:{column * 100 / COLUMNS:g}%" title="{escape(f"{when}")}\n'
            f'{escape(text)}"></i>'
        )


def _undrawn(count: int) -> str:
    if count <= 0:
        return ""
    return f'<p class="soft">{count:,} more members are not drawn; all numbers and the losses count them.</p>'


def _members(counted: RunCounts | None) -> str:
    """The table that the terminal shows, too."""
    if counted is None:
        return ""
    head, *rows = counted.table
    return (
        '<h2>Members</h2><div class="table"><table><thead>'
        f"{_cells('th', head)}</thead><tbody>{''.join(_cells('td', row) for row in rows[:MAX_NOTES])}"
        "</tbody></table></div>"
    )


def _cells(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _losses(data: TimelineData, counts: dict[int, Count], timed: bool) -> str:
    """The losses by reason. `timed`: the trace has all of them, and so says when the first and last were."""
    totals = _sum(counts.values()).lost
    if not totals:
        return '<p class="soft">Every copy that was due arrived.</p>'
    parts = []
    for reason, total in totals.most_common():
        lanes = [lane for lane in data.lanes if counts[id(lane)].lost[reason]]
        lanes.sort(key=lambda lane: -counts[id(lane)].lost[reason])
        body = "".join(
            _cells("td", _loss(data, lane, counts[id(lane)].lost[reason], reason, timed))
            for lane in lanes[:MAX_NOTES]
        )
        share = total * 100 / totals.total()
        parts.append(
            f'<details open><summary><b class="bad">{total:,}</b> {escape(reason)}'
            f'<span class="share"><i style="width:{share:.1f}%"></i></span></summary>'
            f'<div class="table"><table><thead>'
            f"{_cells('th', ('port', 'QP', 'group', 'lost', *(('first', 'last') if timed else ())))}"
            f"</thead><tbody>{body}</tbody></table></div></details>"
        )
    return "".join(parts)


def _loss(data: TimelineData, lane: Lane, lost: int, reason: str, timed: bool) -> Iterator[str]:
    yield lane.port
    yield "" if lane.qp is None else f"QP {lane.qp}"
    yield data.names.get(lane.group) or str(lane.group)
    yield f"{lost:,}"
    if timed:
        times = [mark.t for mark in lane.lost if mark.reason == reason]
        yield duration(times[0])
        yield duration(times[-1])


def _note_table(notes: Sequence[Note]) -> str:
    rows = "".join(
        f'<tr class="{note.kind}"><td>{duration(note.t)}</td><td>{escape(note.port or "")}</td>'
        f"<td>{escape(note.text)}</td></tr>"
        for note in notes[:MAX_NOTES]
    )
    more = len(notes) - MAX_NOTES
    cut = f"<tr><td></td><td></td><td>… and {more:,} more, in the trace</td></tr>" if more > 0 else ""
    return (
        f'<div class="table"><table><thead><tr><th>time</th><th>port</th><th>what</th></tr></thead>'
        f"<tbody>{rows}{cut}</tbody></table></div>"
    )
