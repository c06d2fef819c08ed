"""`mcast conformance`: run the shipped suite on backends, and report clause by clause."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mcast import backend_names, backend_status
from mcast.cli.options import choose_backend
from mcast.cli.status import ExitStatus
from mcast.cli.terminal import (
    BACKEND,
    STANDARD,
    Failure,
    Json,
    UsageError,
    backend_name,
    console,
    json_output,
    output_file,
    require_one_stdout,
    say,
    write_file,
)
from mcast.errors import install

if TYPE_CHECKING:
    from mcast.conformance.report import SuiteReport

_TEST_TIMEOUT = 600
"""Maximum seconds of one test, so that a provider that hangs fails the test."""

_PYTEST_VARIABLES = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")

_WIDTH = 100


def _checked(names: list[str] | None) -> list[str]:
    return [backend_name(name) for name in names or []]


def conformance(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            callback=_checked,
            autocompletion=backend_names,
            help="Backend to test; may be repeated.  "
            f"[default: rdma, with --lab or if a device can be used]  [env var: {BACKEND}]",
        ),
    ] = None,
    require_backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            callback=_checked,
            autocompletion=backend_names,
            help="Backend to test, which must be able to run here.",
        ),
    ] = None,
    as_json: Json = False,
    report_file: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", callback=output_file, help="Also write the report as JSON."),
    ] = None,
    html_file: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", callback=output_file, help="Also write the report as an HTML page."
        ),
    ] = None,
    card_file: Annotated[
        Path | None,
        typer.Option(
            "--card-report",
            metavar="FILE",
            callback=output_file,
            help="Also measure the card of the one --backend, and write a report to share, as JSON.",
        ),
    ] = None,
    with_names: Annotated[
        bool,
        typer.Option("--with-names", help="Include names and addresses in the card report."),
    ] = False,
    lab: Annotated[
        bool, typer.Option("--lab", help="Run real backends in the lab, a virtual machine.")
    ] = False,
    fabric: Annotated[
        Literal["roce", "infiniband"], typer.Option(help="The lab's fabric: Soft-RoCE or InfiniBand.")
    ] = "roce",
) -> None:
    """Check that backends keep the contract.

    Runs the conformance suite on each backend, and shows for each clause of the contract whether it holds.
    With --json, or - as a FILE, all other output goes to stderr. The exit status is 1 if a test fails.

    --card-report also measures join and leave, message rate, loopback and flooding, and adds versions,
    driver, firmware and limits. The file has no addresses and no names of host, user or devices, unless
    --with-names asks for them.
    """
    apart = require_one_stdout(as_json, report_file, html_file, card_file)
    for package in ("pytest", "pytest_timeout"):
        if not find_spec(package):
            raise UsageError(f"the suite needs {package}: {install.line('conformance')}")
    if fabric != "roce" and not lab:
        raise typer.BadParameter("--fabric chooses the fabric of the lab: add --lab")
    if with_names and not card_file:
        raise typer.BadParameter("--with-names is for the card report: add --card-report FILE")
    if not (backend or require_backend):
        given = os.environ.get(BACKEND)
        backend = ["rdma"] if lab and not given else [choose_backend(backend_name(given) if given else None)]
    named = (backend or [], require_backend or [])
    card = _the_card(*named, card_file, with_names)
    if not lab:
        _require([*named[1], *([card.backend] if card else [])])
    with redirect_stdout(sys.stderr) if apart else nullcontext():
        start = monotonic()
        report = _run_with_lab(*named, fabric, card) if lab else run_suite(*named)
        spent = monotonic() - start
    for path in (Path(STANDARD) if as_json else None, report_file):
        if path:
            from mcast.conformance.report import to_json

            write_file(path, to_json(report).encode())
            json_output.is_printed = True
    if html_file:
        from mcast import __version__
        from mcast.api import provider
        from mcast.conformance.page import to_html

        hosts = "; ".join(dict.fromkeys(report.hosts.values()))
        today = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        summaries = {name: provider(name).summary for name in report.providers}
        page = to_html(report, f"mcast {__version__}, {hosts}, {today}", summaries)
        write_file(html_file, page.encode())
    if card:
        if not card.contents:
            with redirect_stdout(sys.stderr) if apart else nullcontext():
                card.contents = _measured(card, report, spent)
        write_file(card.path, card.contents.encode())
    with redirect_stdout(sys.stderr) if apart else nullcontext():
        _show(report)
        if card:
            _show_card(card)
    if not report.passed:
        raise typer.Exit(ExitStatus.FAILED)


@dataclass
class _Card:
    """The card report that was asked for; `contents` is "" until it is made."""

    backend: str
    path: Path
    with_names: bool
    contents: str = ""


def _the_card(backends: list[str], required: list[str], path: Path | None, with_names: bool) -> _Card | None:
    """Return the card report that was asked for. Refuse one of no backend, or of several."""
    if path is None:
        return None
    names = list(dict.fromkeys([*backends, *required]))
    if len(names) != 1:
        raise typer.BadParameter(
            f"a card report is about one backend: give one --backend, not {', '.join(names) or 'none'}"
        )
    return _Card(names[0], path, with_names)


def _measured(card: _Card, report: SuiteReport, seconds: float) -> str:
    """Measure, and return the text of the card report."""
    from mcast.bench.card import make_card_report

    say("measuring for the card report")
    try:
        made = make_card_report(report, card.backend, seconds, card.with_names)
    except Exception as error:  # of anybody's test bed
        raise Failure(f"no card report: the test bed of {card.backend} fails: {error}") from error
    return made.model_dump_json(indent=1) + "\n"


def _require(names: list[str]) -> None:
    """End with one sentence if one of the backends cannot run here: each test would say the same."""
    for name in names:
        if not (status := backend_status(name)).available:
            raise UsageError(f"{name} is required and cannot run here: {status.detail}; {status.fix}")


def _run_with_lab(
    backends: list[str],
    required: list[str],
    fabric: Literal["roce", "infiniband"],
    card: _Card | None,
) -> SuiteReport:
    """Run simulated backends in this process and the others in the lab; return one report of both.

    The card report is made in the lab, too.
    """
    from mcast.api import SIMULATED
    from mcast.cli.conformance_in_lab import run_in_lab
    from mcast.conformance.report import merge

    named = dict.fromkeys([*backends, *required])
    outside = [name for name in named if name not in SIMULATED]
    if not outside:
        raise typer.BadParameter("--lab is for backends that are not simulated: add --backend rdma")
    reports = (
        [run_suite([name for name in named if name in SIMULATED], [])] if len(named) > len(outside) else []
    )
    say(f"in the lab: {', '.join(outside)}")
    if card is None:
        reports.append(run_in_lab(outside, fabric).suite)
    else:
        suite, card.contents = run_in_lab(outside, fabric, ["--with-names"] if card.with_names else [])
        reports.append(suite)
    return merge(reports)


def run_suite(backends: list[str], required: list[str]) -> SuiteReport:
    """Run the shipped tests in this process, without any pytest configuration of this host."""
    import pytest

    import mcast.conformance

    (suite,) = mcast.conformance.__path__
    options = [
        *(
            "-c",
            os.devnull,
            "--rootdir",
            suite,
            "--noconftest",
            "--import-mode=importlib",
            "--strict-markers",
        ),
        *("-p", "no:cacheprovider", "-p", "pytest_timeout", "--timeout", str(_TEST_TIMEOUT)),
        *("-p", "mcast.conformance.plugin", "-q", "--tb=short"),
        *(word for name in backends for word in ("--backend", name)),
        *(word for name in required for word in ("--require-backend", name)),
    ]
    grip = _Grip()
    with _no_outside_pytest_options():
        status = pytest.main([*options, suite], plugins=[grip])
    if status == pytest.ExitCode.INTERRUPTED:
        raise Failure("interrupted", ExitStatus.INTERRUPTED)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or grip.config is None:
        raise UsageError(f"the suite stopped early (pytest exit status {int(status)}); see above")

    from mcast.conformance.plugin import suite_of

    return suite_of(grip.config).report()


class _Grip:
    """A pytest plugin that keeps the run's configuration, where the suite's results are."""

    config: Any = None

    def pytest_configure(self, config: Any) -> None:
        self.config = config


@contextmanager
def _no_outside_pytest_options() -> Iterator[None]:
    kept = {name: os.environ.pop(name) for name in _PYTEST_VARIABLES if name in os.environ}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
        os.environ.update(kept)


def _show(report: SuiteReport) -> None:
    """A row for each clause, and one for the facts of each topic; then what is not as it should be."""
    from rich.markup import escape
    from rich.table import Table

    from mcast.conformance.clauses import CLAUSES
    from mcast.conformance.report import SECTIONS, Outcome, counts, sentence_of

    styles = {
        Outcome.PASSED: "[green]passed[/]",
        Outcome.FAILED: "[bold red]FAILED[/]",
        Outcome.DEVIATION: "[yellow]deviation[/]",
        Outcome.NOT_APPLICABLE: "[dim]n/a[/]",
    }
    out = console()
    out.print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), width=min(out.width, _WIDTH))
    table.add_column("clause", no_wrap=True)
    table.add_column("says", no_wrap=True, overflow="ellipsis", ratio=1)
    for backend in report.providers:
        table.add_column(backend, no_wrap=True)
    for title, names in SECTIONS:
        if names[0] in CLAUSES:
            for name in names:
                cells = (styles[column[name].outcome] for column in report.providers.values())
                table.add_row(name, escape(sentence_of(name)), *cells)
        else:
            found = [counts(report, backend, names) for backend in report.providers]
            cells = ("\n".join(f"{count[o]} {styles[o]}" for o in styles if count[o]) for count in found)
            table.add_row(f"{len(names)} facts", escape(title), *cells)
    out.print(table)
    # Wrapped by the terminal alone, so that a line can be searched for.
    say = partial(out.print, soft_wrap=True)
    for backend, column in report.providers.items():
        for name, cell in column.items():
            if cell.outcome in (Outcome.FAILED, Outcome.DEVIATION):
                say(f"{backend} {name} {styles[cell.outcome]}: {escape(cell.reason or '')}")
    for result in report.loose:
        say(
            f"{result.backend or 'all'} {styles[Outcome.FAILED]}: {escape(f'{result.test}: {result.reason}')}"
        )
    for backend, reason in report.unavailable.items():
        say(f"{backend} not tested: {escape(reason)}")
    verdicts = {backend: _verdict(report, backend) for backend in report.providers}
    say(
        "conformance: "
        + (", ".join(f"{name} {verdict}" for name, verdict in verdicts.items()) or "nothing was tested")
    )


def _show_card(card: _Card) -> None:
    """Say what the card report came to, and what did not become part of it."""
    from mcast.bench.card_report import CardReport

    made = CardReport.model_validate_json(card.contents)
    for name in ("loopback", "join_leave", "flooding", "rate"):
        measured = getattr(made, name)
        if measured.outcome != "measured":
            say(f"{name} {measured.outcome}: {measured.reason}")
    where = "to stdout" if str(card.path) == STANDARD else f"to {card.path}"
    named = "with names and addresses" if card.with_names else "without names or addresses of this host"
    say(f"card report: {made.verdict}, written {where}, {named}")


def _verdict(report: SuiteReport, backend: str) -> str:
    from mcast.conformance.report import Outcome

    failed = sum(cell.outcome is Outcome.FAILED for cell in report.providers[backend].values())
    loose = sum(result.backend in (backend, None) for result in report.loose)
    return f"fails in {failed + loose}" if failed + loose else "conforms"
