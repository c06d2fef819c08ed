"""Objects from one sender to many receivers over unreliable multicast: all of it arrives, or is missed.

`send`, `receive` and `open_session` are for programs; `mcast send`, `mcast recv` and `mcast demo` use these
calls. An object is a buffer, a file or a pipe, from 0 bytes on.

- `protocol/` is the protocol, without I/O and clock; its text has the messages one by one.
- `objects/` drives both ends on memberships of endpoints, by blocking and by awaiting; `objects/together.py`
  has all ends in one thread.
- `files` reads and writes files and pipes, so that nothing half-written is left. `bundle` makes objects of
  folders, and says where a receiver may put them.

Every block is compared with its digest before its use, and so is the whole. Without a key any member of the
group can offer objects, and ends that share an address can lie about each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcast.facade import lazy

if TYPE_CHECKING:
    from mcast.cast.io.chunks import Chunks as Chunks
    from mcast.cast.io.receiving import Missed as Missed
    from mcast.cast.io.receiving import Received as Received
    from mcast.cast.io.sending import Object as Object
    from mcast.cast.io.sending import ObjectReport as ObjectReport
    from mcast.cast.io.sending import Progress as Progress
    from mcast.cast.io.session import AsyncObjectSession as AsyncObjectSession
    from mcast.cast.io.session import ObjectSession as ObjectSession
    from mcast.cast.io.session import open_session as open_session
    from mcast.cast.io.session import receive as receive
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
    "cast.io.session": "AsyncObjectSession ObjectSession open_session receive send",
    "cast.io.chunks": "Chunks",
    "cast.io.receiving": "Missed Received",
    "cast.io.sending": "Object ObjectReport Progress",
}
if not TYPE_CHECKING:  # a type checker that saw this function would accept any name
    __getattr__, __dir__ = lazy(__name__, _NAMES)
