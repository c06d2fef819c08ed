"""Sender and receiver in one process, on a simulated fabric that loses ticks 2, 3 and 9."""

from __future__ import annotations

import mcast
from feed import FEED, RETRY, Receiver, Sender
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Drop, Messages


def main() -> None:
    fabric = Fabric.roce(ports=2)
    fabric.rules.when(Messages(group=FEED, nth=[2, 3, 9]), Drop())
    with (
        open_fabric(fabric) as backend,
        mcast.open_endpoint(backend, "10.0.0.1") as one,
        mcast.open_endpoint(backend, "10.0.0.2") as other,
    ):
        sender, receiver = Sender(one), Receiver(other)
        for number in range(1, 11):
            sender.send("ACME", 10_000 + number)
        for _ in range(2):
            received = [tick.number for tick in receiver.ticks(timeout=RETRY)]
            missing = [number for gap in receiver.missing for number in gap]
            print(f"received {received}, missing {missing}")
            sender.serve(RETRY)
        print(f"{sender.repaired} ticks sent again for {receiver.requests} request")


if __name__ == "__main__":
    main()
