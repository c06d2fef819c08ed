"""A card report: one run of the conformance suite, and what was measured beside it, for somebody elsewhere.

`CardReport` is the file's schema. A field is never given another meaning: such a change is a new `version`.
New fields may be added to a version, so a reader passes over fields that it does not know. By default nothing
in the file names the host, its user or its network: see `mcast.bench.card_privacy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

Outcome = Literal["passed", "failed", "deviation", "not-applicable", "skipped"]
Measured = Literal["measured", "not-applicable", "failed"]
Verdict = Literal["pass", "differs", "fail"]


class _ReportModel(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="ignore", use_attribute_docstrings=True
    )


class Versions(_ReportModel):
    """Software of the host."""

    mcast: str
    python: str
    """Implementation and version, such as CPython 3.11.2."""
    kernel: str
    """Name and release, such as Linux 6.1.0-56-amd64."""
    machine: str
    """Architecture, such as x86_64."""
    cpus: int
    """Processors that the process may use."""
    libraries: dict[str, str]
    """Name -> version of what the provider has loaded; rdma-core among them if its version is known."""


class PortReport(_ReportModel):
    """A port of a device."""

    number: int
    link_layer: str
    state: str
    mtu: int
    """Bytes of payload that a message carries at most."""
    rate: float
    """Gbit/s."""
    gids: int
    """Number of GIDs."""
    used: int | None
    """Place among the ports that the suite and the measurements use, from 0; None: not used."""
    addresses: tuple[str, ...] | None = None
    """IP addresses; only where they were asked for."""


class DeviceReport(_ReportModel):
    """A device, which has no name here: names of devices can hold a MAC address."""

    driver: str
    """Driver of the kernel, such as mlx5_core; "" if not known."""
    driver_version: str
    """Version of a driver that does not come with the kernel; "" if it does."""
    firmware: str
    """Version of the firmware; "" if the device has none, or does not tell."""
    hardware: dict[str, str]
    """Identification of the model, such as PCI vendor and device, and board_id."""
    limits: dict[str, int]
    """Limits under the names of ibv_query_device."""
    ports: tuple[PortReport, ...]
    name: str | None = None
    """Name and GUID: only where they were asked for."""
    node_guid: str | None = None


class BedReport(_ReportModel):
    """Features that the suite could use here."""

    ports: int
    """Number of ports that the suite used; with one alone much does not apply."""
    present: tuple[str, ...]
    """Features and capabilities, in words."""
    absent: tuple[str, ...]
    """Features and capabilities that are not here: what needs one of them does not apply."""


class FailedTest(_ReportModel):
    """A test that did not pass."""

    test: str
    outcome: Outcome
    reason: str


class ClauseReport(_ReportModel):
    """Outcome of a clause of the contract, or of a measured fact."""

    id: str
    says: str
    outcome: Outcome
    tests: int
    """Number of tests that prove it, of which `failed` did not pass."""
    not_applicable: int
    """Number of these tests that do not apply here, which may be a part of a clause that passed."""
    failed: tuple[FailedTest, ...] = ()
    reason: str = ""
    """Why it does not apply, deviates, or failed."""


class Spread(_ReportModel):
    """A quantity that was measured several times."""

    unit: str
    count: int
    """Number of measurements; with less than two the quartiles are the median."""
    minimum: float
    first_quartile: float
    median: float
    third_quartile: float
    maximum: float


class Measurement(_ReportModel):
    """Result of a measurement.

    Where `outcome` is not measured, `reason` says why, and the figures are None.
    """

    outcome: Measured
    reason: str = ""


class Loopback(Measurement):
    """Effect of QpInit.block_loopback: does it keep a queue pair's own messages from it?"""

    block: Literal["honoured", "ignored", "refused"] | None = None
    """Refused: no queue pair with the flag can be made. Ignored: it gets its own messages nevertheless."""
    sent: int | None = None
    own: int | None = None
    """Messages that came back to the queue pair itself."""
    neighbour: int | None = None
    """Messages that another queue pair of the same port got, which did not ask for blocking."""


class JoinLeave(Measurement):
    """Duration of joins and leaves of one queue pair, in groups that had no member before."""

    join: Spread | None = None
    """From the call to the event of the join, the attach included."""
    leave: Spread | None = None
    """Until the call returns. Switches and the subnet manager may learn of it later."""
    refused: int | None = None
    """Number of joins that failed."""


class Flood(_ReportModel):
    """Messages to a group that reached a port which is no member."""

    sent: int
    non_member: int
    """Messages that a queue pair got whose port is no member: it was attached without a join."""


class Flooding(Measurement):
    """Flooding: does the fabric deliver a group to a port that is no member?"""

    flooded: bool | None = None
    with_member: Flood | None = None
    """The group has a member on another port."""
    without_member: Flood | None = None
    """The group has no member at all, as of a sender that joined send-only."""
    member_sent: int | None = None
    member: int | None = None
    """Control: messages sent to, and received by, the same port once it is a member."""


class RateOfSize(_ReportModel):
    """Messages of one size."""

    size: int
    """Bytes of payload."""
    messages_per_s: Spread
    """Sent in batches, and received, in each run."""
    latency: Spread
    """Median latency of each run, of messages sent one by one."""
    sent: int
    """Messages of all runs in batches."""
    lost: int
    """Messages that did not come, of these and of those sent one by one."""


class Rate(Measurement):
    """Rate from one sender to one receiver, both in this process. Losses say more than the rate."""

    receiver: Literal["second port", "same port"] | None = None
    sizes: tuple[RateOfSize, ...] = ()


class Host(_ReportModel):
    """Who made the report; only where that was asked for."""

    name: str
    user: str


class CardReport(_ReportModel):
    """A report of one provider on one host."""

    format: Literal["mcast-card-report"] = "mcast-card-report"
    version: Literal[1] = 1
    created: str
    """Date and time, UTC."""
    seconds: float
    """Duration of suite and measurements, in seconds."""
    provider: str
    summary: str
    verdict: Verdict
    """Verdict over all clauses and facts.

    fail: a clause or a test of no clause failed, or no clause passed. pass: each clause and fact passed or
    does not apply. differs: all else, so a fact failed, or the provider declares a deviation.
    """
    why: tuple[str, ...]
    """Ids that keep the verdict from being pass."""
    counts: dict[str, dict[str, int]]
    """clauses, facts -> outcome -> how many."""
    versions: Versions
    devices: tuple[DeviceReport, ...]
    bed: BedReport
    clauses: tuple[ClauseReport, ...]
    facts: tuple[ClauseReport, ...]
    loose: tuple[FailedTest, ...]
    """Failed tests that belong to no clause or fact."""
    loopback: Loopback
    join_leave: JoinLeave
    flooding: Flooding
    rate: Rate
    redacted: bool
    """True: addresses, names and paths in reasons are replaced by numbered marks such as <address 1>."""
    host: Host | None = Field(default=None)
    """Only where it was asked for."""


def spread(values: Sequence[float], unit: str) -> Spread:
    """Return minimum, quartiles and maximum of one value or more."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    rounded = (round(value, 3) for value in (min(values), low, middle, high, max(values)))
    least, low, middle, high, most = rounded
    return Spread(
        unit=unit,
        count=len(values),
        minimum=least,
        first_quartile=low,
        median=middle,
        third_quartile=high,
        maximum=most,
    )
