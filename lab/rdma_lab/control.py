"""Control of a running guest from other processes of the same user.

Theory of operation

Three processes take part. The *runner* is the one that called LabMachine.run or shell; it owns QEMU. The
*client* is `rdma-lab break` or `rdma-lab tap` in another terminal. The *guest's loop* is a shell loop in
guest.sh.

    client --- unix socket ---> runner (thread) --- virtio port lab.go ---> guest's loop --- sh
    client <-- pipe, passed by the runner ---------- virtio port lab.tap <-- capture.py

Socket. The runner listens from the moment the guest is ready until it ends, on `FABRIC-PID` in the runtime
directory, where PID is QEMU's. The directory has mode 0700 and belongs to the user, or it is not used. The
socket gets its name when it already listens: a name that refuses a connection is therefore left from a
runner that was killed, and whoever lists the directory removes it.

Messages are JSON, one each packet of a SOCK_SEQPACKET socket. The runner greets a client with what it knows
of the guest (`About`). A request is {"run": SCRIPT, "after": SCRIPT, "tap": bool}; the answer is {"output",
"status"} or {"error"}. The runner knows no faults: what SCRIPT does is the client's business (faults.py,
tap.py). "after" runs in the guest when the client has closed its connection, however it ended; so an
interrupted client leaves nothing behind.

The guest's loop reads "ID SCRIPT" and answers "ID BASE64", in turn. The ID ties the answer to its client.
The answer to a client that is gone is dropped. The guest stops each script after MAX_SCRIPT_SECONDS; what
may take longer runs in its background.

Tap. Packets do not pass through the runner: it holds the read end of a pipe that QEMU writes, and passes
that descriptor to one client at a time. What an earlier client left in the pipe is told from the new
capture by a random mark (tap.py). A client that reads slowly stops QEMU's writes, then the guest's reader;
the guest then counts what it drops. Nothing else waits for it.

Time limits. The client waits HELLO_TIMEOUT for the greeting and ANSWER_TIMEOUT for an answer: a stopped
runner or QEMU costs that long and an error. The runner never waits: its sockets do not block, and it closes
a client that does not read.

Threads. The runner's thread owns the listener, the clients and, from the guest's readiness on, the port
lab.go. The main thread only starts and stops it. When the runner is killed, QEMU is (setpriv --pdeathsig),
and clients see the end.

Not handled: more than one client's tap at a time; users other than the guest's, and root's view of them.
"""

import base64
import binascii
import json
import os
import re
import selectors
import socket
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rdma_lab.errors import GuestStoppedError, LabError, LabTimeoutError, LabUnavailableError

HELLO_TIMEOUT, ANSWER_TIMEOUT = 5.0, 60.0
"""Seconds that a client waits for the greeting, and for an answer of the guest."""
MAX_SCRIPT_SECONDS = 40
"""Seconds after which the guest kills a script; below ANSWER_TIMEOUT, so that the client sees its output."""
MAX_MESSAGE = 1 << 17
"""Maximum bytes of a message; a socket's buffer holds it."""
MAX_BACKLOG = 1 << 16
"""Maximum bytes that wait for a guest that does not read."""
NAME = re.compile(r"(roce|infiniband)-(\d+)")
"""Name of a guest, and of its socket."""


@dataclass(frozen=True, slots=True)
class About:
    """Description of a running guest, as the runner greets a client with it."""

    name: str
    fabric: str
    ports: int
    switches: int
    kernel: str
    command: str


def runtime_dir() -> Path:
    """Return the directory of the guests' sockets, made if it is not there. Raises LabUnavailableError.

    It is in $XDG_RUNTIME_DIR if that is this user's own, and not another's, as after su; or else in /tmp.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    folder = base / "rdma-lab" if _is_private(base) else Path(f"/tmp/rdma-lab-{os.geteuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        raise LabUnavailableError(
            f"{folder} is not a directory that only you can write to: remove it, or set XDG_RUNTIME_DIR to "
            "one that is"
        )
    return folder


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of `path` that fits into a socket's address, which takes 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


# The runner's side


@dataclass(eq=False)
class _Client:
    sock: socket.socket
    after: list[str] = field(default_factory=list)
    """Scripts to run in the guest when the client has gone."""
    taps: bool = False


class ControlServer:
    """Serves clients for as long as the block; see the module's theory of operation."""

    def __init__(self, about: About, line: socket.socket, tap: int) -> None:
        """`line` leads to the guest's loop, `tap` is the read end of the pipe with its captures.

        Both stay the caller's.
        """
        self._about, self._line, self._tap = about, line, tap
        self._clients: set[_Client] = set()
        self._asked: dict[int, _Client] = {}
        self._last_id = 0
        self._to_guest, self._from_guest = bytearray(), bytearray()
        self._has_ended = False
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="rdma-lab control", daemon=True)

    def __enter__(self) -> "ControlServer":
        self._path = runtime_dir() / self._about.name
        unnamed = self._path.with_name(f".{self._about.name}")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        unnamed.unlink(missing_ok=True)
        with _short(unnamed) as address:
            self._listener.bind(address)
        unnamed.chmod(0o600)
        self._listener.listen()
        self._listener.setblocking(False)
        unnamed.replace(self._path)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._selector.register(self._line, selectors.EVENT_READ, self._guest)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        self._wake.close()
        self._thread.join()
        for client in list(self._clients):
            client.sock.close()
        self._listener.close()
        self._woken.close()
        self._selector.close()

    def _serve(self) -> None:
        while True:
            for key, mask in self._selector.select():
                if key.data is None:
                    return
                with suppress(BlockingIOError):
                    key.data(mask)

    def _accept(self, _: int) -> None:
        sock, _address = self._listener.accept()
        sock.setblocking(False)
        client = _Client(sock)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, lambda _: self._request(client))
        self._answer(client, asdict(self._about))

    def _answer(self, client: _Client, message: dict[str, Any], *fds: int) -> None:
        if client not in self._clients:
            return
        try:
            socket.send_fds(client.sock, [json.dumps(message).encode()], fds)
        except OSError:  # gone, or does not read
            self._close(client)

    def _close(self, client: _Client) -> None:
        self._clients.discard(client)
        with suppress(KeyError):
            self._selector.unregister(client.sock)
        client.sock.close()
        for script in client.after:
            self._tell(script)
        client.after.clear()

    def _request(self, client: _Client) -> None:
        if client not in self._clients:  # closed since the selector has returned
            return
        if self._has_ended:
            self._close(client)
            return
        try:
            request = json.loads(client.sock.recv(MAX_MESSAGE))
            script, after, taps = (request[key] for key in ("run", "after", "tap"))
        except BlockingIOError:
            return
        except (ConnectionError, ValueError, LookupError, TypeError):  # it has ended, or is no client of ours
            self._close(client)
            return
        if taps:
            if any(other.taps for other in self._clients):
                self._answer(client, {"error": "another process taps this guest: end that first"})
                return
            client.taps = True
            self._answer(client, {"tap": True}, self._tap)
        if after:
            client.after.append(after)
        number = self._tell(script)
        if number is None:
            error = "the guest no longer takes requests: stop it, and run it again"
            self._answer(client, {"error": error})
        else:
            self._asked[number] = client

    def _tell(self, script: str) -> int | None:
        """Have the guest's loop run `script`; return the number of its answer, or None if too many wait."""
        self._last_id += 1
        line = f"{self._last_id} {script}\n".encode()
        if self._has_ended or len(self._to_guest) + len(line) > MAX_BACKLOG:
            return None
        self._to_guest += line
        self._selector.modify(self._line, selectors.EVENT_READ | selectors.EVENT_WRITE, self._guest)
        return self._last_id

    def _guest(self, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                with suppress(BlockingIOError):
                    del self._to_guest[
                        : self._line.send(self._to_guest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                    ]
                if not self._to_guest:
                    self._selector.modify(self._line, selectors.EVENT_READ, self._guest)
            if not mask & selectors.EVENT_READ:
                return
            data = self._line.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
        except ConnectionError:
            data = b""
        if not data:  # QEMU has ended; the runner's main thread sees that, too
            self._has_ended = True
            self._selector.unregister(self._line)
            for one in list(self._clients):
                self._close(one)
            return
        *lines, rest = (self._from_guest + data).split(b"\n")
        self._from_guest = rest
        for line in lines:
            number, _, encoded = line.partition(b" ")
            client = self._asked.pop(int(number), None) if number.isdigit() else None
            if client is not None:
                self._answer(client, _decode(encoded))


def _decode(encoded: bytes | bytearray) -> dict[str, Any]:
    """Return a script's output and status; the status is the last line of what the guest encoded."""
    try:
        text = base64.b64decode(encoded).decode(errors="replace")
        output, _, status = text.rstrip("\n").rpartition("\n")
        return {"output": output, "status": int(status)}
    except (binascii.Error, ValueError):
        return {"error": f"the guest's answer is damaged: {encoded[:40]!r}"}


# The client's side


class Guest:
    """A connection to a running guest."""

    def __init__(self, sock: socket.socket, about: About) -> None:
        self.sock: socket.socket = sock
        self.about: About = about

    def __enter__(self) -> "Guest":
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def run(self, script: str, *, after: str | None = None) -> str:
        """Run a line of shell as root in the guest and return its output, of stdout and stderr.

        `after` runs when this connection ends. Raises LabError with the output if the status is not 0.
        """
        self.send(script, after=after)
        return self.output(self.receive())

    def output(self, answer: dict[str, Any]) -> str:
        if answer["status"]:
            last = answer["output"].strip().rpartition("\n")[2]
            raise LabError(
                last or f"{self.about.name}: a command in the guest failed with status {answer['status']}"
            )
        return str(answer["output"])

    def send(self, script: str, *, after: str | None = None, tap: bool = False) -> None:
        request = {"run": script, "after": after, "tap": tap}
        try:
            self.sock.send(json.dumps(request).encode())
        except ConnectionError:
            raise self._ended() from None

    def receive(self, fds: list[int] | None = None) -> dict[str, Any]:
        """Return the next answer; a descriptor that is passed with it is added to `fds`."""
        try:
            data, passed, _, _ = socket.recv_fds(self.sock, MAX_MESSAGE, 1)
        except TimeoutError:
            raise LabTimeoutError(
                f"{self.about.name} does not answer within {self.sock.gettimeout():g} s: its QEMU, or the "
                "process that runs it, is stopped or very slow"
            ) from None
        except ConnectionError:
            data, passed = b"", []
        if fds is not None:
            fds += passed
        if not data:
            raise self._ended()
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise LabError(f"{self.about.name}: {answer['error']}")
        return answer

    def wait_for_end(self, seconds: float) -> None:
        """Return after `seconds`. Raises GuestStoppedError if the guest ends before."""
        self.sock.settimeout(seconds)
        with suppress(LabTimeoutError):
            self.receive()

    def _ended(self) -> GuestStoppedError:
        return GuestStoppedError(f"{self.about.name} has ended")


def connect(name: str | None = None) -> Guest:
    """Connect to the guest of that name, or to the only one that runs.

    Raises LabUnavailableError, GuestStoppedError, LabTimeoutError.
    """
    found = guests()
    if not found:
        if "RDMA_LAB" in os.environ:
            raise LabUnavailableError(
                "this is the guest, and a fabric is broken or captured from outside: run it in another "
                "terminal of the host, or use the guest's own tools (ip link, /sys/kernel/debug/softib)"
            )
        raise LabUnavailableError(
            "no guest of yours is running and ready: start one in another terminal with "
            "`rdma-lab run -- COMMAND`"
        )
    try:
        if name is not None:
            chosen = next((guest for guest in found if guest[0] == name), None)
            if chosen is None:
                raise LabUnavailableError(f"no guest {name} is running: there are {_listed(found)}")
        elif len(found) > 1:
            raise LabUnavailableError(
                f"{len(found)} guests are running: choose one with --guest: {_listed(found)}"
            )
        else:
            (chosen,) = found
    except LabUnavailableError:
        for _, sock in found:
            sock.close()
        raise
    for other in found:
        if other is not chosen:
            other[1].close()
    guest = _greeted(*chosen, HELLO_TIMEOUT)
    guest.sock.settimeout(ANSWER_TIMEOUT)
    return guest


def guests() -> list[tuple[str, socket.socket]]:
    """Return a connection to each running guest, by name.

    Sockets on which nobody listens any more are removed.
    """
    found = []
    for path in sorted(runtime_dir().iterdir()):
        if not NAME.fullmatch(path.name):
            continue
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(HELLO_TIMEOUT)
        try:
            with _short(path) as address:
                sock.connect(address)
        except ConnectionRefusedError:
            sock.close()
            path.unlink(missing_ok=True)
            continue
        except OSError:  # ended meanwhile
            sock.close()
            continue
        found.append((path.name, sock))
    return found


def _greeted(name: str, sock: socket.socket, timeout: float) -> Guest:
    """Return the guest that greets on `sock`, which is closed if it does not."""
    with ExitStack() as stack:
        guest = Guest(stack.enter_context(sock), About(name, "", 0, 0, "", ""))
        sock.settimeout(timeout)
        guest.about = About(**guest.receive())
        stack.pop_all()
        return guest


def _listed(found: Sequence[tuple[str, socket.socket]]) -> str:
    """Return the names of guests, each with its command, within HELLO_TIMEOUT in all."""
    end = time.monotonic() + HELLO_TIMEOUT
    words = []
    for name, sock in found:
        try:
            about = _greeted(name, sock, max(end - time.monotonic(), 0.01)).about
            words.append(f"{name} ({about.command})")
        except LabError:
            words.append(f"{name} (does not answer)")
    return ", ".join(words)
