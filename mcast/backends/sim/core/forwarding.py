"""The multicast forwarding tables of InfiniBand switches: MLID -> ports, as the SM writes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mcast.backends.model.port import Port
from mcast.backends.model.times import Scheduler
from mcast.backends.sim.core.receivers import Receivers
from mcast.backends.sim.core.sa import SubnetAdmin
from mcast.backends.sim.core.topology import Topology
from mcast.wire.addresses import Gid

Tables = dict[int, Sequence[int]]
"""MLID -> GUIDs of the ports that the switches connect."""


class Forwarding:
    """The entries of switches: as the SA says, unless a switch lags behind or cannot be reached by the SM."""

    def __init__(self, sa: SubnetAdmin, topology: Topology, receivers: Receivers, clock: Scheduler) -> None:
        self._sa, self._topology, self._receivers, self._clock = sa, topology, receivers, clock
        self._delay = 0
        self._late: Tables | None = None  # of all switches, while they lag behind
        self._frozen: dict[int, Tables] = {}  # of each switch that the SM does not reach

    def changed(self) -> None:
        """The SA has changed groups. The switches learn of the change, at once unless they are slow."""
        changed = self._sa.drain_changes()
        if self._late is None:
            for mlid in changed:
                self._receivers.known.pop(mlid, None)
            self._receivers.version += 1
        else:
            for mlid in changed:
                self._clock.call_later(self._delay, partial(self._program, mlid))

    def set_delay(self, delay: int) -> None:
        """From now on a change reaches the switches `delay` ns late."""
        self._delay = delay
        self._late = (self._late or self._tables()) if delay else None
        self._receivers.forget_all()

    def freeze(self, switch: int) -> None:
        """Keep the entries of a switch that the SM no longer reaches."""
        self._frozen[switch] = dict(self._late) if self._late is not None else self._tables()

    def unfreeze(self, switch: int) -> None:
        """Let the SM write the entries of the switch again, because it reaches it."""
        self._frozen.pop(switch, None)

    def members(self, source: Port, group: Gid, mlid: int) -> Sequence[Port]:
        """The ports that a message of the source to the MLID reaches, the source itself first.

        An InfiniBand device copies to its own queue pairs without the switch, member or not. A switch without
        an entry drops.
        """
        at = self._topology.ports[source.index].switch
        tables = self._frozen.get(at, self._late)
        guids = self._sa.forwarding(mlid) if tables is None else tables.get(mlid, ())
        joined = [self._topology.port_with(guid) for guid in guids]
        far = joined if any(port.switch == at for port in joined) else []
        reaches = self._topology.reaches
        return [source, *(port for port in far if port is not source and reaches(source, port))]

    def _tables(self) -> Tables:
        return {group.mlid: self._sa.forwarding(group.mlid) for group in self._sa.groups}

    def _program(self, mlid: int) -> None:
        if self._late is not None:
            self._late[mlid] = self._sa.forwarding(mlid)
            self._receivers.forget(mlid)
