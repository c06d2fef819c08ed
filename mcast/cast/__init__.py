"""Reliable transfer of objects from one sender to many receivers over unreliable multicast.

Programs call `send`, `receive` and `open_session`; `mcast send`, `mcast recv` and `mcast demo` use the same
calls. An object is a buffer, a file or a pipe of 0 bytes or more. A receiver gets it complete and verified,
or reports it as missed. `ObjectSession.publish` and `receive(latest=True)` are for versions of one object, of
which only the newest matters.

- `protocol/` is the protocol: state machines without I/O and without a clock. Its docstring describes the
  messages.
- `io/` connects the protocol to memberships of endpoints and to data:
  - `session` and `reception` have the public calls, `driver` runs their steps by blocking or by awaiting,
    `sending` and `receiving` are the two ends, `placing` parses received messages, and `one_thread` runs a
    sender and its receivers in one thread;
  - `sources` and `sinks` adapt buffers, tensors, iterables and file objects, `chunks` is a sink that a
    program iterates over, `files` opens files and pipes, and `partfile` is the file of an incomplete
    transfer;
  - `bundle` makes objects of files and folders, and maps names to paths at the receiver.

Each block is verified against its BLAKE3 digest before it is used, and so is the complete object. Without a
key any member of the group can offer objects, and ends that share an address can impersonate each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcast.facade import lazy

if TYPE_CHECKING:
    from mcast.cast.io.chunks import Chunks as Chunks
    from mcast.cast.io.receiving import Missed as Missed
    from mcast.cast.io.receiving import Received as Received
    from mcast.cast.io.reception import receive as receive
    from mcast.cast.io.sending import Object as Object
    from mcast.cast.io.sending import ObjectReport as ObjectReport
    from mcast.cast.io.sending import Progress as Progress
    from mcast.cast.io.sending import ReceiverVersion as ReceiverVersion
    from mcast.cast.io.session import AsyncObjectSession as AsyncObjectSession
    from mcast.cast.io.session import ObjectSession as ObjectSession
    from mcast.cast.io.session import open_session as open_session
    from mcast.cast.io.session import send as send
    from mcast.cast.io.sinks import Offered as Offered
    from mcast.cast.io.sinks import ReceiveTarget as ReceiveTarget
    from mcast.cast.io.sources import Sendable as Sendable
    from mcast.cast.protocol.sender import ReceiverReport as ReceiverReport
    from mcast.cast.protocol.strategy import Strategy as Strategy
    from mcast.cast.protocol.strategy import all_receivers as all_receivers
    from mcast.cast.protocol.strategy import best_effort as best_effort
    from mcast.cast.protocol.strategy import carousel as carousel
    from mcast.cast.protocol.strategy import deadline as deadline
    from mcast.cast.protocol.strategy import quorum as quorum

_NAMES = {
    "cast.protocol.sender": "ReceiverReport",
    "cast.protocol.strategy": "Strategy all_receivers best_effort carousel deadline quorum",
    "cast.io.sinks": "Offered ReceiveTarget",
    "cast.io.sources": "Sendable",
    "cast.io.session": "AsyncObjectSession ObjectSession open_session send",
    "cast.io.reception": "receive",
    "cast.io.chunks": "Chunks",
    "cast.io.receiving": "Missed Received",
    "cast.io.sending": "Object ObjectReport Progress ReceiverVersion",
}
if not TYPE_CHECKING:  # a type checker that saw this function would accept any name
    __getattr__, __dir__ = lazy(__name__, _NAMES)
