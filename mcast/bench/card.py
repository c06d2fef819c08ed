"""Make a card report of a run of the conformance suite: measure what the suite does not, and add it."""

from __future__ import annotations

import os
import platform
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from time import monotonic
from typing import TypeVar

import mcast
from mcast.api import (
    PORT_FEATURES,
    Capability,
    DeviceIdentity,
    DeviceInfo,
    Feature,
    Identity,
    Testbed,
    provider,
)
from mcast.bench.card_measure import measure_card
from mcast.bench.card_privacy import Redactor, own_names, user_name
from mcast.bench.card_report import (
    BedReport,
    CardReport,
    ClauseReport,
    DeviceReport,
    FailedTest,
    Host,
    Measurement,
    PortReport,
    Verdict,
    Versions,
)
from mcast.conformance.clauses import CLAUSES
from mcast.conformance.facts import FACTS
from mcast.conformance.report import Cell, Outcome, SuiteReport, SuiteResult, sentence_of
from mcast.wire.addresses import LocalAddress

M = TypeVar("M", bound=Measurement)

_FINE = {"passed", "not-applicable"}


def make_card_report(suite: SuiteReport, name: str, seconds: float, details: bool = False) -> CardReport:
    """Return the report of provider `name`, of a run of the suite that took `seconds`.

    With `details` it names the host, its user, devices and addresses, and reasons stand as they are.
    """
    start = monotonic()
    with provider(name).testbed() as bed:
        measured = measure_card(bed)
        devices = bed.backend.devices()
        identity = provider(name).identify()
        about_bed = _bed(bed)
        ports: dict[LocalAddress, int] = {port: place for place, port in enumerate(bed.ports)}
    interfaces = (interface for _, interface in socket.if_nameindex() if interface != "lo")
    # The backend may have left a device out, and an error names it
    called = [*(one.name for one in devices), *identity.devices]
    names = dict.fromkeys(interfaces, "interface") | dict.fromkeys(called, "device") | own_names()
    write = _Writer(None if details else Redactor(names), ports)
    column = suite.providers[name]
    clauses, facts = write.rows(column, CLAUSES), write.rows(column, FACTS)
    loose = tuple(write.failed(one) for one in suite.loose if one.backend in (name, None))
    return CardReport(
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        seconds=round(seconds + monotonic() - start, 1),
        provider=name,
        summary=provider(name).summary,
        verdict=_verdict(clauses, facts, loose),
        why=tuple(row.id for row in (*clauses, *facts) if row.outcome not in _FINE),
        counts={"clauses": _counts(clauses), "facts": _counts(facts)},
        versions=write.versions(identity),
        devices=tuple(write.device(one, identity.devices.get(one.name, DeviceIdentity())) for one in devices),
        bed=about_bed,
        clauses=clauses,
        facts=facts,
        loose=loose,
        loopback=write.measured(measured.loopback),
        join_leave=write.measured(measured.join_leave),
        flooding=write.measured(measured.flooding),
        rate=write.measured(measured.rate),
        redacted=not details,
        host=Host(name=platform.node(), user=user_name()) if details else None,
    )


class _Writer:
    """Writes the parts of a report; without a redactor with all details."""

    def __init__(self, redactor: Redactor | None, ports: Mapping[LocalAddress, int]) -> None:
        self._redactor, self._ports = redactor, ports

    def text(self, text: str) -> str:
        return self._redactor.text(text) if self._redactor else text

    def words(self, text: str) -> str:
        return self._redactor.words(text) if self._redactor else text

    def each(self, texts: Mapping[str, str]) -> dict[str, str]:
        return {name: self.words(text) for name, text in texts.items()}

    def rows(self, column: Mapping[str, Cell], names: Iterable[str]) -> tuple[ClauseReport, ...]:
        return tuple(
            ClauseReport(
                id=name,
                says=sentence_of(name),
                outcome=column[name].outcome.value,
                tests=len({one.test for one in column[name].results}),
                not_applicable=sum(one.outcome is Outcome.NOT_APPLICABLE for one in column[name].results),
                failed=tuple(self.failed(one) for one in column[name].results if _is_listed(one)),
                reason=self.text(column[name].reason or ""),
            )
            for name in names
        )

    def failed(self, result: SuiteResult) -> FailedTest:
        return FailedTest(test=result.test, outcome=result.outcome.value, reason=self.text(result.reason))

    def measured(self, measurement: M) -> M:
        return measurement.model_copy(update={"reason": self.text(measurement.reason)})

    def versions(self, identity: Identity) -> Versions:
        return Versions(
            mcast=mcast.__version__,
            python=f"{platform.python_implementation()} {platform.python_version()}",
            kernel=self.words(f"{platform.system()} {platform.release()}"),  # who built it may have named it
            machine=platform.machine(),
            cpus=len(os.sched_getaffinity(0)),
            libraries=self.each(identity.libraries),
        )

    def device(self, device: DeviceInfo, identity: DeviceIdentity) -> DeviceReport:
        own: dict[str, str] = {}
        if self._redactor is None:
            own = {"name": device.name, "node_guid": f"{device.node_guid:#018x}"}
        return DeviceReport(
            driver=self.words(identity.driver),
            driver_version=self.words(identity.driver_version),
            firmware=self.words(identity.firmware),
            hardware=self.each(identity.hardware),
            limits={name: getattr(device, name) for name in _LIMITS},
            ports=tuple(
                PortReport(
                    number=port.port_num,
                    link_layer=port.link_layer.value,
                    state=port.state.name,
                    mtu=port.active_mtu,
                    rate=port.rate,
                    gids=len(port.gids),
                    used=next((self._ports[one] for one in port.addresses if one in self._ports), None),
                    addresses=tuple(map(str, port.addresses)) if self._redactor is None else None,
                )
                for port in device.ports
            ),
            **own,
        )


_LIMITS = ("max_mcast_grp", "max_mcast_qp_attach", "max_qp_wr", "num_comp_vectors")


def _is_listed(result: SuiteResult) -> bool:
    return result.outcome not in (Outcome.PASSED, Outcome.NOT_APPLICABLE)


def _bed(bed: Testbed) -> BedReport:
    present = bed.backend.capabilities | bed.features | {*PORT_FEATURES[: len(bed.ports) - 1]}
    known: list[Capability | Feature] = [*Capability, *Feature]
    return BedReport(
        ports=len(bed.ports),
        present=tuple(one.value for one in known if one in present),
        absent=tuple(one.value for one in known if one not in present),
    )


def _counts(rows: Iterable[ClauseReport]) -> dict[str, int]:
    return dict(Counter(row.outcome for row in rows))


def _verdict(
    clauses: Iterable[ClauseReport], facts: Iterable[ClauseReport], loose: Iterable[FailedTest]
) -> Verdict:
    """The rule that `CardReport.verdict` describes."""
    of_clauses, of_facts = ({row.outcome for row in rows} for rows in (clauses, facts))
    if tuple(loose) or "failed" in of_clauses or "passed" not in of_clauses:
        return "fail"
    return "pass" if of_clauses | of_facts <= _FINE else "differs"
