"""Several commands, each a process of its own, as in as many terminals; most on one served fabric."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from mcast.backends.sim.served.attach import attach

from ..commands import MCAST, Run
from ..waiting import until

SIM = ("--backend", "sim")
UDP = ("--backend", "udp", "-b", "127.0.0.1")


class Terminals:
    """Commands that run at the same time, with one user's directory; all are ended with the test."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self._stack = directory, stack
        self.env = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "MCAST"))
        }
        self.env["XDG_RUNTIME_DIR"] = str(directory)

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        process = self._stack.enter_context(
            subprocess.Popen(
                [str(word) for word in (MCAST, *arguments)],
                cwd=self.directory,
                env=self.env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        self._stack.callback(process.kill)
        return process

    def serve(self, *arguments: object) -> subprocess.Popen[str]:
        """Serve, and wait until that is said."""
        server = self.start("sim", "serve", *arguments)
        assert line_of(server).startswith("serving ")
        self.env["MCAST_SIM"] = exported(server)
        return server


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line of what it prints; the test's limit is the only one."""
    assert process.stdout is not None
    return process.stdout.readline()


def exported(server: subprocess.Popen[str]) -> str:
    """The socket that the line to export names."""
    assert "attach after" in line_of(server)
    line = line_of(server)
    assert line.startswith("  export MCAST_SIM=")
    assert line_of(server) == "end with Ctrl-C\n"
    return line.partition("=")[2].strip()


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    with ExitStack() as stack:
        yield Terminals(tmp_path, stack)


def test_send_and_recv_use_the_exported_fabric(terminals: Terminals, tmp_path: Path) -> None:
    """Send and recv find the fabric that is exported."""
    server = terminals.serve("--ports", 3)
    (tmp_path / "film").write_bytes(bytes(range(256)) * 500)
    receiver = terminals.start("recv", "239.1.1.1", "-o", "copy", *SIM)
    assert "attached: mcast recv" in line_of(server)
    sent = terminals.start("send", "film", "239.1.1.1", *SIM)
    out, err = sent.communicate()
    assert sent.returncode == 0, out + err
    assert err == f"sim: the fabric served at {tmp_path}/mcast/sim.sock\n"
    assert "10.0.0.2 -> 239.1.1.1" in out
    assert "1/1 receivers verified" in out
    assert receiver.wait() == 0
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "film").read_bytes()
    server.send_signal(signal.SIGTERM)
    rest, _ = server.communicate()
    assert server.returncode == 0
    assert [line.split(" (")[0] for line in rest.splitlines()] == ["attached: mcast send"]
    assert not (tmp_path / "mcast" / "sim.sock").exists()


def test_ping_groups_info_and_demo_share_it(terminals: Terminals, tmp_path: Path) -> None:
    server = terminals.serve("--fabric", "infiniband", "--ports", 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(terminals.env, "FORCE_COLOR", "1")  # lines of what goes on are for a terminal
        answering = terminals.start("ping", "239.1.1.1", "--answer", *SIM, "-b", "10.0.0.3")
    assert "as host 2: ib2 10.0.0.3" in line_of(server)
    assert "answering 239.1.1.1 as" in line_of(answering)
    pinged = terminals.start("ping", "239.1.1.1", "-C", 3, "-i", 0.01, *SIM, "--json")
    shown = json.loads(pinged.communicate()[0])
    assert [member["address"] for member in shown["members"]] == ["fe80::200:0:0:3"]
    asked = terminals.start("groups", *SIM, "--json")
    out, err = asked.communicate()
    assert asked.returncode == 0, err
    answering.kill()
    (group,) = (one for one in json.loads(out)["groups"] if one["group"] == "239.1.1.1")
    assert [member["port"] for member in group["members"]] == ["ib2/1"]
    reported = terminals.start("info", "--json")
    sim = json.loads(reported.communicate()[0])["providers"]["sim"]
    assert sim["detail"] == f"the fabric served at {tmp_path}/mcast/sim.sock"
    demo = terminals.start("demo", "--size", 20_000, "--receivers", 2, *SIM)
    out, err = demo.communicate()
    assert demo.returncode == 0, out + err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_pings_with_a_summary(own_network: None, terminals: Terminals, number: int) -> None:
    """A signal ends the pings of both ends with their summary."""
    terminals.env["FORCE_COLOR"] = "1"  # lines of what goes on are for a terminal
    answering = terminals.start("ping", "239.1.1.1", "--answer", *UDP)
    assert "answering 239.1.1.1 as" in line_of(answering)
    asking = terminals.start("ping", "239.1.1.1", "-C", 10**6, "-i", 0.01, *UDP)
    while "seq=" not in (line := line_of(asking)):
        assert line
    for process, summary in (asking, ", 1 answered\n"), (answering, "other messages\n"):
        process.send_signal(number)
        out, _ = process.communicate()
        assert process.returncode == 0
        assert out.splitlines(keepends=True)[-1].startswith("ping: ")
        assert out.endswith(summary)


def test_a_server_under_nohup_outlives_its_terminal(terminals: Terminals, tmp_path: Path) -> None:
    command = ["nohup", str(MCAST), "sim", "serve", "--ports", "2"]
    with subprocess.Popen(
        command, env=terminals.env, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert "serving 2 ports" in line_of(server)
            assert exported(server) == str(tmp_path / "mcast" / "sim.sock")
            server.send_signal(signal.SIGHUP)
            with attach("sim", socket=tmp_path / "mcast" / "sim.sock") as backend:
                assert len(backend.devices()) == 1
            server.terminate()
            assert server.wait() == 0
        finally:
            server.kill()


def test_compose_commands_share_one_fabric(terminals: Terminals, tmp_path: Path) -> None:
    """The commands of the compose file share one fabric.

    Each container's command as a process; their volume is a directory, and their clone this one.
    """
    root = Path(__file__).parents[2]
    about = yaml.safe_load((root / "docs" / "assets" / "sim-compose.yml").read_text("utf-8"))
    services, here = (
        about["services"],
        {"/fabric/": f"{tmp_path}/", "/mcast/": f"{root}/", "/tmp/copy": "copy"},
    )
    assert list(services) == ["fabric", "receiver", "sender"]
    assert about["volumes"].keys() == {"fabric"}
    commands = []
    for service in services.values():
        assert service["volumes"] == ["fabric:/fabric"]
        assert service["environment"] == {"MCAST_SIM": "/fabric/sim.sock"}
        first, *words = service["command"].split()
        for there, place in here.items():
            words = [word.replace(there, place) for word in words]
        assert first == "mcast"
        commands.append(words)
    assert services["fabric"]["healthcheck"]["test"] == "test -S /fabric/sim.sock"
    terminals.env["MCAST_SIM"] = f"{tmp_path}/sim.sock"
    assert commands[0][:2] == ["sim", "serve"]
    terminals.serve(*commands[0][2:])
    receiver, sender = (terminals.start(*command) for command in commands[1:])
    out, err = sender.communicate()
    assert sender.returncode == 0, out + err
    assert receiver.wait() == 0
    assert (tmp_path / "copy").read_bytes() == (root / "README.md").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--fabric", "token-ring"), "--fabric is token-ring: give roce or infiniband"),
        (("--socket", "/nowhere/sim.sock"), "cannot serve at /nowhere/sim.sock: No such file or directory"),
        (
            ("--socket", "/" + "x" * 107),
            f"cannot serve at /{'x' * 107}: the path of a socket has 107 bytes at most, and this one 108",
        ),
        (
            ("--group", "no-such-group", "--socket", "sim.sock"),
            "--group is no-such-group: this host has no such group",
        ),
        (
            ("--group", "root"),
            "--group needs --socket PATH: the default socket is in a directory that others cannot enter",
        ),
        (
            ("--socket", MCAST),
            f"cannot serve at {MCAST}: there is a file that is no socket, and is not removed; choose another "
            "path with --socket",
        ),
        (("missing.toml",), "cannot read missing.toml: No such file or directory"),
        (("missing.toml", "--ports", 2), "the file describes the fabric: leave out --fabric and --ports"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(
    here: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[object, ...], sentence: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    done = here("sim", "serve", *arguments)
    assert (done.returncode, done.stderr) == (2, f"mcast: {sentence}\n")


def test_a_place_that_others_may_write_to_is_refused(
    here: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "mcast").mkdir()
    (tmp_path / "mcast").chmod(0o777)
    done = here("sim", "serve")
    assert done.returncode == 2
    assert done.stderr.startswith("mcast: cannot serve: others may write to")


def test_a_reader_that_has_gone_holds_nobody_up(tmp_path: Path) -> None:
    """`head` closes its input once it has its lines."""
    call_user, ours = os.pipe()
    os.close(call_user)
    path = tmp_path / "fabric.sock"
    command = [str(MCAST), "sim", "serve", "--socket", str(path), "--ports", "2"]
    with subprocess.Popen(command, stdout=ours, stderr=subprocess.PIPE) as server:
        try:
            os.close(ours)
            until(path.exists)
            for _ in range(3):
                with attach("sim", socket=path) as backend:
                    assert len(backend.devices()) == 1
            server.terminate()
            assert server.wait() == 0
        finally:
            server.kill()


def test_ctrl_s_on_its_terminal_holds_nobody_up(terminals: Terminals, tmp_path: Path) -> None:
    """The lines that wait come with Ctrl-Q; the end does not wait for them."""
    leader, follower = pty.openpty()
    words, path = [str(MCAST), "sim", "serve", "--ports", "2"], tmp_path / "mcast" / "sim.sock"
    with (
        os.fdopen(leader, "r+b", buffering=0) as terminal,
        subprocess.Popen(
            words, cwd=tmp_path, env=terminals.env, stdin=follower, stdout=follower, stderr=follower
        ) as server,
    ):
        os.close(follower)
        shown = b""

        def read_until(wanted: bytes) -> None:
            nonlocal shown
            while wanted not in shown:
                shown += terminal.read(4096)

        try:
            read_until(b"end with Ctrl-C")
            terminal.write(b"\x13")
            for _ in range(2):
                with attach("sim", socket=path) as backend:
                    assert len(backend.devices()) == 1
            terminal.write(b"\x11")
            read_until(b"attached:")
            terminal.write(b"\x13")
            with attach("sim", socket=path) as backend:
                assert len(backend.devices()) == 1
            server.send_signal(signal.SIGTERM)
            assert server.wait() == 0
        finally:
            server.kill()
    assert not path.exists()
