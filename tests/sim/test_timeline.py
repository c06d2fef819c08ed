"""The page of a run: it needs no other file, and shows who was a member when, and what was lost and why."""

from __future__ import annotations

import re
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcast.api import JoinAttrEx
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Drop
from mcast.backends.sim.scenario.runner import ScenarioResult, load, run
from mcast.backends.sim.trace import timeline
from mcast.backends.sim.trace.events import Deliver, MessagesLost, Send, Trace
from mcast.backends.sim.trace.timeline import Axis, duration, page
from mcast.backends.sim.trace.timeline_data import Span, State, timeline_data
from mcast.cli import app
from mcast.wire.addresses import Gid

SECOND = 10**9
VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """Checks that tags close as they open, and collects text, titles, and what would be loaded."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.titles: list[str] = []
        self.loaded: list[str] = []
        self.srcdoc: list[str] = []
        self.marks: Counter[str] = Counter()
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self._open.append(tag)
        values = {name: value or "" for name, value in attrs}
        self.loaded += [value for name, value in values.items() if name in ("src", "href")]
        self.srcdoc += [value for name, value in values.items() if name == "srcdoc"]
        self.titles.append(values.get("title", ""))
        self.marks[values.get("class", "")] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def simulated() -> ScenarioResult:
    return run(load("sm-failover-under-load"))


@pytest.fixture(scope="module")
def failover(simulated: ScenarioResult) -> Trace:
    return simulated.trace


def words(html: str) -> str:
    return " ".join(" ".join(Page(html).text).split())


def total(trace: Trace, kind: type[MessagesLost] | type[Deliver]) -> int:
    return sum(event.count for _, event in trace if isinstance(event, kind))


# --- the page ----------------------------------------------------------------------------


def test_the_page_needs_no_other_file(failover: Trace) -> None:
    html = page(failover, "SM failover")
    read = Page(html)
    assert read.loaded == []
    assert not re.search(r"https?://|@import|url\(", html)
    assert "$" not in re.sub(r"<script>.*</script>", "", html, flags=re.S)


def test_names_are_escaped(failover: Trace) -> None:
    html = page(failover, '<script>"&')
    Page(html)
    assert "<script>&quot;" not in html
    assert html.count("&lt;script&gt;&quot;&amp;") == 2


def test_the_page_counts_what_the_trace_holds(failover: Trace) -> None:
    text = " ".join(" ".join(Page(page(failover, "run")).text).split())
    sent = sum(len(event.payloads) for _, event in failover if isinstance(event, Send))
    for number, words in (
        (sent, "messages sent"),
        (total(failover, Deliver), "copies received"),
        (total(failover, MessagesLost), "copies lost"),
        (2, "faults"),
        (6, "members"),
    ):
        assert number
        assert f"{number:,} {words}" in text


def test_the_page_says_what_was_lost_and_why(failover: Trace) -> None:
    text = " ".join(" ".join(Page(page(failover, "run")).text).split())
    reasons = Counter[str]()
    for _, event in failover:
        if isinstance(event, MessagesLost):
            reasons[event.reason] += event.count
    assert reasons
    for reason, count in reasons.items():
        assert f"{count:,} {reason}" in text


def test_page_has_the_numbers_of_the_terminal(simulated: ScenarioResult) -> None:
    """The page of a scenario has the numbers of the terminal."""
    text = words(simulated.page())
    lost, expected = (sum(getattr(m, name) for m in simulated.members) for name in ("lost", "expected"))
    fabrics = sum(event.count for _, event in simulated.trace if isinstance(event, MessagesLost))
    assert 0 < fabrics < lost
    said = f"{lost:,} lost", f"{expected:,} copies expected", f"{lost:,} copies lost"
    assert [one for one in said if one not in text] == []
    assert f"{fabrics:,} lost" not in text.replace(f"{max(m.lost for m in simulated.members):,} lost", "")
    assert f"{simulated.scenario.seconds:g} s of virtual time" in text
    for row in simulated.table():
        assert " ".join(row) in text
    for member in simulated.members:
        for why, count in member.causes.items():
            assert re.search(rf"{why} .*{member.device} QP {member.qp} {member.group} {count:,}", text)


@pytest.mark.parametrize("name", ["flapping-port", "late-join", "slow-receiver"])
def test_page_and_terminal_agree_on_what_was_lost(name: str) -> None:
    result = run(load(name))
    lost = sum(member.lost for member in result.members)
    assert lost
    assert f"{lost:,} copies lost" in words(result.page())


def test_each_fault_has_its_name_on_the_time_line(failover: Trace) -> None:
    faults = timeline_data(failover).faults
    html = page(failover, "run")
    names = [unescape(name) for name in re.findall(r'<span class="name"[^>]*>(.*?)</span>', html)]
    assert names == [fault.text for fault in faults] != []


def test_near_fault_names_are_stacked() -> None:
    """Names of faults that are near stand above each other."""
    fabric = Fabric.roce(ports=2, trace=True)
    for _ in range(3):
        fabric.set_link(fabric.ports[0], up=False)
        fabric.set_link(fabric.ports[0], up=True)
    assert fabric.trace is not None
    tops = re.findall(r'<span class="name" style="[^"]*top:(\d+)px', page(fabric.trace, "run"))
    assert len(set(tops)) == len(tops) == timeline.NAME_ROWS


def test_marks_tell_their_time_and_number(failover: Trace) -> None:
    read = Page(page(failover, "run"))
    for what in ("sent", "received", "lost"):
        counted = [re.findall(rf"^([\d,]+) {what}", title, re.M) for title in read.titles]
        numbers = [int(number.replace(",", "")) for found in counted for number in found]
        kind = {"sent": None, "received": Deliver, "lost": MessagesLost}[what]
        expected = (
            sum(len(event.payloads) for _, event in failover if isinstance(event, Send))
            if kind is None
            else total(failover, kind)
        )
        assert sum(numbers) == expected
        assert 0 < read.marks[f"mark {what}"] <= 6 * timeline.COLUMNS


def test_faults_and_refusals_are_on_the_page(failover: Trace) -> None:
    read = Page(page(failover, "run"))
    titles = [unescape(title) for title in read.titles]
    assert any("sm down" in title for title in titles)
    assert any("MULTICAST_ERROR" in title and "ENETRESET" in title for title in titles)


def test_a_quiet_run_says_that_nothing_was_lost() -> None:
    fabric = Fabric.roce(trace=True)
    assert fabric.trace is not None
    text = " ".join(Page(page(fabric.trace, "quiet")).text)
    assert "nothing lost" in text
    assert "Every copy that was due arrived." in text


def test_members_beyond_the_page_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """More members than a page draws are counted and said."""
    monkeypatch.setattr(timeline, "MAX_LANES", 2)
    text = " ".join(" ".join(Page(page(members(5), "many")).text).split())
    assert "3 more members are not drawn" in text
    assert "5 members" in text


def members(count: int) -> Trace:
    fabric = Fabric.roce(ports=count, trace=True)
    with open_fabric(fabric) as backend, backend.event_channel() as channel:
        for device in backend.devices():
            cm_id = channel.create_id()
            cm_id.bind_addr(device.ports[0].addresses[0])
            cm_id.create_qp()
            cm_id.join_multicast("239.1.1.1")
            channel.get_event(1)
    assert fabric.trace is not None
    return fabric.trace


# --- the story ---------------------------------------------------------------------------


def test_a_member_goes_through_its_states() -> None:
    fabric = Fabric.infiniband(trace=True)
    clock = fabric.clock
    with open_fabric(fabric) as backend, backend.event_channel() as channel:
        cm_id, sender = channel.create_id(), channel.create_id()
        for each, device in zip((cm_id, sender), backend.devices(), strict=False):
            each.bind_addr(device.ports[0].addresses[0])
            each.create_qp()
        cm_id.join_multicast("239.1.1.1")
        assert channel.get_event(1) is not None
        joined = clock.now
        channel.get_event(1)
        left = clock.now
        cm_id.leave_multicast("239.1.1.1")
        sender.join_multicast_ex(JoinAttrEx.send_only("239.1.1.1"))
        event = channel.get_event(1)
        with fabric.rules.on_sa_request(lambda _: Drop()):
            asked = clock.now
            cm_id.join_multicast("239.1.1.1")
            failed = channel.get_event(10)
        assert event is not None
        assert failed is not None
        assert failed.errno
        lost = clock.now
    assert fabric.trace is not None
    drawn = timeline_data(fabric.trace)
    receiver, send_only = drawn.lanes
    assert receiver.spans[:6] == [
        Span(State.ASKING, 0, joined),
        Span(State.JOINED, joined, joined),
        Span(State.RECEIVING, joined, left),
        Span(State.JOINED, left, left),
        Span(State.ASKING, asked, lost),
        Span(State.FAILED, lost, drawn.end),
    ]
    assert [span.state for span in send_only.spans] == [State.ASKING, State.SEND_ONLY]
    assert drawn.names[Gid(receiver.group)] == "239.1.1.1"
    assert any(note.kind == "bad" and "no answer" in note.text for note in drawn.control)


def test_attached_qp_shares_its_members_lane() -> None:
    """A QP attached by hand has the lane of its membership."""
    fabric = Fabric.roce(trace=True)
    with open_fabric(fabric) as backend, backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.bind_addr(backend.devices()[0].ports[0].addresses[0])
        cm_id.join_multicast("239.1.1.1")
        event = channel.get_event(1)
        assert event is not None
        assert event.ud is not None
        qp = cm_id.create_qp()
        qp.attach_mcast(event.ud.destination.gid, 0)
        qp.attach_mcast(Gid("ff0e::1"), 0)
    assert fabric.trace is not None
    joined, by_hand = timeline_data(fabric.trace).lanes
    assert (joined.id, joined.qp) == (1, qp.qp_num)
    assert State.RECEIVING in [span.state for span in joined.spans]
    assert (by_hand.id, by_hand.qp) == (None, qp.qp_num)


def test_a_link_is_down_until_it_is_up_or_the_end() -> None:
    fabric = Fabric.roce(trace=True)
    first, second = fabric.ports[:2]
    for _ in range(2):
        fabric.set_link(first, up=False)
    fabric.clock.wait(lambda: False, 1, "", None)  # type: ignore[arg-type]
    fabric.set_link(first, up=True)
    fabric.set_link(second, up=False)
    fabric.clock.wait(lambda: False, 1, "", None)  # type: ignore[arg-type]
    fabric.bond_failover(fabric.ports[2])
    assert fabric.trace is not None
    assert timeline_data(fabric.trace).down == {
        first.name: [(0, SECOND)],
        second.name: [(SECOND, 2 * SECOND)],
    }


# --- the axis ----------------------------------------------------------------------------


def test_the_axis_rises_from_0_to_100() -> None:
    times = [
        0,
        *range(1_000, 100_000, 1_000),
        3 * SECOND,
        3 * SECOND + 5_000,
        9 * SECOND,
        9 * SECOND + 20_000,
    ]
    axis = Axis(times)
    places = [axis.at(t) for t in times]
    assert places == sorted(places)
    assert len(set(places)) == len(times)
    assert (round(places[0], 6), round(places[-1], 6)) == (0, 100)
    assert axis.breaks == [(99_000, 3 * SECOND), (3 * SECOND + 5_000, 9 * SECOND)]
    # What happens within 0.1 ms has most of the width, though 9 s pass.
    assert axis.at(99_000) > 60


def test_even_traffic_is_not_cut() -> None:
    assert Axis(range(0, 10 * SECOND, SECOND // 100)).breaks == []
    assert Axis([]).at(0) == 0


def test_ticks_are_round_and_apart() -> None:
    axis = Axis(range(0, 11 * SECOND, SECOND // 100))
    assert [duration(t) for t in axis.ticks()] == ["0", "2 s", "4 s", "6 s", "8 s", "10 s"]


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0"),
        (999, "999 ns"),
        (1_500, "1.5 µs"),
        (100_000, "100 µs"),
        (12_000_000, "12 ms"),
        (3 * SECOND, "3 s"),
    ],
)
def test_durations_read_well(ns: int, text: str) -> None:
    assert duration(ns) == text


def test_a_notebook_shows_the_page_in_a_frame(simulated: ScenarioResult) -> None:
    """The page has styles of its own, so that it neither takes those of the notebook nor changes them."""
    frame = Page(simulated._repr_html_())
    assert frame.marks.total() == 1
    assert frame.srcdoc == [simulated.page()]


# --- the command -------------------------------------------------------------------------


def test_the_command_writes_page_packets_and_trace(tmp_path: Path) -> None:
    html, pcap, trace = (tmp_path / name for name in ("run.html", "run.pcapng", "run.jsonl"))
    options = ["--html", str(html), "--pcap", str(pcap), "--trace", str(trace)]
    done = CliRunner().invoke(app, ["sim", "run", "late-join", *options])
    assert done.exit_code == 0, done.output
    simulated = run(load("late-join"))
    assert html.read_text() == simulated.page()
    assert page(Trace.load(trace.read_text()), "same") == page(simulated.trace, "same")
    assert pcap.read_bytes()[:4] == b"\x0a\x0d\x0d\x0a"
