"""The options of an endpoint with their defaults, and whether a device can serve them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from ipaddress import IPv4Address, IPv6Address
from math import inf
from typing import Literal

from mcast.api import Backend, CqModeration, LinkLayer
from mcast.arguments.checks import check_bool, check_int, check_type, short_repr
from mcast.arguments.seconds import check_seconds
from mcast.endpoint import sequence
from mcast.endpoint.policy import LoopbackPolicy, RejoinPolicy
from mcast.endpoint.ports import LocalPort

_WHOLE = {
    "receive_depth": "messages that the receive queue holds",
    "send_depth": "messages that the send queue holds",
    "max_message": "bytes, at most one MTU; None: one MTU",
    "seed": "the same number gives the same random numbers; None: of the provider's own",
    "traffic_class": "0..255, a DSCP is its upper six bits: dscp << 2; None: the destination's own",
    "service_level": "0..15, on Ethernet 0..7; None: the destination's own",
    "comp_vector": "a completion vector of the device, from 0 on; None: each queue pair gets the next one",
}
"""Options that are whole numbers -> what each is. The bounds are the device's: `check_device_limits`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an endpoint; `mcast.open_endpoint` explains them. ValueError for a wrong policy."""

    loopback: LoopbackPolicy | Literal["on", "off", "filter"] = "on"
    rejoin: RejoinPolicy | None = RejoinPolicy()  # noqa: RUF009  (frozen)
    sequence: bool | None = False
    receive_depth: int = 512
    send_depth: int = 128
    max_message: int | None = None
    seed: int | None = None
    traffic_class: int | None = None
    service_level: int | None = None
    busy_poll: float = 0.0
    comp_vector: int | None = None
    moderation: CqModeration | None = None
    timestamps: bool = False

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "loopback", LoopbackPolicy(self.loopback))
        except ValueError:
            allowed = ", ".join(policy.value for policy in LoopbackPolicy)
            raise ValueError(f"loopback is {self.loopback!r}: allowed are {allowed}") from None
        if not isinstance(self.rejoin, RejoinPolicy | None):
            raise ValueError(f"rejoin is {self.rejoin!r}: give a RejoinPolicy, or None to join never again")
        if not isinstance(self.sequence, bool | None):
            raise ValueError(f"sequence is {short_repr(self.sequence)}: allowed are True, False and None")
        for name in _WHOLE:
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_int(given, name, None, None, _WHOLE[name]))
        if self.moderation is not None:
            check_type(self.moderation, CqModeration, "moderation", "a CqModeration, or None")
        check_bool(self.timestamps, "timestamps")
        polling = check_seconds(self.busy_poll, "busy_poll")
        if self.busy_poll < 0:
            raise ValueError(f"busy_poll is {self.busy_poll}: give seconds from 0 on, inf to poll always")
        object.__setattr__(self, "busy_poll", self.busy_poll if self.busy_poll == inf else polling)

    @property
    def header_size(self) -> int:
        """Bytes of the sequence header in every message, 0 without one."""
        return sequence.HEADER_SIZE if self.sequence else 0


DEFAULTS = Settings()


@dataclass(frozen=True)
class PortSelector:
    """The port that an endpoint is opened on."""

    backend: str | Backend
    bind: IPv4Address | IPv6Address | str | None = None
    _: KW_ONLY
    device: str | None = None
    port_num: int = 1


@dataclass(frozen=True, kw_only=True)
class OpenArguments(Settings, PortSelector):
    """The arguments of `open_endpoint`.

    Backend and port, the settings, and the `options` of a backend opened by name.

    The function's signature has their types and defaults again, for readers and checkers.
    """

    options: Mapping[str, object] | None = None


_SERVICE_LEVELS = {
    LinkLayer.ETHERNET: ((0, 7), "Ethernet has eight priorities"),
    LinkLayer.INFINIBAND: ((0, 15), "InfiniBand has 16 service levels"),
}


def check_device_limits(settings: Settings, local_port: LocalPort) -> None:
    """Raise ValueError for an option that the device or the port cannot serve, and say what they can."""
    device, port = local_port.device, local_port.port
    most = port.active_mtu - settings.header_size
    for name, value, allowed, why in (
        ("receive_depth", settings.receive_depth, (1, device.max_qp_wr), f"max_qp_wr of {device.name}"),
        ("send_depth", settings.send_depth, (1, device.max_qp_wr), f"max_qp_wr of {device.name}"),
        (
            "max_message",
            settings.max_message,
            (1, most),
            f"MTU {port.active_mtu} of {device.name}, less headers",
        ),
        (
            "comp_vector",
            settings.comp_vector,
            (0, device.num_comp_vectors - 1),
            f"num_comp_vectors of {device.name}",
        ),
        ("traffic_class", settings.traffic_class, (0, 255), "a DSCP is its upper six bits: dscp << 2"),
        ("service_level", settings.service_level, *_SERVICE_LEVELS[port.link_layer]),
    ):
        first, last = allowed
        if value is None and name not in ("receive_depth", "send_depth"):
            continue
        if value is None or not first <= value <= last:
            raise ValueError(f"{name} is {short_repr(value)}: allowed are {first}..{last} ({why})")
