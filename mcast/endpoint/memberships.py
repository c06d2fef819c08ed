"""The memberships of an endpoint.

Joining, leaving, and the errors of calls on a membership that has ended.
"""

from __future__ import annotations

import errno as E
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

from mcast.api import Closed, McastError, MembershipLost, Phase, Refused, mcast_error
from mcast.arguments.seconds import check_seconds
from mcast.endpoint.membership import SEQUENCE_COUNTS, EndpointGroup, GroupState
from mcast.endpoint.receive_buffer import ReceiveBuffer
from mcast.endpoint.recovery import Rejoiner
from mcast.endpoint.resources import PortResources
from mcast.endpoint.waiting import Operation, Waiting
from mcast.wire.addresses import McastAddress

T = TypeVar("T")


class Memberships:
    """Joins and leaves groups. `random` draws the streams of sequence headers."""

    def __init__(
        self,
        resources: PortResources,
        rejoiner: Rejoiner,
        waiting: Waiting,
        buffer: ReceiveBuffer,
        random: Random,
    ) -> None:
        self._resources, self._rejoiner, self._waiting = resources, rejoiner, waiting
        self._buffer, self._random = buffer, random
        self.left: Counter[str] = Counter()
        """Counters of the groups that were left, added up."""
        self.dropped: Counter[str] = Counter()
        """Why messages of no group, or of groups that were left, were not delivered -> how many."""

    def join(
        self,
        group_name: Any,
        send_only: bool,
        timeout: float | None,
        settle: float,
        enter: Callable[[EndpointGroup], T],
    ) -> Operation[T]:
        """Join, and wait until the group is joined.

        Nothing is left behind if that fails, times out or is interrupted where it waits.

        Return what `enter` makes of the group: once it is joined, the program finds it, even if it is
        interrupted before it has the result.
        """
        settle = check_seconds(settle, "settle")
        address = McastAddress.of(group_name)
        return self._join(address, send_only, timeout, self._waiting.deadline(timeout), settle, enter)

    def _join(
        self,
        address: McastAddress,
        send_only: bool,
        timeout: float | None,
        deadline: float | None,
        settle: float,
        enter: Callable[[EndpointGroup], T],
    ) -> Operation[T]:
        self._resources.require_open("join", Phase.JOIN)
        if self._rejoiner.reopen:
            where = self._resources.local_port.address
            ended = "not looked for any more: open another endpoint when it is back"
            looked_for = ended if self._rejoiner.has_ended else "looked for as the rejoin policy says"
            detail = f"the device of {where} is away, and {looked_for}"
            raise Refused(mcast_error(E.ENODEV, "join", Phase.JOIN, {"group": address}, detail))
        if self._rejoiner.busy or self._resources.group_index.ended:
            self._resources.group_index.require_unknown(address)
        stream = self._random.getrandbits(64)
        settings = self._resources.settings
        group = EndpointGroup(address, send_only, settings.receive_depth, stream, bool(settings.sequence))
        self._resources.enter(group)
        try:
            yield from self._waiting.until(lambda: group.state is not GroupState.JOINING, deadline)
            if group.state is GroupState.JOINING:
                detail = f"no outcome within {timeout} s"
                raise Refused(mcast_error(E.ETIMEDOUT, "join", Phase.JOIN, {"group": address}, detail))
            self.require_joined(group, "join", Phase.JOIN)
            yield from self._waiting.until(lambda: False, self._waiting.now() + settle)
        except GeneratorExit:
            raise
        except BaseException:
            self.leave(group)
            raise
        return enter(group)

    def leave(self, group: EndpointGroup) -> None:
        """End the membership, whatever its state. Idempotent."""
        if group.state is GroupState.LEFT:
            return
        if self._resources.leave(group):
            self.left.update(group.counts.as_dict())
            self.left.update({field: group.sources.total(field) for field in SEQUENCE_COUNTS})
            self.dropped.update(group.dropped)
        self._buffer.forget(group)

    def drop(self, group: EndpointGroup | None, reason: str, messages: int = 1) -> None:
        """Count messages that were not delivered; `group` is None for those of no group."""
        (self.dropped if group is None else group.dropped)[reason] += messages

    def require_joined(self, group: EndpointGroup, call: str, phase: Phase) -> None:
        """Refuse a call, with the error that ended the membership, if it has ended."""
        self._resources.require_open(call, phase)
        if group.state is GroupState.LEFT:
            raise Refused(Closed("membership", call, phase))
        if group.state is GroupState.FAILED:
            group.reported = True
            error = group.error
            assert error is not None
            raise Refused(_loss(error, group, call, phase) if group.counts.joins else error)

    def require_receiving(self, group: EndpointGroup | None) -> None:
        """Refuse a receive with the error that ended the group's membership.

        For None, with the error of each lost membership once.
        """
        self._resources.require_open("recv", Phase.RECV)
        if group is not None:
            self.require_joined(group, "recv", Phase.RECV)
            return
        groups = self._resources.group_index.groups
        gone = [one for one in groups.values() if one.state is GroupState.FAILED]
        untold = next((one for one in gone if not one.reported), None)
        if untold is not None or (gone and len(gone) == len(groups)):
            self.require_joined(untold or gone[0], "recv", Phase.RECV)


def _loss(error: McastError, group: EndpointGroup, call: str, phase: Phase) -> McastError:
    """The error of calls on a membership that is lost for good."""
    detail = f"the membership of {group.address} was lost, and is not restored: {error}"
    lost = MembershipLost(E.ENETRESET, call, phase, {"group": group.address}, detail)
    lost.__cause__ = error
    return lost
