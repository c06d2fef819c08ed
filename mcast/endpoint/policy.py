"""What an endpoint does by itself, as chosen by its user, and the events by which it tells."""

from __future__ import annotations

from enum import Enum
from random import Random
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mcast.api import McastError
from mcast.wire.addresses import McastAddress


class LoopbackPolicy(Enum):
    """What becomes of one's own messages, which a full member hears (K-DATA-2).

    on      they are delivered; `Message.from_self` tells them
    off     the device is asked not to return them; a filter takes what it returns all the same
    filter  the filter alone: by source GID and QP number
    """

    ON = "on"
    OFF = "off"
    FILTER = "filter"


class RejoinPolicy(BaseModel):
    """When to try again after a membership was lost; seconds.

    The n-th attempt (from 1) comes `first * factor**(n-1)` after the one before, at most `maximum`, spread by
    up to `jitter` (0.2: 20 %) either way. `give_up_after` counts from the loss; None: never.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: float = Field(default=0.05, gt=0)
    factor: float = Field(default=2.0, ge=1)
    maximum: float = Field(default=5.0, gt=0)
    jitter: float = Field(default=0.2, ge=0, le=1)
    give_up_after: float | None = Field(default=None, ge=0)

    def delay(self, attempt: int, random: Random) -> float:
        """How long to wait before that attempt, counted from 1."""
        try:
            exact = min(self.first * self.factor ** (attempt - 1), self.maximum)
        except OverflowError:  # a fabric may be away for days
            exact = self.maximum
        return exact * random.uniform(1 - self.jitter, 1 + self.jitter)


class Lost(NamedTuple):
    """The membership of `group` was lost, because of `error`; the policy decides what follows."""

    group: McastAddress
    error: McastError

    def __str__(self) -> str:
        return f"{self.group}: the membership was lost: {_first_line(self.error)}"


class Rejoined(NamedTuple):
    """The membership is back: what was sent in the `gap` seconds since the loss did not arrive here."""

    group: McastAddress
    gap: float
    attempts: int

    def __str__(self) -> str:
        return f"{self.group}: joined again after {self.gap:.3g} s, attempts: {self.attempts}"


class GaveUp(NamedTuple):
    """`attempts` attempts failed, the last with `error`; recv and send raise from now on."""

    group: McastAddress
    error: McastError
    attempts: int

    def __str__(self) -> str:
        return f"{self.group}: given up after {self.attempts} attempts: {_first_line(self.error)}"


class ReceiveQueueLow(NamedTuple):
    """Only `free` of `depth` receives were left at some moment; with none, messages are lost in silence."""

    free: int
    depth: int

    def __str__(self) -> str:
        return f"the receive queue was down to {self.free} of {self.depth}: receive faster, or more deeply"


class PortDown(NamedTuple):
    """The link of `port` ("device/port") is down: nothing is sent or received until `PortUp`.

    On InfiniBand the memberships are lost with it, each with a `Lost` of its own, and joined again as the
    policy says; on RoCE they stay, and messages flow again once the link is up.
    """

    port: str

    def __str__(self) -> str:
        return f"{self.port}: the link is down: nothing is sent or received until it is up"


class PortUp(NamedTuple):
    """The link of `port` ("device/port") is up again."""

    port: str

    def __str__(self) -> str:
        return f"{self.port}: the link is up"


class AddressChanged(NamedTuple):
    """The GID table of `port` ("device/port") is another one.

    own   the GID that the endpoint sends from is concerned, or its address has gone: the memberships are lost
          and joined again from the address, as the policy says, once it is there
    """

    port: str
    own: bool

    def __str__(self) -> str:
        whose = "is" if self.own else "is not"
        return f"{self.port}: the port's GIDs have changed; that of the endpoint {whose} concerned"


def _first_line(error: McastError) -> str:
    return str(error).partition("\n")[0]


Event = Lost | Rejoined | GaveUp | ReceiveQueueLow | PortDown | PortUp | AddressChanged


class LoopbackReport(NamedTuple):
    """What is in force.

    hardware  the device has accepted to keep own messages back; `Membership.probe_loopback` says if it does
    filtered  the filter is on
    """

    policy: LoopbackPolicy
    hardware: bool
    filtered: bool
