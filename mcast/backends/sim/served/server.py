"""The server of a fabric: which processes are attached, as which hosts, and the loop that serves them.

One thread and one selector. Each iteration of the loop runs the steps of the fabric that are due, sleeps
until a socket is ready, reads requests and answers them. Changes of the fabric by another thread, in a test
for example, wake the loop by an eventfd.

States of a client: connected (its first request must be an attach), attached (it has a `ClientSession`, which
owns all that it opened), ended (its session is closed, its host is free). The loop owns the clients. Other
threads may only call `client_processes` and `stop`, and queue an answer.

No client can delay another one: the server sends nothing but answers, and does not read from a client with an
unread answer. A malformed frame ends its client, with a log line, and the sizes of frames are bounded.

Deliberately not handled: clients on other machines, because descriptors are passed over the socket, and
a fabric that outlives its server. When the server ends, every client sees its devices
removed, and starts anew on the next fabric.
"""

from __future__ import annotations

import errno as E
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

from mcast.api import ClientProcess, McastError, Phase, mcast_error
from mcast.backends.sim.clock import WallClock
from mcast.backends.sim.core.topology import Topology
from mcast.backends.sim.fabric import Fabric
from mcast.backends.sim.served import frames
from mcast.backends.sim.served.control import Control
from mcast.backends.sim.served.listener import Listener, is_host_reserved, peer_of
from mcast.backends.sim.served.session import AnswerWithData, ClientSession, DeferredAnswer, refusal_of

logger: logging.Logger = logging.getLogger("mcast")

MAX_CLIENTS = 512
_MAX_FRAMES_PER_WAKE = 16
"""Requests of one client that are carried out before the others have their turn."""
_SLEEP = 1.0
"""Seconds of one sleep: a signal that comes just before it does not end it, and its handler runs after it."""
_BUSY = 0.1
"""Seconds that a newcomer is left alone when not even the reserve descriptor is left."""


class Client:
    """A connection, and once it has attached, its session."""

    def __init__(self, connection: socket.socket, pid: int, program: str) -> None:
        self.socket: socket.socket = connection
        self.pid: int = pid
        self.program: str = program
        self.session: ClientSession | None = None
        self.sees_all: bool = False
        """True if it looks at every host, and so takes none."""
        self.reader: frames.FrameReader = frames.FrameReader(connection.recv, frames.MAX_REQUEST)
        self._out: deque[tuple[memoryview, int | None]] = deque()
        """Frames that have had no room, and what goes with them."""

    @property
    def name(self) -> str:
        """The program and its process, for people."""
        return ClientProcess(self.pid, self.program, "", ()).name

    def answer(self, frame: bytes, fd: int | None = None) -> None:
        """Send a frame now, or when there is room. Raises OSError if nobody can read it any more."""
        self._out.append((memoryview(frame), fd))
        self.flush()

    @property
    def has_unread(self) -> bool:
        """Return True if an answer waits for room."""
        return bool(self._out)

    def flush(self) -> None:
        """Send what the socket takes. Raises OSError if nobody can read it any more."""
        while self._out:
            frame, fd = self._out[0]
            try:
                sent = self.socket.send(frame) if fd is None else socket.send_fds(self.socket, [frame], [fd])
            except BlockingIOError:
                return
            if fd is not None:
                os.close(fd)
            if sent < len(frame):
                self._out[0] = frame[sent:], None
            else:
                self._out.popleft()

    def close(self) -> None:
        """Free what waits."""
        for _, fd in self._out:
            if fd is not None:
                os.close(fd)
        self._out.clear()
        self.socket.close()


class FabricServer:
    """Serves `fabric` on the socket at `path`, which this makes, with mode 0600, and `close` removes.

    `group`: the number of a group whose members may attach besides the user. `say` gets one line for each
    client. Raises OSError, and then there is no socket.
    """

    def __init__(
        self,
        fabric: Fabric,
        path: Path,
        group: int | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._say = say
        self.fabric: Fabric = fabric
        self.path: Path = path
        self.control: Control = Control(fabric, say)
        self.clients: dict[socket.socket, Client] = {}
        self._thread: int | None = None
        self._ends = False
        self._todo: deque[Callable[[], None]] = deque()
        """Calls that other threads have for the loop."""
        with ExitStack() as undone:
            self._listener = Listener(path, group)
            undone.callback(self._listener.close)
            self._selector = selectors.DefaultSelector()
            undone.callback(self._selector.close)
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undone.callback(os.close, self._wake_fd)
            self._reserve = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            undone.pop_all()
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._woken)
        self._selector.register(self._listener.socket, selectors.EVENT_READ, self._accept)

    @property
    def name(self) -> str:
        """The name of the provider whose fabric this is."""
        return "sim-roce" if self.fabric.sa is None else "sim-ib"

    # --- the loop ----------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop`."""
        self._thread = threading.get_ident()
        self._drive(self._wake)
        try:
            while not self._ends:
                left = self.step()
                longest = 0 if self._todo or self._ends else _SLEEP
                for key, _ in self._selector.select(longest if left is None else min(left, longest)):
                    key.data()
        finally:
            self._drive(None)

    def _drive(self, driver: Callable[[], None] | None) -> None:
        """Have the loop do the steps of the fabric, in place of the clock's own thread; None: no longer."""
        with self.fabric.clock:
            if isinstance(self.fabric.clock, WallClock):
                self.fabric.clock.set_driver(driver)

    def step(self) -> float | None:
        """Do what is due; return the seconds until the next step."""
        while self._todo:
            self._todo.popleft()()
        clock = self.fabric.clock
        with clock:
            return clock.run_due() if isinstance(clock, WallClock) else None

    def stop(self) -> None:
        """End `run`; from any thread, or from a signal's handler."""
        self._ends = True
        os.eventfd_write(self._wake_fd, 1)

    def _wake(self) -> None:
        if threading.get_ident() != self._thread:
            os.eventfd_write(self._wake_fd, 1)

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def close(self) -> None:
        """End every session and fault, and remove the socket. `run` must have ended."""
        self.control.faults.close()
        for client in list(self.clients.values()):
            self._end(client)
        self._selector.close()
        self._listener.close()
        os.close(self._wake_fd)
        if self._reserve >= 0:
            os.close(self._reserve)

    # --- clients -----------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._reject_newcomer(error)
            return
        connection.setblocking(False)
        if len(self.clients) >= MAX_CLIENTS:
            self._refuse(connection, f"the server is full: {MAX_CLIENTS} clients are attached")
            return
        try:
            pid = peer_of(connection)
            self.add_client(Client(connection, pid, _program(pid)))
        except OSError as error:
            self._refuse(connection, f"the server cannot take another client: {error.strerror}")

    def add_client(self, client: Client) -> None:
        """Read from now on what the client sends. Raises OSError."""
        self._selector.register(client.socket, selectors.EVENT_READ, partial(self._read, client))
        self.clients[client.socket] = client

    def _reject_newcomer(self, error: OSError) -> None:
        """EMFILE: accept with the reserve descriptor and refuse.

        Otherwise the selector would report the listener forever.
        """
        if self._reserve >= 0:
            os.close(self._reserve)
            with suppress(OSError):
                connection, _ = self._listener.socket.accept()
                self._refuse(connection, f"the server is full: {error.strerror}")
        else:
            time.sleep(_BUSY)
        try:
            self._reserve = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._reserve = -1

    def _refuse(self, connection: socket.socket, why: str) -> None:
        """Answer a newcomer before it asks, and close."""
        self._say(f"refused: {why}")
        with connection, suppress(OSError):
            connection.setblocking(False)
            connection.send(_refusal(0, mcast_error(E.EUSERS, "attach", Phase.OPEN, None, why)))

    def _read(self, client: Client) -> None:
        """Carry out what the client has sent, as far as it is its turn. Its errors end its session alone."""
        if client.socket not in self.clients:
            return
        why = ""
        try:
            if client.has_unread:
                client.flush()
            for _ in range(_MAX_FRAMES_PER_WAKE):
                if client.has_unread:
                    break
                frame = client.reader.read()
                if frame is None:
                    break
                self._handle_frame(client, frame)
            self._watch(client)
            return
        except ValueError as error:  # of pydantic, too: no client of this package sends that
            why = f"a malformed frame: {str(error).partition(chr(10))[0]}"
        except (OSError, EOFError):  # it has ended
            pass
        except Exception as error:  # a bug of the server ends this session alone
            logger.exception("a request of process %s failed, and its client is disconnected", client.pid)
            why = f"internal error of the server: {error}"
        self._end(client, why)

    def _watch(self, client: Client) -> None:
        """A client that does not read its answers is not read either."""
        events = selectors.EVENT_WRITE if client.has_unread else selectors.EVENT_READ
        if self._selector.get_key(client.socket).events != events:
            self._selector.modify(client.socket, events, partial(self._read, client))

    def _handle_frame(self, client: Client, frame: frames.Frame) -> None:
        """Carry out one request."""
        if frame.kind != frames.REQUEST:
            raise ValueError("the frame is no request")
        name, arguments = frames.decode_request(frame.text)
        try:
            found = self._do(client, name, arguments, frame.tail)
        except McastError as error:
            if frame.number:
                client.answer(_refusal(frame.number, error))
            return
        if isinstance(found, DeferredAnswer):
            with self.fabric.clock:
                found.begin(partial(self._answer_later, client, frame.number, name))
        elif isinstance(found, AnswerWithData):
            client.answer(frames.encode_answer(name, frame.number, found.value, found.tail), found.fd)
        elif frame.number:
            client.answer(frames.encode_answer(name, frame.number, found))

    def _do(self, client: Client, name: str, arguments: tuple[Any, ...], tail: bytes) -> object:
        if name == "attach":
            return self._attach(client, *arguments)
        if client.session is None:
            raise ValueError("the first request must be attach")
        return client.session.handle(name, arguments, tail)

    def _answer_later(self, client: Client, number: int, name: str, value: object) -> None:
        """Called in the fabric's lock, by whatever thread has the answer."""

        def answer() -> None:
            if client.socket in self.clients:
                try:
                    client.answer(frames.encode_answer(name, number, value))
                    self._watch(client)
                except OSError:
                    self._end(client)

        self._todo.append(answer)
        self._wake()

    def _end(self, client: Client, why: str = "") -> None:
        """The client has left, or has to leave."""
        if why:
            self._say(f"ended: {client.name}: {why}")
        del self.clients[client.socket]
        self._selector.unregister(client.socket)
        session, client.session = client.session, None
        try:
            if session is not None:
                session.close()
        finally:
            client.close()

    # --- hosts -------------------------------------------------------------------------------

    def _attach(
        self, client: Client, version: int, host: int | str, bind: IPv4Address | IPv6Address | None
    ) -> frames.Attached:
        if client.session is not None:
            raise ValueError("it is already attached")
        fabric, topology = self.fabric, self.fabric.core.topology
        try:
            if version != frames.VERSION:
                raise LookupError(E.EPROTO, f"the server speaks version {frames.VERSION}, not {version}")
            hosts = self._hosts(host, bind, topology)
        except LookupError as error:
            errno, why = error.args if len(error.args) == 2 else (E.ENODEV, error.args[0])
            raise mcast_error(errno, "attach", Phase.OPEN, None, str(why)) from None
        client.sees_all = host == "all" and bind is None
        client.session = ClientSession(fabric, self.name, hosts, self.control, self.client_processes)
        if not client.sees_all:
            places = ", ".join(f"{port.name} {port.addresses[0]}" for port in topology.ports_of(hosts)[:4])
            self._say(f"attached: {client.name} as host {_named(hosts, topology)}: {places}")
        return frames.Attached(
            self.name,
            fabric.link_layer,
            tuple(sorted(client.session.backend.capabilities, key=lambda one: one.name)),
            time.monotonic_ns() - fabric.clock.now,
            _named(hosts, topology),
        )

    def _hosts(
        self, host: int | str, bind: IPv4Address | IPv6Address | None, topology: Topology
    ) -> frozenset[int]:
        """Return the hosts that a client is to be. Raises LookupError."""
        if bind is not None:
            return frozenset({self.fabric.port_of(bind).host})
        if host == "all":
            return topology.hosts
        if host == "free":
            taken = {host for hosts in self._taken() for host in hosts}
            untaken = (host for host in sorted(topology.hosts) if host not in taken)
            free = next((host for host in untaken if not is_host_reserved(self.path, host)), None)
            if free is None:
                raise LookupError(E.EBUSY, f"all {len(topology.hosts)} hosts of the fabric are taken")
            return frozenset({free})
        if host not in topology.hosts:
            raise LookupError(f"host is {host}: the fabric has hosts 0..{len(topology.hosts) - 1}")
        return frozenset({int(host)})

    def _taken(self) -> list[frozenset[int]]:
        """Return the hosts of the clients; a client that sees all hosts takes none."""
        sessions = (client.session for client in self.clients.values() if not client.sees_all)
        return [session.hosts for session in sessions if session is not None]

    def client_processes(self) -> tuple[ClientProcess, ...]:
        """Return who is attached; from any thread."""
        topology = self.fabric.core.topology
        attached = [(client, client.session) for client in list(self.clients.values())]
        return tuple(
            ClientProcess(
                client.pid,
                client.program,
                _named(session.hosts, topology),
                tuple(port.name for port in topology.ports_of(session.hosts)),
            )
            for client, session in attached
            if session is not None
        )


def _refusal(number: int, error: McastError) -> bytes:
    text = frames.adapter(frames.Refusal).dump_json(refusal_of(error))
    return frames.encode(frames.REFUSAL, number, text)


def _named(hosts: frozenset[int], topology: Topology) -> str:
    return "all" if hosts == topology.hosts and len(hosts) > 1 else ", ".join(map(str, sorted(hosts)))


def _program(pid: int) -> str:
    """Return what the process is called, as far as that may be known."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "a process"
    words = words[: words.index(b"-c") if b"-c" in words[:3] else 3]  # what follows -c is source
    names = [Path(word.decode(errors="replace")).name for word in words]
    plain = [name for name in names if name and not name.startswith(("python", "-"))]
    return "".join(c if c.isprintable() else "?" for c in " ".join(plain[:2]) or "python")[:40]


class Serving:
    """A server that runs in a thread of this process, from `with` to its end; it closes the fabric."""

    def __init__(self, server: FabricServer) -> None:
        self.server = server
        self._thread = threading.Thread(target=server.run, name="mcast-sim-serve", daemon=True)

    def __enter__(self) -> FabricServer:
        self._thread.start()
        return self.server

    def __exit__(self, *error: object) -> None:
        self.server.stop()
        self._thread.join()
        self.server.close()
        self.server.fabric.close()
