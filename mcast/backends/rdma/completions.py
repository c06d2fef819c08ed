"""The completion queues of a queue pair: completion vector, moderation, time stamps, and how long to poll."""

from __future__ import annotations

import errno as E
from collections import defaultdict
from collections.abc import Iterator
from itertools import count

from mcast.api import McastError, QpInit, Refused, TimestampClock, require_comp_vector
from mcast.backends.rdma.native import QpPlan, RefusedFeature

CLOCKS = (None, TimestampClock.REALTIME, TimestampClock.DEVICE)
"""STAMPS_NONE and so on of cdefs.h -> the contract's name of the clock."""

_FOREVER = (1 << 63) - 1
_LONGEST = 1e9
"""Seconds; longer is without end."""

_next_vector: defaultdict[str, Iterator[int]] = defaultdict(count)
"""Device -> the queue pairs of this process that took the next vector."""


def with_completion_queues(plan: QpPlan, init: QpInit, device: str, vectors: int) -> QpPlan:
    """Return the plan with the completion queues that `init` asks for.

    `vectors` is the number of completion vectors of the device.
    """
    try:
        require_comp_vector(init.comp_vector, vectors, device)
    except McastError as error:
        raise Refused(error) from None
    vector = next(_next_vector[device]) % vectors if init.comp_vector is None else init.comp_vector
    endless = init.busy_poll > _LONGEST
    return plan._replace(
        comp_vector=vector,
        moderation_count=init.moderation.count if init.moderation else 0,
        moderation_period=init.moderation.period if init.moderation else 0,
        timestamps=init.timestamps,
        busy_poll=_FOREVER if endless else int(init.busy_poll * 1e9),
    )


def refusal(device: str, refused: RefusedFeature, error: int) -> str:
    """Return why the device refused the queue pair, and what to do.

    "" if the refusal has nothing to do with completions.
    """
    if refused is RefusedFeature.TIMESTAMPS:
        return f"{device} cannot stamp completions with the time: do without timestamps"
    if refused is not RefusedFeature.MODERATION:
        return ""
    if error == E.EINVAL:
        return f"{device} cannot moderate completions that much: choose a smaller count or period"
    return f"{device} cannot moderate completions: do without moderation"
