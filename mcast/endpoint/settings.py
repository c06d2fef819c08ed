"""The options of an endpoint with their defaults, and whether a device can serve them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from ipaddress import IPv4Address, IPv6Address

from mcast.api import Backend, CqModeration, LinkLayer
from mcast.endpoint import sequence
from mcast.endpoint.policy import LoopbackPolicy, RejoinPolicy
from mcast.endpoint.ports import Place


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an endpoint; `mcast.open_endpoint` explains them. ValueError for a wrong policy."""

    loopback: LoopbackPolicy | str = "on"
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
            raise ValueError(f"sequence is {self.sequence!r}: allowed are True, False and None")
        if not isinstance(self.seed, int | None):
            raise ValueError(f"seed is {self.seed!r}: give an int, or None")

    @property
    def header_size(self) -> int:
        """Bytes of the sequence header in every message, 0 without one."""
        return sequence.HEADER_SIZE if self.sequence else 0


DEFAULTS = Settings()


@dataclass(frozen=True)
class Where:
    """The port that an endpoint is opened on."""

    backend: str | Backend
    bind: IPv4Address | IPv6Address | str | None = None
    _: KW_ONLY
    device: str | None = None
    port_num: int = 1


@dataclass(frozen=True, kw_only=True)
class Opening(Settings, Where):
    """The arguments of `open_endpoint`: backend and port, the settings, and the `options` of a backend opened
    by name."""

    options: Mapping[str, object] | None = None


_SERVICE_LEVELS = {
    LinkLayer.ETHERNET: ((0, 7), "Ethernet has eight priorities"),
    LinkLayer.INFINIBAND: ((0, 15), "InfiniBand has 16 service levels"),
}


def refuse_beyond_device(settings: Settings, place: Place) -> None:
    """Raise ValueError for an option that the device or the port cannot serve, and say what they can."""
    device, port = place.device, place.port
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
        if type(value) is not int or not first <= value <= last:
            kind = "" if type(value) is int else ", as an int"
            raise ValueError(f"{name} is {value!r}: allowed are {first}..{last}{kind} ({why})")
