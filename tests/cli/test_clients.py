"""Who is on a served fabric, as `info`, `groups` and `top` show it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from mcast import open_backend, open_endpoint
from mcast.backends.sim import Fabric
from mcast.backends.sim.served.server import FabricServer, Serving
from mcast.cli.clients import others
from mcast.cli.top import _table
from mcast.endpoint.watching import samples

from ..commands import Run

FILM = {"pid": 4242, "program": "film", "hosts": "1", "devices": ["roce1"]}


@pytest.fixture(autouse=True)
def film(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FabricServer]:
    """A served fabric, and on it a member that the server takes for another process."""
    path = tmp_path / "fabric.sock"
    monkeypatch.setenv("MCAST_SIM", str(path))
    with (
        Serving(FabricServer(Fabric.roce(ports=3, clock="wall"), path)) as server,
        open_endpoint("sim", "10.0.0.2") as endpoint,
        endpoint.join("239.1.1.1"),
    ):
        (client,) = server.clients.values()
        client.pid, client.program = 4242, "film"
        yield server


def test_info_names_each_program_and_its_ports(here: Run) -> None:
    found = json.loads(here("info", "--json").stdout)["providers"]
    assert found["sim"]["clients"] == found["sim-shared"]["clients"] == [FILM]
    assert found["sim-roce"]["clients"] == []
    assert "film (4242), host 1: roce1" in here("info").stdout


def test_groups_names_the_program_of_each_member(here: Run) -> None:
    assert json.loads(here("groups", "--backend", "sim", "--json").stdout)["clients"] == [FILM]
    shown = here("groups", "--backend", "sim").stdout
    assert "roce1/1, film (4242)" in shown
    assert "on the fabric\n  film (4242), host 1: roce1\n" in shown


def test_top_names_clients_that_come_and_go(here: Run) -> None:
    """Top names who is on the fabric when that changes."""
    sample = ("top", "239.1.1.1", "--backend", "sim", "--interval", "0.05")
    done = here(*sample, "-C", 2)
    assert done.stdout.count("on the fabric: film (4242), host 1: roce1") == 1
    assert json.loads(here(*sample, "-C", 1, "--json").stdout)["clients"] == [FILM]


def test_a_terminal_shows_them_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with open_endpoint("sim") as endpoint, endpoint.join("239.1.1.1"):
        sample = next(samples(endpoint, 0.05, 1))
        Console(width=80).print(_table(sample, [], others(endpoint.backend)))
    assert "\non the fabric: film (4242), host 1: roce1\n" in capsys.readouterr().out


def test_the_name_of_a_program_is_no_style(here: Run, film: FabricServer) -> None:
    (client,) = film.clients.values()
    client.program = "film[bold]"
    assert "roce1/1, film[bold] (4242)" in here("groups", "--backend", "sim").stdout


def test_who_looks_on_is_no_member_s_program(here: Run, film: FabricServer) -> None:
    with open_backend("sim", host="all"):
        for client in film.clients.values():
            client.pid = 4242 if client.program == "film" else 4243
            client.program = "film" if client.pid == 4242 else "looker"
        shown = here("groups", "--backend", "sim").stdout
    assert "looker (4243), looks on" in shown
    assert "roce1/1, film (4242) " in shown


def test_process_without_a_pid_is_elsewhere(here: Run, film: FabricServer) -> None:
    """A process without a number is in another container.

    A server, too, sees processes of its own PID namespace and of those below it alone.
    """
    for client in film.clients.values():
        client.pid = 0
    shown = here("groups", "--backend", "sim").stdout
    assert "a process in another container" in shown
    assert "(0)" not in shown


def test_nobody_is_known_where_the_server_has_gone(tmp_path: Path) -> None:
    path = tmp_path / "other.sock"
    with Serving(FabricServer(Fabric.roce(ports=3, clock="wall"), path)):
        backend = open_backend("sim", socket=path)
    with backend:
        assert backend.client_processes() == ()
