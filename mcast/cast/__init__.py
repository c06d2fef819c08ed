"""Objects from one sender to many receivers over unreliable multicast: all of it arrives, or is missed.

`send`, `receive` and `open_session` are for programs; `mcast send`, `mcast recv` and `mcast demo` use these
calls. An object is a buffer, a file or a pipe, from 0 bytes on.

- `nack/` is the protocol, without I/O and clock; its text has the messages one by one.
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
    from mcast.cast.nack.sender import ReceiverReport as ReceiverReport
    from mcast.cast.nack.strategy import Strategy as Strategy
    from mcast.cast.nack.strategy import all_receivers as all_receivers
    from mcast.cast.nack.strategy import best_effort as best_effort
    from mcast.cast.nack.strategy import carousel as carousel
    from mcast.cast.nack.strategy import deadline as deadline
    from mcast.cast.nack.strategy import quorum as quorum
    from mcast.cast.objects.bytes_in import Offered as Offered
    from mcast.cast.objects.bytes_in import ReceiveTarget as ReceiveTarget
    from mcast.cast.objects.bytes_out import Sendable as Sendable
    from mcast.cast.objects.calls import AsyncObjectSession as AsyncObjectSession
    from mcast.cast.objects.calls import ObjectSession as ObjectSession
    from mcast.cast.objects.calls import open_session as open_session
    from mcast.cast.objects.calls import receive as receive
    from mcast.cast.objects.calls import send as send
    from mcast.cast.objects.chunks import Chunks as Chunks
    from mcast.cast.objects.receiving import Missed as Missed
    from mcast.cast.objects.receiving import Received as Received
    from mcast.cast.objects.sending import Object as Object
    from mcast.cast.objects.sending import ObjectReport as ObjectReport
    from mcast.cast.objects.sending import Progress as Progress

_NAMES = {
    "cast.nack.sender": "ReceiverReport",
    "cast.nack.strategy": "Strategy all_receivers best_effort carousel deadline quorum",
    "cast.objects.bytes_in": "Offered ReceiveTarget",
    "cast.objects.bytes_out": "Sendable",
    "cast.objects.calls": "AsyncObjectSession ObjectSession open_session receive send",
    "cast.objects.chunks": "Chunks",
    "cast.objects.receiving": "Missed Received",
    "cast.objects.sending": "Object ObjectReport Progress",
}
if not TYPE_CHECKING:  # a type checker that saw this function would accept any name
    __getattr__, __dir__ = lazy(__name__, _NAMES)
