"""`mcast bench --server` and `--client` on different hosts, which agree over the group that they measure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from mcast.cli.options import endpoint_at, refuse_in_process
from mcast.cli.signals import interruptible
from mcast.cli.terminal import Failure, UsageError, json_output, say
from mcast.errors.tree import MessageTooLarge
from mcast.wire.addresses import McastAddress

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

    from mcast.bench.intervals import IntervalResult, Intervals
    from mcast.endpoint.blocking import Endpoint
    from mcast.endpoint.settings import Settings


def line_of(part: IntervalResult) -> str:
    """A part, or all of a measurement, in one line."""
    lost = "" if part.lost is None else f"  {part.lost:,} lost"
    rates = f"{part.messages_per_s:,.0f} messages/s  {part.gbits_per_s:,.3g} Gbit/s"
    return f"{part.begins:6.1f} - {part.ends:.1f} s  {rates}{lost}"


class EndOptions(NamedTuple):
    """Where one end takes part, and what it tells meanwhile."""

    backend: str
    bind: IPv4Address | IPv6Address | None
    device: str | None
    group: McastAddress
    settings: Settings
    intervals: Intervals

    @contextmanager
    def endpoint(self, others: str) -> Iterator[Endpoint]:
        """An endpoint there until Ctrl-C; `others` is what programs elsewhere do."""
        refuse_in_process(self.backend, others)
        options = self.backend, self.bind, self.device, self.settings
        with interruptible(), endpoint_at(*options, sequence=True) as endpoint:
            yield endpoint

    def about(self, role: str, endpoint: Endpoint) -> dict[str, Any]:
        about = {"role": role, "backend": self.backend, "group": str(self.group)}
        port = {"device": endpoint.device.name, "port": endpoint.port.port_num}
        return about | port | {"address": str(endpoint.address)}


def serve(where: EndOptions) -> tuple[IntervalResult, dict[str, Any]]:
    """Count what the next client sends, as a member of the group."""
    from mcast.bench.client_server import receive
    from mcast.bench.end import BENCH_TIMEOUT

    with where.endpoint("send") as endpoint:
        endpoint.join(where.group, timeout=BENCH_TIMEOUT)
        here = f"{endpoint.address} ({endpoint.device.name})"
        say(f"waiting in {where.group} on {here} for `mcast bench --client`", err=True)
        return receive(endpoint, where.group, where.intervals), where.about("server", endpoint)


def send(
    where: EndOptions, size: int, seconds: float, receivers: int, rate: float | None
) -> tuple[IntervalResult, dict[str, Any]]:
    """Wait for so many servers, ask for their round trips, and send."""
    from mcast.bench import client_server
    from mcast.endpoint.ports import LocalPort

    with where.endpoint("receive") as endpoint:
        local_port = LocalPort(endpoint.device, endpoint.port, endpoint.address)
        try:
            if size > endpoint.max_message_size:  # before anybody is waited for
                raise _beyond(size, endpoint.max_message_size)
            found = client_server.receivers_of(
                endpoint.backend, local_port, where.group, receivers, where.settings
            )
            total = client_server.send(endpoint, where.group, size, seconds, rate, where.intervals)
        except MessageTooLarge as error:
            raise _beyond(size, error.limit) from None
        except TimeoutError as error:
            raise Failure(str(error)) from None
        about = where.about("client", endpoint)
        return total, about | {"size": size, "receivers": found}


def _beyond(size: int, limit: int) -> UsageError:
    return UsageError(f"--size is {size}: one MTU carries {limit} bytes, and a message is one MTU")


def show(
    total: IntervalResult, about: dict[str, Any], intervals: list[IntervalResult], as_json: bool
) -> None:
    """Print the whole measurement."""
    if as_json:
        json_output.result(about | total.as_dict() | {"intervals": intervals})
        return
    for one in about.get("receivers", ()):
        times = "  ".join(f"{name} {value:.3f}" for name, value in one.milliseconds._asdict().items())
        say(f"{one.address} QP {one.qp}: round trip {times} ms, {one.loss:.0%} lost")
    say(f"{about['role']}: {total.messages:,} messages, {total.bytes:,} bytes", line_of(total))
