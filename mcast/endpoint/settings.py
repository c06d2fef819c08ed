"""The options of an endpoint, and whether a device can serve them."""

from __future__ import annotations

from typing import NamedTuple

from mcast.api import CqModeration, LinkLayer
from mcast.endpoint import sequence
from mcast.endpoint.policy import LoopbackPolicy, RejoinPolicy
from mcast.endpoint.ports import Place


class Settings(NamedTuple):
    """The options of an endpoint, checked."""

    loopback: LoopbackPolicy = LoopbackPolicy.ON
    rejoin: RejoinPolicy | None = RejoinPolicy()
    sequence: bool = False
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

    @property
    def header_size(self) -> int:
        """Bytes of ours in every message."""
        return sequence.HEADER_SIZE if self.sequence else 0


DEFAULTS = Settings()

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
        ("traffic_class", settings.traffic_class, (0, 255), "a DSCP is its upper six bits: dscp << 2"),
        ("service_level", settings.service_level, *_SERVICE_LEVELS[port.link_layer]),
    ):
        first, last = allowed
        if value is not None and (type(value) is not int or not first <= value <= last):
            raise ValueError(f"{name} is {value!r}: allowed are {first}..{last} ({why})")
