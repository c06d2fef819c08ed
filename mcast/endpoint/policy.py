"""Policies, which the user chooses, and events, which report what an endpoint did by itself."""

from __future__ import annotations

from enum import Enum
from random import Random
from typing import ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mcast.api import McastError
from mcast.wire.addresses import Gid, McastAddress


class LoopbackPolicy(Enum):
    """Handling of the endpoint's own messages, which a full member receives (K-DATA-2).

    on      own messages are delivered; `Message.from_self` marks them
    off     the device is asked not to return own messages; a filter removes those that it returns all the
            same
    filter  the filter alone removes own messages, by source GID and queue pair number
    """

    ON = "on"
    OFF = "off"
    FILTER = "filter"


class RejoinPolicy(BaseModel):
    """Schedule of the joins after a membership was lost. Times are in seconds.

    The n-th attempt (from 1) comes `first * factor**(n-1)` after the one before, at most `maximum` after it.
    Each delay is varied at random by up to `jitter` either way (0.2: 20 %). `give_up_after` counts from the
    loss; None: never give up.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, strict=True, extra="forbid")

    first: float = Field(default=0.05, gt=0)
    factor: float = Field(default=2.0, ge=1)
    maximum: float = Field(default=5.0, gt=0)
    jitter: float = Field(default=0.2, ge=0, le=1)
    give_up_after: float | None = Field(default=None, ge=0)

    def delay(self, attempt: int, random: Random) -> float:
        """The seconds to wait before that attempt, counted from 1."""
        try:
            exact = min(self.first * self.factor ** (attempt - 1), self.maximum)
        except OverflowError:  # a fabric may be away for days
            exact = self.maximum
        return exact * random.uniform(1 - self.jitter, 1 + self.jitter)


class Lost(NamedTuple):
    """The membership of `group` was lost, because of `error`. The rejoin policy decides what follows."""

    group: McastAddress
    error: McastError

    def __str__(self) -> str:
        return f"{self.group}: membership lost: {_first_line(self.error)}"


class Rejoined(NamedTuple):
    """The membership of `group` is back, after so many `attempts`.

    Messages that were sent in the `outage` seconds since the loss did not arrive here.
    """

    group: McastAddress
    outage: float
    attempts: int

    def __str__(self) -> str:
        return f"{self.group}: rejoined after {self.outage:.3g} s, attempts: {self.attempts}"


class GaveUp(NamedTuple):
    """`attempts` attempts to join again failed, the last with `error`.

    recv and send of the group raise from now on.
    """

    group: McastAddress
    error: McastError
    attempts: int

    def __str__(self) -> str:
        return f"{self.group}: gave up rejoining after {self.attempts} attempts: {_first_line(self.error)}"


class ReceiveQueueLow(NamedTuple):
    """At some moment only `free` of `depth` receives were left.

    While none is left, messages are lost in silence.
    """

    free: int
    depth: int

    def __str__(self) -> str:
        low = f"the receive queue was down to {self.free} of {self.depth}"
        return f"{low}: receive faster, or raise receive_depth (of a command, --receive-depth)"


class MessagesMissing(NamedTuple):
    """The messages `first` to `last` of a sender have not arrived, as a later message of it shows.

    Only an endpoint with sequence=True has this event. One of these messages that arrives after all is
    delivered with its number, and counted as late.

    group   the group that they were sent to
    source  the sender's GID
    src_qp  the sender's queue pair number, as in `Message`
    stream  the stream that the numbers count; a sender begins a new one, at 0, with each join
    """

    group: McastAddress
    source: Gid
    src_qp: int
    stream: int
    first: int
    last: int

    def __str__(self) -> str:
        one = self.first == self.last
        which = f"message {self.first} of" if one else f"messages {self.first} to {self.last} of"
        return f"{self.group}: {which} {self.source.ipv4 or self.source} {'is' if one else 'are'} missing"


class PortDown(NamedTuple):
    """The link of `port` ("device/port") is down: nothing is sent or received until `PortUp`.

    On InfiniBand the memberships are lost, each with an event `Lost` of its own, and joined again as the
    policy says. On RoCE the memberships stay, and messages flow again when the link is up.
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
    """The GID table of `port` ("device/port") has changed.

    own  True if the GID that the endpoint sends from has changed, or its address is gone: the memberships are
         lost, and joined again as the policy says once the address is back
    """

    port: str
    own: bool

    def __str__(self) -> str:
        verb = "is" if self.own else "is not"
        return f"{self.port}: the GID table has changed; the GID of this endpoint {verb} affected"


def _first_line(error: McastError) -> str:
    return str(error).partition("\n")[0]


Event = Lost | Rejoined | GaveUp | MessagesMissing | ReceiveQueueLow | PortDown | PortUp | AddressChanged


class LoopbackReport(NamedTuple):
    """Means that keep own messages away now.

    policy    the policy that the user chose
    hardware  True if the device has agreed not to return own messages; `Membership.probe_loopback` finds out
              whether it does as agreed
    filtered  True while the filter is on
    """

    policy: LoopbackPolicy
    hardware: bool
    filtered: bool
