"""JSON schemas: each `--json` has one, each is up to date, and what commands really print is as it says."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import typer.main
from pydantic import TypeAdapter, ValidationError

import rdma_lab.cli
from mcast.backends.sim import Fabric
from mcast.backends.sim.scenario.model import Scenario, ready_made
from mcast.backends.sim.scenario.runner import load as load_scenario
from mcast.backends.sim.served.server import FabricServer, Serving
from mcast.cli import SUMMARIES, load
from mcast.cli.outputs import LINES, OUTPUTS, ErrorOutput
from scripts import schemas

from ..commands import MCAST, Run
from ..waiting import until
from .test_json import with_json

GROUP = "239.1.1.1"
SIM = ("--backend", "sim")
ROOT = Path(__file__).parents[2]


def test_each_json_option_has_a_schema() -> None:
    """Walk the commands: none with --json is without a schema, and no schema is of none."""
    mcast = [f"mcast {found}" for name in SUMMARIES for found in with_json(name, load(name))]
    lab = with_json("rdma-lab", typer.main.get_command(rdma_lab.cli.app))
    found = {*mcast, *lab}
    lack = sorted(found - {*schemas.commands()})
    assert lack == [], "add the types of their outputs to mcast/cli/outputs.py, and run make generated"
    assert sorted({*schemas.commands()} - found) == [], "these have no option --json"
    assert {*schemas.commands().values()} <= {*schemas.described()}
    assert {*LINES} <= {*OUTPUTS}


def test_schemas_are_up_to_date() -> None:
    """`make generated` renews them."""
    kept = {path.name.removesuffix(".schema.json"): path for path in schemas.FOLDER.iterdir()}
    assert sorted(kept) == sorted(schemas.described())
    stale = [name for name, path in kept.items() if path.read_text("utf-8") != schemas.schema(name)]
    assert stale == [], "run make generated"


def fields(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of a schema, by its title."""
    for one in (schema, *schema.get("$defs", {}).values()):
        if "properties" in one:
            yield one["title"], one


@pytest.mark.parametrize("name", schemas.described())
def test_objects_of_schemas_are_described(name: str) -> None:
    schema = json.loads(schemas.schema(name))
    assert [title for title, one in fields(schema) if not one.get("description")] == []
    if name == "scenario":
        assert [
            f"{title}.{field}"
            for title, one in fields(schema)
            for field, about in one["properties"].items()
            if field != "kind" and not about.get("description")
        ] == []


def check(command: str, text: str) -> Any:
    """Check an object that a command printed: it is as its schema says, and has no field besides."""
    adapter: TypeAdapter[Any] = TypeAdapter(schemas.described()[schemas.commands()[command]].kind)
    printed = json.loads(text)
    again = adapter.dump_python(adapter.validate_json(text, strict=True), mode="json")
    assert again == printed, f"{command}: a field that no schema has"
    return printed


def test_what_differs_from_a_schema_is_found() -> None:
    good = {"version": "1", "python": "3", "system": "Linux", "providers": {}}
    check("mcast info", json.dumps(good))
    with pytest.raises(AssertionError, match="a field that no schema has"):
        check("mcast info", json.dumps(good | {"more": 1}))
    for bad in (good | {"version": 1}, {"version": "1"}):
        with pytest.raises(ValidationError):
            check("mcast info", json.dumps(bad))


ALONE: dict[str, list[tuple[str, ...]]] = {
    "doctor": [("--backend", "sim-roce"), ("EINVAL",)],
    "info": [()],
    "mgid": [
        (GROUP, "239.129.1.1"),
        ("ff0e::1", "ff12:401b:ffff::1", "01:00:5e:01:01:01", "33:33:00:00:00:01"),
    ],
    "demo": [("--size", "10K", "--receivers", "2")],
    "bench": [(*SIM, "--seconds", "0.05", "--interval", "10ms")],
    "listen": [(GROUP, "--demo", "--backend", "sim-roce", "--count", "3")],
    "top": [(GROUP, "--demo", "--backend", "sim-ib", "--interval", "0.1", "-C", "2")],
    "record": [(GROUP, "--demo", "--backend", "sim-roce", "--count", "3", "-o", "recorded.pcapng")],
    "sim cast": [("--receivers", "3", "--size", "100K")],
    "sim run": [(name,) for name in ready_made()],
    "conformance": [("--backend", "sim-roce")],
    "lab check": [()],
}
"""Command -> arguments of calls that need no other process."""

TOGETHER = ("send", "recv", "ping", "groups", "replay", "bench")
"""Commands that are tried on a served fabric, with another process."""


def test_each_command_with_json_is_tried() -> None:
    tried = {f"mcast {command}" for command in (*ALONE, *TOGETHER)}
    assert tried == {*schemas.commands()} - {"rdma-lab check"}


@pytest.mark.parametrize(
    ("command", "words"),
    [(command, words) for command, calls in ALONE.items() for words in calls],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "alone",
)
def test_output_is_as_its_schema_says(here: Run, command: str, words: tuple[str, ...]) -> None:
    done = here(*command.split(), *words, "--json")
    assert done.returncode in (0, 1), done.stderr
    objects = done.stdout.splitlines() if command in LINES else [done.stdout]
    assert objects
    for one in objects:
        check(f"mcast {command}", one)


def test_error_is_as_its_schema_says(here: Run) -> None:
    adapter = TypeAdapter(ErrorOutput)
    printed = here("mgid", "10.0.0.1", "--json").stdout
    assert adapter.validate_json(printed, strict=True) == json.loads(printed)


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a command on a fabric that this process serves."""
    path = tmp_path / "fabric.sock"
    monkeypatch.setenv("MCAST_SIM", str(path))
    with ExitStack() as stack:
        stack.enter_context(Serving(FabricServer(Fabric.roce(ports=4, clock="wall"), path)))

        def run(*words: object, form: str = "--json") -> subprocess.Popen[str]:
            process = stack.enter_context(
                subprocess.Popen(
                    [str(word) for word in (MCAST, *words, *SIM, *filter(None, [form]))],
                    cwd=tmp_path,
                    env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")},
                    text=True,
                    stdout=subprocess.PIPE,
                )
            )
            stack.callback(process.kill)
            return process

        yield run


def test_outputs_of_a_transfer(start: Start, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "film").write_bytes(bytes(50_000))
    both = {"recv": start("recv", GROUP, "-o", "copy/"), "send": start("send", "folder", GROUP, "-n", 1)}
    for command, process in both.items():
        found = check(f"mcast {command}", process.communicate()[0])
        assert len(found["files"]) == 2


def test_output_of_a_transfer_that_is_cut_short(start: Start, tmp_path: Path) -> None:
    (tmp_path / "film").write_bytes(bytes(5_000_000))
    receiver = start("recv", GROUP, "-o", "copy")
    sent = start("send", "film", GROUP, "-n", 1, "--strategy", "deadline:0.05", "--rate", "8M")
    found = check("mcast send", sent.communicate()[0])
    assert not found["receivers"][0]["verified"]
    assert found["files"][0]["blake3"] is None
    found = check("mcast recv", receiver.communicate()[0])
    assert found["missed"]


def test_transfer_that_is_cut_short_is_shown(start: Start, tmp_path: Path) -> None:
    """A file whose digest is not known yet is shown without it."""
    (tmp_path / "film").write_bytes(bytes(5_000_000))
    start("recv", GROUP, "-o", "copy")
    words = ("send", "film", GROUP, "-n", 1, "--strategy", "deadline:0.05", "--rate", "8M")
    shown = start(*words, form="").communicate()[0]
    assert shown.startswith("film: ")
    assert "BLAKE3" not in shown
    assert "send: 0/1 receivers verified" in shown


def test_outputs_of_pings_and_groups(start: Start) -> None:
    answering = start("ping", GROUP, "--answer", "-C", 3, "-b", "10.0.0.2")

    def groups() -> Any:
        return check("mcast groups", start("groups").communicate()[0])["groups"]

    until(groups)
    pinged = start("ping", GROUP, "-C", 3, "-i", 0.01, "-b", "10.0.0.3")
    assert check("mcast ping", pinged.communicate()[0])["members"]
    assert check("mcast ping", answering.communicate()[0])["heard"]


def test_outputs_of_a_measurement_between_two(start: Start) -> None:
    server = start("bench", "--server")
    client = start("bench", "--client", "--seconds", 0.2, "--interval", 0.1)
    assert check("mcast bench", client.communicate()[0])["intervals"]
    assert check("mcast bench", server.communicate()[0])["role"] == "server"


def test_output_of_a_replay(start: Start, here: Run) -> None:
    done = here("record", GROUP, "--demo", "--backend", "sim-roce", "-C", "3", "-o", "recorded.pcapng")
    assert done.returncode == 0
    assert check("mcast replay", start("replay", "recorded.pcapng", "--max").communicate()[0])["sent"] == 3


def test_scenario_of_an_output_can_be_read_again(here: Run) -> None:
    """Names stand for numbers, as in a file."""
    for name in ready_made():
        scenario = load_scenario(name)
        assert Scenario.model_validate_json(scenario.model_dump_json()) == scenario
