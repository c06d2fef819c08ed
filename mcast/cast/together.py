"""A sender and its receivers on the ports of one host, in one thread.

They ignore the messages of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle, islice

from mcast.api import Backend, McastAddress
from mcast.cast.drive import ReceivingParty, SendingParty, telling
from mcast.cast.files import Nowhere, Source
from mcast.cast.sender import COPIES, MOST_OF_ONE, Patience, widest
from mcast.contract.registry import SIMULATED
from mcast.endpoint.blocking import Endpoint, open_endpoint
from mcast.endpoint.ports import Place, active
from mcast.endpoint.settings import DEFAULTS, Settings

_NAP = 0.01
"""The longest that all ends wait for one of them, in seconds."""

Ends = tuple[SendingParty, list[ReceivingParty]]


@contextmanager
def ends(
    backend: Backend,
    group: McastAddress,
    receivers: int,
    source: Source,
    wait: float,
    silence: float,
    settings: Settings = DEFAULTS,
) -> Iterator[Ends]:
    """A sender on the first active port, and receivers on the others in turn, all members of the group.

    group    the address that all ends join
    receivers  how many receivers to make
    source   the file to send
    wait     how many seconds the ends may take to find each other
    silence  how many seconds an end may be silent before it is given up

    Raises ValueError if there are too few ports, or one cannot serve the settings.
    """
    ports = active(backend, group)
    seats = ports[1:] or ports
    if receivers > (most := MOST_OF_ONE * len(seats)):
        raise ValueError(f"{receivers} receivers are too many for the ports here: at most {most}")
    # Copies on a simulated fabric wait in no queue of this host, so there may be more of them.
    copies = COPIES * (receivers + 1) if backend.name in SIMULATED else COPIES
    window = widest(receivers, copies)
    # Twice the window, so that duplicates, own messages and answers of others leave room for the pieces.
    depth = 2 * window + 4 * receivers
    with ExitStack() as stack:

        def opened(place: Place) -> Endpoint:
            deep = replace(settings, receive_depth=depth)
            return stack.enter_context(open_endpoint(backend, place.address, **vars(deep)))

        takers = [
            ReceivingParty(opened(place), group, Nowhere(), silence, window)
            for place in islice(cycle(seats), receivers)
        ]
        patience = Patience(wait=wait, silence=silence, copies=copies)
        sender = SendingParty(opened(ports[0]), group, source, receivers, patience)
        sender.heeds = {taker.peer for taker in takers}
        for taker in takers:
            taker.heeds = {sender.peer}
        yield sender, takers


def run(sender: SendingParty, receivers: Sequence[ReceivingParty], watch: Callable[[], None]) -> None:
    """Carry out the transfer, each end in turn, and call `watch` after each round; `sender.core` has the
    outcome."""
    parties: list[SendingParty | ReceivingParty] = [sender, *receivers]
    with ExitStack() as stack:
        for party in parties:
            stack.enter_context(telling(party))
        # A receiver without a WELCOME would wait for another transfer.
        while not sender.core.over or any(one.core.welcome and not one.core.over for one in receivers):
            busy = [party for party in parties if not party.core.over]
            acted = [party.turn(0.0) for party in busy]
            if not any(acted):
                busy[0].hear(min(party.idle(_NAP) for party in busy))
            watch()
