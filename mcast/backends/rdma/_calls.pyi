from collections.abc import Iterator
from typing import Any, Self

from typing_extensions import Buffer

from mcast.api import Batch, Destination, DeviceBytes, Gid, Message

class Calls:
    """Base of the QP: `send`, `send_one`, `recv`, `recv_one`, and what they must be told."""

    def send(
        self,
        destination: Destination,
        batch: Any,
        imm: int | None = None,
        timeout: float | None = None,
    ) -> int: ...
    def send_one(
        self,
        destination: Destination,
        payload: Buffer | DeviceBytes,
        imm: int | None = None,
        timeout: float | None = None,
    ) -> None: ...
    def recv(self, max: int = 64, timeout: float | None = None, events: bool = False) -> Batch: ...
    def recv_one(self, timeout: float | None = None) -> Message | None: ...
    def _recv(self, max: int, timeout: float | None, events: bool, /) -> Batch: ...
    def _post(
        self,
        serial: int,
        qp_num: int,
        qkey: int,
        payloads: list[Any],
        imm: int | None,
        timeout: float | None,
        /,
    ) -> bool:
        """Send to an address handle; False: it is retired, and nothing is sent."""

    def _post_header_body(
        self,
        serial: int,
        qp_num: int,
        qkey: int,
        heads: memoryview,
        bodies: memoryview,
        imm: int | None,
        timeout: float | None,
        /,
    ) -> bool:
        """Post messages of two parts: the rows of both views."""

    def _flush(self, timeout: float | None, /) -> None: ...
    @property
    def has_port_events(self) -> bool: ...
    def _has_port_events(self) -> bool:
        """Return True if `port_events` would return events, or raise."""

    def _arm(self, event_fd: int, memories: dict[int, Any], sources: set[Gid], /) -> int:
        """The address of the place in which the queue pair is to be made."""

    def _aim(self, destination: Destination, serial: int, qp_num: int, qkey: int, mtu: int, /) -> None: ...
    def _arrive(self, on_device: bool, /) -> None: ...
    def _limit(self, bytes: int, seconds: float, /) -> None: ...

class Lease:
    """Base of the batch: messages leased from the memory they arrived in."""

    _released: bool
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Message]: ...
    @property
    def lengths(self) -> list[int]: ...
    @property
    def memory(self) -> memoryview: ...
    @property
    def records(self) -> bytes: ...
    def release(self) -> None: ...
    def _message(self, index: int, /) -> Message: ...
    def _release(self) -> None: ...
    def _stretches(self) -> list[tuple[int, int, int, int, int, bool]]: ...
    def _keep(self, view: memoryview, /) -> memoryview: ...
    def _end(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, /, *_: object) -> None: ...

def set_up(
    queue_pair: Any,
    batch: Any,
    own: type[Batch],
    message: type[Message],
    gid: type[Gid],
    set_wakeup_fd: Any,
    main_thread: int | None,
    /,
) -> None:
    """The contract's classes, whose methods are called when something is in the way; what signals need."""

def wait_event(channel: int, timeout: float | None, /) -> bool | None:
    """Return True if an event waits in the channel, None if the channel is closed."""
