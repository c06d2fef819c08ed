"""Faults of single messages and SA requests: ordered rules, each of which may give a verdict.

A rule returns a verdict or None. The first verdict counts; without a verdict the message or request passes:

    with fabric.rules.when(Messages(source="roce0", target="roce2", nth=3), Drop()):
        ...  # the third message of roce0, as roce2 would get it, is lost; everything else passes
    with fabric.rules.when(Requests(method=SaMethod.SET, rate=0.5), Refuse(SaStatus.NO_RESOURCES)):
        ...  # every second join, on average, is refused

A rule without a `with` holds as long as the fabric, or until its `remove`.

Faults of a port, a switch or the SM are methods of `Fabric` (`incidents`). Times are in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Generic, NamedTuple, Self, TypeVar, overload

from mcast.wire.addresses import McastAddress
from mcast.wire.mapping import is_mapped
from mcast.wire.mcmember import McMemberRecord, SaMethod, SaStatus

HOLD_NS = 1_000_000
"""A message that is held back for later ones comes after 1 ms at the latest."""


class Delivery(NamedTuple):
    """One message on its way to one queue pair.

    `number` counts the fabric's messages from 0; `now` is in ns. `is_probe` is True for the messages by which
    endpoints find each other (`ready`): how many there are depends on timing, and programs never see them.
    """

    now: int
    group: bytes
    source: str
    target: str
    src_qp: int
    dst_qp: int
    number: int
    size: int
    is_probe: bool = False


class SaRequest(NamedTuple):
    """One request of a port to the SA. `now` is in ns."""

    now: int
    source: str
    method: SaMethod
    record: McMemberRecord


# --- verdicts --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pass:
    """The message or request passes, whatever later rules say."""


@dataclass(frozen=True, slots=True)
class Drop:
    """The message is lost; the SA stays silent."""


@dataclass(frozen=True, slots=True)
class Delay:
    """The message comes `ns` nanoseconds later."""

    ns: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The message comes, and `copies` more copies of it."""

    copies: int = 1


@dataclass(frozen=True, slots=True)
class Reorder:
    """Hold the message back until `after` later messages have arrived at the same queue pair.

    Probes do not count. A message is held for HOLD_NS at most.
    """

    after: int = 1


@dataclass(frozen=True, slots=True)
class CorruptQkey:
    """The message arrives with this Q_Key instead of its own; None: with one bit of its own changed."""

    qkey: int | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The SA answers with this status."""

    status: SaStatus


DeliveryVerdict = Pass | Drop | Delay | Duplicate | Reorder | CorruptQkey
"""Fate of a message."""
SaVerdict = Pass | Drop | Delay | Refuse
"""Fate of an SA request."""
DeliveryRule = Callable[[Delivery], DeliveryVerdict | None]
"""Function that judges each message to each queue pair; None leaves it to the next rule."""
SaRule = Callable[[SaRequest], SaVerdict | None]
"""Function that judges each SA request; None leaves it to the next rule."""

# --- what a rule is for ----------------------------------------------------------------------

Names = str | Collection[str] | None


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages that a rule is for. A field that is left out fits all messages.

    group         a multicast address, or an MGID; the MGIDs of an address in every partition fit
    source        the name of the sending port, such as "roce0", or several
    target        the name of the receiving port, or several
    since, until  times in ns on the fabric's clock: since <= now < until
    nth           the number of the message, from 1, among those that fit the other fields since the rule was
                  installed; or several. A message counts once, however many queue pairs get it, and the
                  probes of endpoints do not count: the same messages are picked whether `ready` is used
    rate          the share of the remaining messages, 0..1, each drawn with the fabric's seed; probes have
                  draws of their own
    """

    group: str | McastAddress | None = None
    source: Names = None
    target: Names = None
    since: int = 0
    until: int | None = None
    nth: int | Collection[int] | None = None
    rate: float = 1.0

    def fits(self, message: Delivery) -> bool:
        """Return True if group, ports and time fit."""
        return (
            _within(self.since, self.until, message.now)
            and _among(self.source, message.source)
            and _among(self.target, message.target)
            and (self.group is None or is_mapped(McastAddress.of(self.group).address, message.group))
        )


@dataclass(frozen=True, slots=True)
class Requests:
    """The SA requests that a rule is for; a field that is left out fits all. Fields as in `Messages`.

    port    the name of the port that asks, such as "ib0", or several
    method  SaMethod.SET for joins, SaMethod.DELETE for leaves
    """

    method: SaMethod | None = None
    port: Names = None
    group: str | McastAddress | None = None
    since: int = 0
    until: int | None = None
    nth: int | Collection[int] | None = None
    rate: float = 1.0

    def fits(self, request: SaRequest) -> bool:
        """Return True if method, port, group and time fit."""
        return (
            _within(self.since, self.until, request.now)
            and self.method in (None, request.method)
            and _among(self.port, request.source)
            and (self.group is None or is_mapped(McastAddress.of(self.group).address, request.record.mgid))
        )


def _within(since: int, until: int | None, now: int) -> bool:
    return since <= now and (until is None or now < until)


def _among(wanted: Names, name: str) -> bool:
    return wanted is None or (name == wanted if isinstance(wanted, str) else name in wanted)


def _names_in(wanted: Names) -> tuple[str, ...]:
    return (wanted,) if isinstance(wanted, str) else tuple(wanted or ())


class _Picks:
    """Counter and random choice of a rule, for `nth` and `rate`."""

    def __init__(self, which: Messages | Requests, random: Random) -> None:
        nth = which.nth
        self._nth = None if nth is None else frozenset((nth,) if isinstance(nth, int) else nth)
        self._rate, self._random = which.rate, random
        self._probe_random = Random(0)
        self._probe_random.setstate(random.getstate())
        self._seen = 0
        self._last: object = None

    def is_spent(self) -> bool:
        """Return True if the last message or request of `nth` has passed."""
        return self._nth is not None and self._seen >= max(self._nth, default=0)

    def picks(self, thing: object, is_probe: bool = False) -> bool:
        """Return True if the rule is for this message or request, one of those that fit.

        `thing` is equal for copies of one message. A probe changes nothing of what is picked later.
        """
        if is_probe:
            return self._nth is None and (self._rate >= 1 or self._probe_random.random() < self._rate)
        if self._nth is not None:
            self._seen += thing != self._last
            self._last = thing
            if self._seen not in self._nth:
                return False
        return self._rate >= 1 or self._random.random() < self._rate


# --- the rules of a fabric -------------------------------------------------------------------

R = TypeVar("R")


class Installed(Generic[R]):
    """A rule that holds from the call that gave this, until the end of a `with` or `remove`."""

    def __init__(self, rules: list[R], rule: R, is_spent: Callable[[], bool] = lambda: False) -> None:
        self._rules, self._rule, self._is_spent = rules, [rule], is_spent
        rules.append(rule)

    @property
    def is_spent(self) -> bool:
        """True if the rule is for single messages or requests, `nth`, and all of these have passed."""
        return self._is_spent()

    def remove(self) -> None:
        """End the rule. Idempotent."""
        while self._rule:
            self._rules.remove(self._rule.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@dataclass
class Rules:
    """The rules of a fabric, in the order in which they were installed.

    random  the random numbers of the fabric
    ports   the names of the fabric's ports, in order; without names, rules may name any port
    """

    random: Random = field(default_factory=lambda: Random(0))
    deliveries: list[DeliveryRule] = field(default_factory=list)
    sa_requests: list[SaRule] = field(default_factory=list)
    ports: Sequence[str] = ()

    def judge_delivery(self, delivery: Delivery) -> DeliveryVerdict | None:
        """The first rule's verdict, None if the message passes."""
        verdicts = (rule(delivery) for rule in self.deliveries)
        return next((verdict for verdict in verdicts if verdict is not None), None)

    def judge_sa_request(self, request: SaRequest) -> SaVerdict | None:
        """The first rule's verdict; None if the SA answers as it should."""
        verdicts = (rule(request) for rule in self.sa_requests)
        return next((verdict for verdict in verdicts if verdict is not None), None)

    @overload
    def when(self, which: Messages, verdict: DeliveryVerdict) -> Installed[DeliveryRule]: ...
    @overload
    def when(self, which: Requests, verdict: SaVerdict) -> Installed[SaRule]: ...
    def when(
        self, which: Messages | Requests, verdict: DeliveryVerdict | SaVerdict
    ) -> Installed[DeliveryRule] | Installed[SaRule]:
        """Give `which` this verdict.

        Raises TypeError for a verdict that they cannot get, and ValueError for a field that fits nothing.
        """
        if isinstance(which, Messages) and isinstance(verdict, DeliveryVerdict):
            message_verdict, messages, picks = verdict, which, self._picks(which)

            def on_message(message: Delivery) -> DeliveryVerdict | None:
                picked = messages.fits(message) and picks.picks(message.number, message.is_probe)
                return message_verdict if picked else None

            return Installed(self.deliveries, on_message, picks.is_spent)
        if isinstance(which, Requests) and isinstance(verdict, SaVerdict):
            request_verdict, requests, drawn = verdict, which, self._picks(which)

            def on_request(request: SaRequest) -> SaVerdict | None:
                return request_verdict if requests.fits(request) and drawn.picks(object()) else None

            return Installed(self.sa_requests, on_request, drawn.is_spent)
        raise TypeError(f"{type(which).__name__} cannot have the verdict {verdict!r}")

    def _picks(self, which: Messages | Requests) -> _Picks:
        """Return what counts and draws for `which`.

        Raises ValueError for a field that nothing can fit: a test whose fault never happens would pass.
        """
        for field_name in ("source", "target", "port"):
            for name in _names_in(getattr(which, field_name, None)):
                if self.ports and name not in self.ports:
                    there = f"{self.ports[0]} to {self.ports[-1]}"
                    raise ValueError(f"{field_name} is {name!r}: name a port of this fabric, {there}")
        if which.group is not None:
            McastAddress.of(which.group)
        nth = (1,) if which.nth is None else (which.nth,) if isinstance(which.nth, int) else which.nth
        if min(nth, default=0) < 1:
            raise ValueError(f"nth is {which.nth!r}: give numbers from 1")
        if not 0 <= which.rate <= 1:
            raise ValueError(f"rate is {which.rate!r}: give a share from 0 to 1")
        return _Picks(which, self.random)

    def on_delivery(self, rule: DeliveryRule) -> Installed[DeliveryRule]:
        """Ask `rule` for each message to each QP."""
        return Installed(self.deliveries, rule)

    def on_sa_request(self, rule: SaRule) -> Installed[SaRule]:
        """Ask `rule` for each SA request."""
        return Installed(self.sa_requests, rule)
