"""`mcast bench --server` and `--client`: the same group measured by programs on different hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from mcast.cli.interrupt import ends_cleanly
from mcast.cli.place import endpoint_at, refuse_simulated
from mcast.cli.terminal import Failure, NotBegun, json_output, say
from mcast.errors.tree import MessageTooLarge
from mcast.wire.addresses import McastAddress

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

    from mcast.bench.parts import Intervals, Part
    from mcast.endpoint.blocking import Endpoint
    from mcast.endpoint.settings import Settings


def line_of(part: Part) -> str:
    """A part, or all of a measurement, in one line."""
    lost = "" if part.lost is None else f"  {part.lost:,} lost"
    rates = f"{part.messages_per_s:,.0f} messages/s  {part.gbits_per_s:,.3g} Gbit/s"
    return f"{part.begins:6.1f} - {part.ends:.1f} s  {rates}{lost}"


class OneEnd(NamedTuple):
    """Where one end takes part, and what it tells meanwhile."""

    backend: str
    bind: IPv4Address | IPv6Address | None
    device: str | None
    group: McastAddress
    settings: Settings
    parts: Intervals

    @contextmanager
    def endpoint(self, others: str) -> Iterator[Endpoint]:
        """An endpoint there until Ctrl-C; `others` is what programs elsewhere do."""
        refuse_simulated(self.backend, others)
        place = self.backend, self.bind, self.device
        with ends_cleanly(), endpoint_at(*place, self.settings, sequence=True) as endpoint:
            yield endpoint

    def about(self, role: str, endpoint: Endpoint) -> dict[str, Any]:
        place = {"device": endpoint.device.name, "port": endpoint.port.port_num}
        about = {"role": role, "backend": self.backend, "group": str(self.group)}
        return about | place | {"address": str(endpoint.address)}


def serve(where: OneEnd) -> tuple[Part, dict[str, Any]]:
    """Count what the next client sends, as a member of the group."""
    from mcast.bench.apart import receive
    from mcast.bench.end import BOUND

    with where.endpoint("send") as endpoint:
        endpoint.join(where.group, timeout=BOUND)
        here = f"{endpoint.address} ({endpoint.device.name})"
        say(f"waiting in {where.group} on {here} for `mcast bench --client`", err=True)
        return receive(endpoint, where.group, where.parts), where.about("server", endpoint)


def send(
    where: OneEnd, size: int, seconds: float, receivers: int, rate: float | None
) -> tuple[Part, dict[str, Any]]:
    """Wait for so many servers, ask for their round trips, and send."""
    from mcast.bench import apart
    from mcast.endpoint.ports import Place

    with where.endpoint("receive") as endpoint:
        place = Place(endpoint.device, endpoint.port, endpoint.address)
        try:
            if size > endpoint.max_message_size:  # before anybody is waited for
                raise _beyond(size, endpoint.max_message_size)
            found = apart.receivers_of(endpoint.backend, place, where.group, receivers, where.settings)
            total = apart.send(endpoint, where.group, size, seconds, rate, where.parts)
        except MessageTooLarge as error:
            raise _beyond(size, error.limit) from None
        except TimeoutError as error:
            raise Failure(str(error)) from None
        about = where.about("client", endpoint)
        return total, about | {"size": size, "receivers": [one.as_dict() for one in found]}


def _beyond(size: int, limit: int) -> NotBegun:
    return NotBegun(f"--size is {size}: one MTU carries {limit} bytes, and a message is one MTU")


def show(total: Part, about: dict[str, Any], parts: list[Part], as_json: bool) -> None:
    """Print the whole measurement."""
    if as_json:
        json_output.result(about | total.as_dict() | {"intervals": [part.as_dict() for part in parts]})
        return
    for one in about.get("receivers", ()):
        times = "  ".join(f"{name} {value:.3f}" for name, value in one["milliseconds"].items())
        say(f"{one['address']} QP {one['qp']}: round trip {times} ms, {one['loss']:.0%} lost")
    say(f"{about['role']}: {total.messages:,} messages, {total.bytes:,} bytes", line_of(total))
