"""The server of a fabric: which processes are attached, as which hosts, and the loop that serves them.

One thread, which waits on the sockets alone. A client is a stranger: bytes that are no request end its
session, and so do answers that it does not read in time; no other client notices.
"""

from __future__ import annotations

import errno as E
import fcntl
import logging
import os
import signal
import socket
import termios
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from mcast.api import Guest, McastError, Phase, mcast_error
from mcast.backends.sim.core.topology import Topology
from mcast.backends.sim.fabric import Fabric
from mcast.backends.sim.shared import frames, posts
from mcast.backends.sim.shared.arrivals import Pump
from mcast.backends.sim.shared.control import Control
from mcast.backends.sim.shared.door import AT_ONCE, Door, credentials
from mcast.backends.sim.shared.posting import BURST
from mcast.backends.sim.shared.rings import Page
from mcast.backends.sim.shared.session import Answer, ClientSession, Later, refusal_of
from mcast.backends.sim.shared.watch import ServerWatch, needs_descriptors

logger: logging.Logger = logging.getLogger("mcast")

MOST_CLIENTS = 512
REQUEST = 4
"""A request counts as so many of the `BURST` posts of a turn."""

MOST_UNREAD = 16
"""Descriptors on their way to one client: the kernel counts them as the server's."""

_GONE = {E.EPIPE: "", E.ECONNRESET: "", E.EAGAIN: "it does not read"}
"""Why the session of a client ends whose answer could not be sent."""
_INT = array("i").itemsize
_READ = int(socket.MSG_DONTWAIT | socket.MSG_TRUNC)
_READ_FIRST = int(socket.MSG_DONTWAIT | socket.MSG_TRUNC | socket.MSG_CMSG_CLOEXEC)


class Client:
    """A connection, and once it has attached, its session."""

    def __init__(self, connection: socket.socket, pid: int, program: str) -> None:
        self.socket: socket.socket = connection
        self.pid: int = pid
        self.program: str = program
        self.session: ClientSession | None = None
        self.ring: int | None = None
        """A descriptor that came with the first request, until the session has it."""
        self.sees_all = False
        """Whether it looks at every host, and so takes none."""
        self.turn: int = 0
        """Of the loop, in which its frames were read last."""
        self._passed = 0

    def pass_descriptor(self) -> None:
        """One more is about to be sent. Raises BlockingIOError for a client that leaves too many unread."""
        self._passed += 1
        if self._passed > MOST_UNREAD:
            unread = array("i", [0])
            fcntl.ioctl(self.socket, termios.TIOCOUTQ, unread)
            if unread[0]:
                raise BlockingIOError(E.EAGAIN, "it does not read")
            self._passed = 1


@contextmanager
def _woken_by_signals(watch: ServerWatch) -> Iterator[None]:
    """End the sleep of `watch` when a signal comes, because Python's handler runs after it alone.

    The signal itself ends the sleep only if it comes to the main thread, and not just before.
    """
    if threading.current_thread() is not threading.main_thread():  # which takes all handlers
        yield
        return
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        watch.add(reader.fileno(), partial(reader.recv, 4096))
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            watch.remove(reader.fileno())


class FabricServer:
    """Serves `fabric` on the socket at `path`, which this makes, with mode 0600, and `close` removes.

    `group`: the number of a group whose members may attach besides the user. `say` is told in a line each who
    comes and goes. Raises OSError, and then there is no socket.
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
        self._buffer = memoryview(bytearray(frames.MOST_FRAME))
        with ExitStack() as undone:
            self._door = Door(path, group)
            undone.callback(self._door.close)
            self._watch = ServerWatch()
            undone.callback(self._watch.close)
            self._pump = Pump(self._watch, Page())
            undone.callback(self._pump.page.close)
            self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undone.callback(os.close, self._stop)
            self._watch.add(self._door.fileno(), self._accept)
            undone.pop_all()
        fabric.parts.receivers.on_change = self._pump.page.change

    @property
    def name(self) -> str:
        """Of the provider whose fabric this is."""
        return "sim-roce" if self.fabric.sa is None else "sim-ib"

    # --- the loop ----------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop`."""
        watch, pump, clock, ends = self._watch, self._pump, self.fabric.clock, list[bool]()
        watch.add(self._stop, lambda: ends.append(True))
        with _woken_by_signals(watch):
            while not ends:
                ready = watch.wait()
                pump.begin()
                for call in ready:
                    call()
                with clock:
                    pump.end()

    def stop(self) -> None:
        """End `run`; from any thread, or from a signal's handler."""
        os.eventfd_write(self._stop, 1)

    def close(self) -> None:
        """End every session and fault, and remove the socket. `run` must have ended."""
        self._pump.page.change()  # what is posted from now on is lost
        self.control.faults.close()
        for client in list(self.clients.values()):
            self._end(client, "")
        with self.fabric.clock:
            self.fabric.parts.receivers.on_change = None
            self._pump.page.close()
        self._watch.close()
        self._door.close()
        os.close(self._stop)

    # --- clients -----------------------------------------------------------------------------

    def _accept(self) -> None:
        connection = self._door.accept()
        if connection is None:
            return
        try:
            if len(self.clients) >= MOST_CLIENTS:
                raise OSError(E.EUSERS, f"{MOST_CLIENTS} clients are there")
            pid = credentials(connection)[0]
            client = Client(connection, pid, _program(pid))
            self.welcome(client)
        except OSError as error:
            logger.warning("nobody attached: %s", error)
            connection.close()

    def welcome(self, client: Client) -> None:
        """Read from now on what the client sends. Raises OSError."""
        self._watch.add(client.socket.fileno(), partial(self._read, client, self._take))
        self.clients[client.socket] = client

    def _read(self, client: Client, take: Callable[[Client], str | None]) -> None:
        """Carry out what the client has sent, as far as it is its turn. Its errors end its session alone.

        `take` gives the reason why it has to leave, None if it stays.
        """
        if client.socket not in self.clients:
            return  # its socket and its pipe were ready, and the first has ended the session
        try:
            why = take(client)
        except ValueError as error:  # of pydantic, too: no client of this package sends that
            why = str(error).partition("\n")[0]
        except OSError as error:  # it does not read, or it has gone
            why = _GONE.get(error.errno or 0, f"{error.strerror}")
        except Exception as error:  # an error in the server: the others go on
            logger.exception("a request of process %s failed", client.pid)
            why = f"an error of the server: {error}"
        if why is not None:
            self._end(client, why)

    def _take(self, client: Client) -> str | None:
        """Frames of its socket. What lies in its pipe was posted before the frame that follows."""
        turn, client.turn = client.turn, self._pump.turn
        left = BURST if turn == client.turn - 1 else 1  # to look for more in vain costs as much as a turn
        session, buffer = client.session, self._buffer
        while left > 0:
            try:
                size = self._first(client) if session is None else client.socket.recv_into(buffer, 0, _READ)
            except BlockingIOError:
                break
            except OSError:
                size = 0
            if session is not None:
                session.look()
            if not size or size > len(buffer):
                if session is not None:
                    session.carry()
                return "a frame is too long" if size else ""
            frame = buffer[:size]
            if session is not None and posts.is_post(frame):
                session.post(frame)
                left -= 1
            else:
                self._obey(client, frame)
                session = client.session
                left -= REQUEST
        if session is not None:
            session.carry()
        return None

    def _take_posts(self, client: Client) -> str | None:
        """Messages of its pipe."""
        session = client.session
        if session is not None:
            session.look(BURST)
            session.carry()
        return None

    def _first(self, client: Client) -> int:
        """Bytes of a frame, those without room in the buffer too. A ring comes with the first frame alone.

        Of later ones the kernel drops descriptors.
        """
        room = socket.CMSG_SPACE(_INT)
        size, ancillary, _, _ = client.socket.recvmsg_into([self._buffer], room, _READ_FIRST)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                for fd in array("i", data[: len(data) - len(data) % _INT]):
                    if client.ring is None:
                        client.ring = fd
                    else:
                        os.close(fd)
        return size

    def _obey(self, client: Client, frame: memoryview) -> None:
        """Carry out one request."""
        _, number, text, tail = frames.unpack(frame)
        request = frames.REQUEST.validate_json(bytes(text))
        try:
            found = self._do(client, request, tail)
        except McastError as error:
            self._answer(client, number, "refused", Answer(refusal_of(error)), frames.REFUSED)
        else:
            if isinstance(found, Later):
                with self.fabric.clock:
                    found.begin(partial(self._answer_later, client, number, request.op))
            elif found is not None:
                self._answer(client, number, request.op, found)

    def _do(self, client: Client, request: frames.AnyRequest, tail: memoryview) -> Answer | Later | None:
        if isinstance(request, frames.AttachTo):
            return self._attach(client, request)
        if client.session is None:
            raise ValueError("the first request is not an attach")
        client.session.carry()
        if isinstance(request, frames.AskFor) and request.op == "guests":
            return Answer(self.guests())
        if isinstance(request, frames.Command):
            return Answer(self.control.obey(request.words))
        return client.session.handle(request, tail)

    def _answer_later(self, client: Client, number: int, op: str, value: object) -> None:
        """By whatever thread has the answer, in the fabric's lock."""
        try:
            self._answer(client, number, op, Answer(value))
        except OSError:  # the loop sees that it has gone
            logger.debug("process %s does not read its answer", client.pid)

    def _answer(self, client: Client, number: int, op: str, answer: Answer, kind: int = frames.OK) -> None:
        text = frames.answer(op).dump_json(answer.value)
        frame = frames.pack(text, answer.tail, kind, number)
        descriptors = [] if answer.descriptor is None else [answer.descriptor]
        if descriptors or len(frame) > frames.MOST_FRAME:
            client.pass_descriptor()
        with ExitStack() as kept:
            if len(frame) > frames.MOST_FRAME:
                try:
                    with needs_descriptors("the server", op, Phase.OPEN):
                        descriptors = [os.memfd_create("mcast-answer")]
                except McastError as error:
                    self._answer(client, number, "refused", Answer(refusal_of(error)), frames.REFUSED)
                    return
                kept.callback(os.close, descriptors[0])
                with open(descriptors[0], "wb", closefd=False) as file:
                    file.write(text)
                frame = frames.pack(b"%d" % len(text), b"", frames.IN_FILE, number)
            # Not by socket.send_fds, which takes flags and does not heed them (Python 3.11).
            sent_along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
            client.socket.sendmsg([frame], sent_along, AT_ONCE)

    def _end(self, client: Client, why: str) -> None:
        self._watch.remove(client.socket.fileno())
        try:
            self._release(client, why)
        finally:
            del self.clients[client.socket]

    def _release(self, client: Client, why: str) -> None:
        session, client.session = client.session, None
        if session is not None:
            with self.fabric.clock:  # in which the clock's thread may be about to answer
                session.close()
                client.socket.close()
            self._say(f"left: {_who(client)}{f': {why}' if why else ''}")
        elif why:
            self._say(f"refused: {_who(client)}: {why}")
        if client.ring is not None:
            os.close(client.ring)
            client.ring = None
        client.socket.close()

    # --- hosts -------------------------------------------------------------------------------

    def _attach(self, client: Client, request: frames.AttachTo) -> Answer:
        if client.session is not None:
            raise ValueError("it has attached before")
        fabric, topology = self.fabric, self.fabric.parts.topology
        try:
            if request.version != frames.VERSION:
                raise LookupError(f"the server speaks version {frames.VERSION}, not {request.version}")
            hosts = self._hosts(request, topology)
        except LookupError as error:
            raise mcast_error(E.ENODEV, "attach", Phase.OPEN, None, str(error.args[0])) from None
        client.sees_all = request.host == "all" and request.bind is None
        ring, client.ring = client.ring, None
        posted = partial(self._read, client, self._take_posts)
        client.session = ClientSession(fabric, self.name, hosts, self._pump, ring, posted)
        places = ", ".join(f"{port.name} {port.addresses[0]}" for port in topology.ports_of(hosts)[:4])
        who = _who(client)
        self._say(f"attached: {who} as host {_named(hosts, topology)}: {places}")
        backend = client.session.backend
        return Answer(
            frames.AttachedTo(
                self.name,
                fabric.link_layer,
                tuple(sorted(backend.capabilities, key=lambda one: one.name)),
                time.monotonic_ns() - fabric.clock.now,
                _named(hosts, topology),
                len(fabric.ports),
            ),
            descriptor=self._pump.page.fd,
        )

    def _hosts(self, request: frames.AttachTo, topology: Topology) -> frozenset[int]:
        """The hosts that a client is to be. Raises LookupError."""
        if request.bind is not None:
            return frozenset({self.fabric.port_of(request.bind).host})
        if request.host == "all":
            return topology.hosts
        if request.host == "free":
            taken = {host for hosts in self._taken() for host in hosts}
            untaken = (host for host in sorted(topology.hosts) if host not in taken)
            free = next((host for host in untaken if not self._door.keeps(host)), None)
            if free is None:
                raise LookupError(
                    f"all {len(topology.hosts)} hosts of the fabric are taken: end one of the programs, "
                    "or serve a fabric with more --ports"
                )
            return frozenset({free})
        if request.host not in topology.hosts:
            raise LookupError(f"host is {request.host}: the fabric has hosts 0..{len(topology.hosts) - 1}")
        return frozenset({int(request.host)})

    def _taken(self) -> list[frozenset[int]]:
        """The hosts of the clients; a client that sees all hosts takes none."""
        sessions = (client.session for client in self.clients.values() if not client.sees_all)
        return [session.hosts for session in sessions if session is not None]

    def guests(self) -> tuple[Guest, ...]:
        """Who is attached; from any thread."""
        topology = self.fabric.parts.topology
        attached = [(client, client.session) for client in list(self.clients.values())]
        return tuple(
            Guest(
                client.pid,
                client.program,
                _named(session.hosts, topology),
                tuple(port.name for port in topology.ports_of(session.hosts)),
            )
            for client, session in attached
            if session is not None
        )


def _who(client: Client) -> str:
    return Guest(client.pid, client.program, "", ()).name


def _named(hosts: frozenset[int], topology: Topology) -> str:
    return "all" if hosts == topology.hosts and len(hosts) > 1 else ", ".join(map(str, sorted(hosts)))


def _program(pid: int) -> str:
    """What the process is called, as far as that may be known."""
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
