"""`mcast groups`: the groups that exist and their members, as far as this host can see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mcast.cli import clients
from mcast.cli.options import BackendName, Json, choose_backend, refuse_in_process
from mcast.cli.terminal import Failure, console, group, json_output, print_table, print_wrapped, say
from mcast.wire.addresses import LOCAL_CONTROL, McastAddress
from mcast.wire.mapping import ipv4_group_of, is_mapped

if TYPE_CHECKING:
    from mcast.api import ClientProcess, GroupInfo, GroupMember, GroupSource, GroupTable
    from mcast.cli.outputs import GroupsOutput


def groups(
    wanted: Annotated[
        list[McastAddress] | None,
        typer.Argument(parser=group, metavar="GROUP", help="Groups to show; status 1 if one has no member."),
    ] = None,
    backend: BackendName = None,
    as_json: Json = False,
) -> None:
    """Show the multicast groups and their members.

    Members on other hosts are shown if a bridge of this host, or the SA, knows them. The last lines say what
    cannot be seen from here.
    """
    from mcast.api import open_backend, provider

    refuse_in_process(backend, "be a member")
    name = choose_backend(backend)
    look_on = {"host": "all"} if provider(name).shared() else {}
    with open_backend(name, **look_on) as opened:
        table, there = opened.groups(), clients.others(opened)
    shown = [info for info in table.groups if not wanted or any(_is_of(info, each) for each in wanted)]
    if as_json:
        json_output.result(_as_json(name, shown, table.unseen, there))
    else:
        _show(shown, table, there)
    missing = [each for each in wanted or () if not any(_is_of(info, each) for info in shown)]
    if missing:
        raise Failure(f"no member is visible in {', '.join(str(each.address) for each in missing)}")


def _is_of(info: GroupInfo, wanted: McastAddress) -> bool:
    return is_mapped(wanted.address, info.mgid)


_SEEN_IN: dict[str, Literal["host", "switch", "sa"]] = {"HOST": "host", "SWITCH": "switch", "SA": "sa"}
"""Name of a `GroupSource` -> its name in JSON."""


def _as_json(
    backend: str, shown: Sequence[GroupInfo], unseen: Sequence[str], there: Sequence[ClientProcess]
) -> GroupsOutput:
    return {
        "backend": backend,
        "groups": [
            {
                "group": _name(info),
                "mgid": str(info.mgid),
                "mlid": info.mlid,
                "members": [
                    {
                        "port": member.port,
                        "seen_in": [_SEEN_IN[where.name] for where in _sources(member)],
                        "send_only": member.send_only,
                    }
                    for member in info.members
                ],
            }
            for info in shown
        ],
        "unseen": list(unseen),
        "clients": list(there),
    }


def _name(info: GroupInfo) -> str:
    """The IPv4 group that the MGID stands for; if it stands for none, the MGID."""
    return str(ipv4_group_of(info.mgid) or info.mgid)


def _sources(member: GroupMember) -> list[GroupSource]:
    from mcast.api import GroupSource

    return [where for where in GroupSource if where in member.seen_in]


def _show(shown: Sequence[GroupInfo], table: GroupTable, there: Sequence[ClientProcess]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from mcast.api import GroupSource

    snooped = any(GroupSource.SWITCH in member.seen_in for info in table.groups for member in info.members)
    lids = any(info.mlid for info in shown)
    lines = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    lines.add_column("group", overflow="fold")
    if lids:
        lines.add_column("MLID")
    lines.add_column("member", overflow="fold")
    lines.add_column("seen in", overflow="fold")
    for info in shown:
        head: tuple[str, ...] = (_name(info), f"0x{info.mlid:04x}") if lids else (_name(info),)
        for member in info.members:
            who = clients.on_port(there, member.port)
            port = f"{member.port}, {who}" if who else member.port
            lines.add_row(*head, escape(port), _where(member, info, snooped))
            head = ("",) * len(head)
        if not info.members:
            lines.add_row(*head, "[dim]not shown[/]", "the SA's table")
    if shown:
        print_table(console(), lines)
    else:
        say("no group is visible from this host")
    if there:
        say("\non the fabric")
    for guest in there:
        print_wrapped("  ", clients.words_of(guest))
    if table.unseen:
        say("\nnot seen")
    for sentence in table.unseen:
        print_wrapped("  ", sentence)


def _where(member: GroupMember, info: GroupInfo, snooped: bool) -> str:
    """Return the tables that have the member, and the switch's table if that lacks it.

    The switch delivers by its table.
    """
    from mcast.api import GroupSource

    found = ", ".join(where.value for where in _sources(member)) + (", send-only" if member.send_only else "")
    group = info.mgid.ipv4
    lacking = snooped and member.seen_in == {GroupSource.HOST}
    if lacking and group is not None and group not in LOCAL_CONTROL:
        return f"{found}\n[yellow]not in the switch's table: receives nothing[/]"
    return found
