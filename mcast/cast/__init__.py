"""A file from one sender to many receivers over unreliable multicast: losses are repaired, or reported.

`send`, `receive` and `open_session` are for programs: they take buffers and files, and use the protocol of
objects in `mcast/cast/nack/`. The rest of this text is about the protocol of files, which the commands use.

Every end is a full member of one group. What is for all goes to the group; what a receiver answers goes to
the sender alone, as a WELCOME to its receiver, so that the cost grows with the number of receivers, not with
its square.
A unicast message does not reach another port of the same host everywhere (K-FABRIC-6): a receiver whose JOIN
gets no WELCOME says JOIN to the group from the fourth HELLO on, and its answers, too. A message is a header
(magic `mcF1`, kind, session) and a body, all in network order; `packets` has the table.

```
sender                                             receiver
HELLO  name, size if known       every 0.1 s  ->
                                              <-   JOIN    id, room, largest message, name
WELCOME id                       joined        ->
DATA   number, piece             a window     ->
ASK    pieces, serial            twice a window ->
                                              <-   REPORT  id, serial, next, room, bitmap
DATA   what a report misses                   ->
END    pieces, bytes, SHA-256    all reported ->
                                              <-   DONE    id, verified | differs | failed, words
CLOSE  to all or to one receiver, and why     ->
```

- A transfer is a session, whose number the sender chooses. The transfer begins when as many receivers as are
  wanted have joined. A receiver that joins later gets a CLOSE, and waits for the next session. Only a
  receiver that got a WELCOME takes pieces.
- Pieces are numbered from 0. A piece is as long as the bytes that are there, so that the bytes of a pipe do
  not wait for more.
- At most a window of pieces is under way: as many as every receiver has room for, and as many copies in all
  as a host queues. A loss halves the window, reports without a loss open it again.
- ASK has a serial number, which REPORT repeats. A piece counts as lost only if the report answers an ASK that
  was sent after the piece. A lost piece is sent again, a limited number of times for each receiver and piece.
- `next` says that all pieces before it have arrived, bit i of the bitmap that piece next+i has, `room` for
  how many pieces from next on there is memory. So a receiver whose reader is slow slows the sender down; it
  is given up if it takes less than the smallest window in a minute.
- An ASK without an answer is repeated. A receiver that stays silent, or that has missed one piece too often,
  is given up by name, and the others go on. If the sender falls silent, the receiver ends with an error.
- A file ends where it ended when it was opened; if it becomes shorter, the transfer fails. A receiver stores
  as many bytes as HELLO has announced, no more and no fewer.
- A file that has arrived whole, by its digest, is stored, even if its sender is gone.
- The receiver says `verified` when the digest is right and the file is in its place.
- A receiver sends each answer once in a turn, however often it is asked, so that a flood of questions makes
  no flood of answers.
- A receiver takes part in one transfer. It tells the senders of other transfers, which would wait for it
  otherwise.
- A receiver gives up a sender that announces pieces and does not send them for a minute, or that sends
  nothing new for an hour, even if the sender is not silent.
- A message that is not of the protocol, malformed, or out of place changes nothing, and is counted by reason.
- The number of an end is bound to the address that it sends from, so no end can speak for one at another
  address. A member that lies costs only itself: the others neither wait for it without end nor take its
  pieces for those of their sender. Ends that share an address can lie about each other. There is no
  authentication: a receiver takes the file that is offered first.

`sender.FileSender` and `receiver.FileReceiver` are the two ends, without I/O: received messages and the time
go in, messages to send come out. Times are seconds of any one clock. `drive` runs the ends on endpoints,
`files` reads and writes files, and `together` runs all ends in one thread.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcast.cast.nack.sender import Account as Account
    from mcast.cast.nack.strategy import Strategy as Strategy
    from mcast.cast.nack.strategy import all_of_them as all_of_them
    from mcast.cast.nack.strategy import best_effort as best_effort
    from mcast.cast.nack.strategy import deadline as deadline
    from mcast.cast.nack.strategy import quorum as quorum
    from mcast.cast.objects.bytes_in import Offered as Offered
    from mcast.cast.objects.calls import AsyncObjectSession as AsyncObjectSession
    from mcast.cast.objects.calls import ObjectSession as ObjectSession
    from mcast.cast.objects.calls import open_session as open_session
    from mcast.cast.objects.calls import receive as receive
    from mcast.cast.objects.calls import send as send
    from mcast.cast.objects.receiving import Missed as Missed
    from mcast.cast.objects.receiving import Received as Received
    from mcast.cast.objects.sending import ObjectReport as ObjectReport

_NAMES = {
    "nack.sender": "Account",
    "nack.strategy": "Strategy all_of_them best_effort deadline quorum",
    "objects.bytes_in": "Offered",
    "objects.calls": "AsyncObjectSession ObjectSession open_session receive send",
    "objects.receiving": "Missed Received",
    "objects.sending": "ObjectReport",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
"""Public name -> its module, which is imported when the name is first used."""

if not TYPE_CHECKING:  # a type checker that saw this function would accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted(_HOME)
