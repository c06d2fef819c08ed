"""`mcast info`: what this host can do."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from mcast.cli import clients
from mcast.cli.terminal import Json, console, json_output, print_beside, print_unwrapped
from mcast.errors.tree import BackendUnavailable

if TYPE_CHECKING:
    from mcast.api import Backend, ClientProcess
    from mcast.cli.outputs import InfoOutput, PortOutput, ProviderOutput


def info(
    as_json: Json = False,
) -> None:
    """Show which providers work here, and what the others need."""
    from mcast import __version__, backend_names

    found: InfoOutput = {
        "version": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "providers": {name: _describe(name) for name in backend_names()},
    }
    if as_json:
        json_output.result(found)
    else:
        _show(found)


def _describe(name: str) -> ProviderOutput:
    """Return the status of a backend, and its ports if it can be opened."""
    from mcast import backend_status, open_backend
    from mcast.api import provider

    status = backend_status(name)
    ports: list[PortOutput] = []
    on_it: list[ClientProcess] = []
    if status.available:
        try:
            words = provider(name).shared()
            with open_backend(name, **({"host": "all"} if words else {})) as backend:
                status = status._replace(detail=words or status.detail)
                ports, on_it = _ports(backend), clients.others(backend)
        except BackendUnavailable as error:
            status = status._replace(available=False, detail=error.detail, reason=error.reason, fix=error.fix)
    return {
        "available": status.available,
        "detail": status.detail,
        "reason": status.reason.value if status.reason else None,
        "fix": status.fix or None,
        "ports": ports,
        "left_out": [
            {"device": one.name, "reason": one.reason.value, "detail": one.detail, "fix": one.fix}
            for one in status.unusable
        ],
        "clients": on_it,
    }


def _ports(backend: Backend) -> list[PortOutput]:
    return [
        {
            "device": device.name,
            "port": port.port_num,
            "state": port.state.name,
            "link_layer": port.link_layer.value,
            "mtu": port.active_mtu,
            "rate": port.rate,
            "addresses": [str(address) for address in port.addresses],
            "driver": device.driver or None,
            "no_multicast": device.why_no_multicast or None,
        }
        for device in backend.devices()
        for port in device.ports
    ]


def _show(found: InfoOutput) -> None:
    from rich.text import Text

    out = console()
    out.print(f"mcast {found['version']}, Python {found['python']}, {found['system']}\n", markup=False)
    rows = _each_once(found["providers"])
    width = max(len(names) for names, _ in rows)

    def line(name: str, state: str, colour: str = "") -> Text:
        return Text.assemble((f"{name:{width}}  ", "bold"), (f"{state:9}  ", colour))

    for names, provider in rows:
        if provider["available"]:
            print_beside(out, line(names, "available", "green"), provider["detail"])
            for port in provider["ports"]:
                addresses = ", ".join(port["addresses"]) or "no address"
                without = f"  no multicast: {port['no_multicast']}" if port["no_multicast"] else ""
                shown = f"{port['device']}/{port['port']} {port['state']}  {addresses}{without}"
                print_beside(out, line("", ""), shown)
            for device in provider["left_out"]:
                print_beside(out, line("", "left out", "yellow"), f"{device['device']}: {device['detail']}")
                print_unwrapped(out, line("", "fix", "yellow"), device["fix"])
            for guest in provider["clients"]:
                print_beside(out, line("", "on it"), clients.words_of(guest))
        else:
            print_beside(out, line(names, "not here", "red"), f"{provider['reason']}: {provider['detail']}")
            print_unwrapped(out, line("", "fix", "yellow"), provider["fix"] or "")


def _each_once(providers: dict[str, ProviderOutput]) -> list[tuple[str, ProviderOutput]]:
    """The names and what is said of them: two names of one fabric stand in one row."""
    rows: list[tuple[str, ProviderOutput]] = []
    for name, one in providers.items():
        if rows and one["available"] and rows[-1][1] == one:
            rows[-1] = f"{rows[-1][0]}, {name}", one
        else:
            rows.append((name, one))
    return rows
