"""`mcast bench --server` and `--client`: the same group measured by programs on different hosts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mcast.cli.interrupt import ends_cleanly
from mcast.cli.place import endpoint_at, refuse_simulated
from mcast.cli.terminal import Failure, NotBegun, say
from mcast.errors.tree import MessageTooLarge
from mcast.wire.addresses import McastAddress

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

    from mcast.bench.parts import Intervals, Part
    from mcast.endpoint.blocking import Endpoint
    from mcast.endpoint.settings import Settings

_DEPTH = 4096
"""The receive queue, in messages, because nothing holds the sender back."""


def line_of(part: Part) -> str:
    """A part, or all of a measurement, in one line."""
    lost = "" if part.lost is None else f"  {part.lost:,} lost"
    rates = f"{part.messages_per_s:,.0f} messages/s  {part.gbits_per_s:,.3g} Gbit/s"
    return f"{part.begins:6.1f} - {part.ends:.1f} s  {rates}{lost}"


def serve(
    backend: str,
    bind: IPv4Address | IPv6Address | None,
    device: str | None,
    group: McastAddress,
    settings: Settings,
    parts: Intervals,
) -> tuple[Part, dict[str, Any]]:
    """Count what the next client sends, as a member of the group."""
    from mcast.bench.apart import receive
    from mcast.bench.end import BOUND

    refuse_simulated(backend, "send")
    with ends_cleanly(), endpoint_at(backend, bind, device, _DEPTH, settings, sequence=True) as endpoint:
        endpoint.join(group, timeout=BOUND)
        say(f"waiting in {group} on {_where(endpoint)} for `mcast bench --client`", err=True)
        return receive(endpoint, group, parts), _about("server", backend, endpoint, group)


def send(
    backend: str,
    bind: IPv4Address | IPv6Address | None,
    device: str | None,
    group: McastAddress,
    settings: Settings,
    parts: Intervals,
    size: int,
    seconds: float,
    receivers: int,
    rate: float | None,
) -> tuple[Part, dict[str, Any]]:
    """Wait for so many servers, ask for their round trips, and send."""
    from mcast.bench import apart
    from mcast.endpoint.ports import Place

    refuse_simulated(backend, "receive")
    with ends_cleanly(), endpoint_at(backend, bind, device, _DEPTH, settings, sequence=True) as endpoint:
        place = Place(endpoint.device, endpoint.port, endpoint.address)
        try:
            found = apart.receivers_of(endpoint.backend, place, group, receivers, settings)
            total = apart.send(endpoint, group, size, seconds, rate, parts)
        except MessageTooLarge as error:
            raise NotBegun(
                f"--size is {size}: one MTU carries {error.limit} bytes, and a message is one MTU"
            ) from None
        except TimeoutError as error:
            raise Failure(str(error)) from None
        about = _about("client", backend, endpoint, group)
        return total, about | {"size": size, "receivers": [one.as_dict() for one in found]}


def show(total: Part, about: dict[str, Any], parts: list[Part], as_json: bool) -> None:
    """Print the whole measurement."""
    if as_json:
        say(json.dumps(about | total.as_dict() | {"intervals": [part.as_dict() for part in parts]}, indent=1))
        return
    for one in about.get("receivers", ()):
        times = "  ".join(f"{name} {value:.3f}" for name, value in one["milliseconds"].items())
        say(f"{one['address']} QP {one['qp']}: round trip {times} ms, {one['loss']:.0%} lost")
    say(f"{about['role']}: {total.messages:,} messages, {total.bytes:,} bytes", line_of(total))


def _where(endpoint: Endpoint) -> str:
    return f"{endpoint.address} ({endpoint.device.name})"


def _about(role: str, backend: str, endpoint: Endpoint, group: McastAddress) -> dict[str, Any]:
    where = {"device": endpoint.device.name, "port": endpoint.port.port_num, "address": str(endpoint.address)}
    return {"role": role, "backend": backend, "group": str(group)} | where
