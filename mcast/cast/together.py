"""A sender and its receivers on the ports of one host, in one thread; they hear nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice

from mcast.api import Backend, McastAddress
from mcast.cast.drive import ReceivingParty, SendingParty, telling
from mcast.cast.files import Nowhere, Source
from mcast.cast.sender import COPIES, MOST_OF_ONE, Patience, widest
from mcast.contract.registry import SIMULATED
from mcast.endpoint.blocking import Endpoint, open_endpoint
from mcast.endpoint.ports import Place, active

_NAP = 0.01
"""How long all wait for one of them, at the most, in seconds."""

Ends = tuple[SendingParty, list[ReceivingParty]]


@contextmanager
def ends(
    backend: Backend, group: McastAddress, receivers: int, source: Source, wait: float, silence: float
) -> Iterator[Ends]:
    """A sender on the first active port and receivers on the others in turn, all members of the group.

    wait     how long they may take to hear of each other, in seconds
    silence  how long an end may be silent, in seconds

    Raises ValueError if there are too few ports.
    """
    ports = active(backend, group)
    seats = ports[1:] or ports
    if receivers > (most := MOST_OF_ONE * len(seats)):
        raise ValueError(f"{receivers} receivers are too many for the ports here: at most {most}")
    # A simulated copy waits in no queue of this host.
    copies = COPIES * (receivers + 1) if backend.name in SIMULATED else COPIES
    window = widest(receivers, copies)
    # Doubles, own messages and the others' answers must not take the place of pieces.
    depth = 2 * window + 4 * receivers
    with ExitStack() as stack:

        def opened(place: Place) -> Endpoint:
            return stack.enter_context(open_endpoint(backend, place.address, receive_depth=depth))

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
    """Carry the transfer through by turns; `watch` is called after each. Its end is the sender's to tell."""
    parties: list[SendingParty | ReceivingParty] = [sender, *receivers]
    with ExitStack() as stack:
        for party in parties:
            stack.enter_context(telling(party))
        # A receiver that is not welcome would wait for another transfer.
        while not sender.core.over or any(one.core.welcome and not one.core.over for one in receivers):
            busy = [party for party in parties if not party.core.over]
            acted = [party.turn(0.0) for party in busy]
            if not any(acted):
                busy[0].hear(min(party.idle(_NAP) for party in busy))
            watch()
