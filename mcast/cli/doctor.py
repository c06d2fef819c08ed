"""`mcast doctor`: what is wrong with this host, and how to repair it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from mcast import backend_names
from mcast.cli.status import ExitStatus
from mcast.cli.terminal import (
    BACKEND,
    Json,
    backend_name,
    console,
    json_output,
    plural,
    print_beside,
    print_unwrapped,
    print_wrapped,
    say,
)
from mcast.cli.values import seconds
from mcast.errors.finding import Finding, Level
from mcast.errors.tree import BackendUnavailable, UnavailableReason

if TYPE_CHECKING:
    from mcast.api import Status

Diagnosis = dict[str, Sequence[Finding]]
"""Provider -> what was found for it."""


def _errors() -> list[str]:
    from mcast.errors.causes import names

    return names()


def doctor(
    error: Annotated[
        str | None,
        typer.Argument(
            help="Explain this errno or status instead, such as EINVAL or NO_RESOURCES.",
            metavar="ERROR",
            autocompletion=_errors,
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            parser=backend_name,
            autocompletion=backend_names,
            help=f"Check for this backend alone; repeatable.  [env var: {BACKEND}]",
            metavar="NAME",
        ),
    ] = None,
    listen: Annotated[
        float,
        typer.Option(
            parser=seconds(0, 3600),
            metavar="SECONDS",
            help="Listen for IGMP queriers; as root, 130 finds all.",
        ),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Find what is wrong on this host, and how to repair it.

    Checks everything that multicast needs, and changes nothing. The exit status is 1 if there is a problem,
    and 0 after warnings. A host without RDMA devices has a problem only if --backend asks for them. With
    ERROR, says what that error most likely means in each phase, and how to check that.
    """
    if error is not None:
        if backend or listen:
            raise typer.BadParameter("ERROR is explained without checking this host: leave the options out")
        _explain(error, as_json)
        return
    if not backend and (name := os.environ.get(BACKEND)):
        backend = [backend_name(name)]
    found = _examine(backend or (), listen)
    absent = [name for name, findings in found.items() if any(one.level is Level.INFO for one in findings)]
    if as_json:
        json_output.result(_as_json(found))
    else:
        _show(found, absent)
    raise typer.Exit(ExitStatus.FAILED if _count(found)[Level.PROBLEM] else ExitStatus.DONE)


def _explain(error: str, as_json: bool) -> None:
    """Show the rows of the table of causes for an error, in order of phases."""
    from mcast.errors.cause import Phase
    from mcast.errors.causes import errno_name, row_scope, rows_for

    order = [*Phase, None]
    rows = sorted(rows_for(error), key=lambda row: order.index(row.phase))
    if not rows:
        raise typer.BadParameter(
            f"nothing is known of {error!r}: give an errno, such as EINVAL or 22, or a status, such as "
            "NO_RESOURCES"
        )
    causes = [
        {
            "phase": row.phase.value if row.phase else "any",
            "errno": errno_name(row.errno),
            "where": row_scope(row),
            **row.cause._asdict(),
            "source": row.source,
        }
        for row in rows
    ]
    if as_json:
        json_output.result({"explained": error, "causes": causes})
        return
    for title, some in groupby(causes, key=lambda one: f"{one['phase']}: {one['errno']}"):
        console().print(title, style="bold", markup=False)
        for one in some:
            say("")
            for name, text in ("why", one["why"]), ("where", one["where"]), ("do", one["next_step"]):
                print_wrapped(f"  {name:5}  ", text)
            say(f"  check  {one['check']}")
        say("")


def _examine(names: Sequence[str], listen: float) -> Diagnosis:
    """Return the findings of the named providers; if none is named, of all providers, each under one name.

    What a named provider lacks is a problem.
    """
    from mcast.api import provider

    found: Diagnosis = {}
    seen: set[str] = set()
    for name in dict.fromkeys(names or backend_names()):
        try:
            one = provider(name)
        except BackendUnavailable as error:
            found[name] = (Finding("provider", "", Level.PROBLEM, error.detail, error.fix),)
            continue
        if names or one.summary not in seen:
            seen.add(one.summary)
            found[name] = one.checks(listen) or (_available(one.status()),)
        if names:
            found[name] = [
                each._replace(level=Level.PROBLEM) if each.level is Level.INFO else each
                for each in found[name]
            ]
    return found


def _wanted(finding: Finding) -> Finding:
    return finding._replace(level=Level.PROBLEM) if finding.level is Level.INFO else finding


def _available(status: Status) -> Finding:
    """The finding of a provider that has no checks of its own."""
    absent = status.reason is UnavailableReason.NO_DEVICE and not status.unusable
    level = Level.OK if status.available else Level.INFO if absent else Level.PROBLEM
    return Finding("provider", "", level, status.detail, status.fix)


def _count(found: Diagnosis) -> Counter[Level]:
    return Counter(finding.level for findings in found.values() for finding in findings)


def _as_json(found: Diagnosis) -> dict[str, object]:
    count = _count(found)
    return {
        "problems": count[Level.PROBLEM],
        "warnings": count[Level.WARNING],
        "providers": found,
    }


_COLOURS = {
    Level.OK: "green",
    Level.NOTE: "cyan",
    Level.INFO: "dim",
    Level.WARNING: "yellow",
    Level.PROBLEM: "red",
}


def _show(found: Diagnosis, absent: Sequence[str]) -> None:
    from rich.text import Text

    out = console()
    for name, findings in found.items():
        out.print(Text(name, "bold"))
        firsts = [(one.level.value, one.check, one.subject) for one in findings]
        levels, checks, subjects = (max(map(len, column)) for column in zip(*firsts, strict=True))
        for one in findings:
            level = (f"{one.level.value:{levels}}  ", _COLOURS[one.level])
            print_beside(
                out, Text.assemble(level, f"{one.check:{checks}}  {one.subject:{subjects}}  "), one.seen
            )
            if one.fix:
                print_unwrapped(out, Text.assemble(" " * (levels + 2), ("fix", "bold"), "  "), one.fix)
        out.print()
    for name in absent:
        print_wrapped(
            "", f"{name} has no device here. If it should have one: `mcast doctor --backend {name}`"
        )
    count = _count(found)
    counted = ((count[Level.PROBLEM], "problem"), (count[Level.WARNING], "warning"), (count.total(), "check"))
    out.print(", ".join(_number(*one) for one in counted))


def _number(count: int, noun: str) -> str:
    return f"{count or 'no'} {plural(noun, count)}"
