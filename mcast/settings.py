"""The options of an endpoint, and whether a device can serve them."""

from __future__ import annotations

from typing import NamedTuple

from mcast import sequence
from mcast.policy import LoopbackPolicy, RejoinPolicy
from mcast.ports import Place


class Settings(NamedTuple):
    """The options of an endpoint, checked."""

    loopback: LoopbackPolicy = LoopbackPolicy.ON
    rejoin: RejoinPolicy | None = RejoinPolicy()
    sequence: bool = False
    receive_depth: int = 512
    send_depth: int = 128
    max_message: int | None = None
    seed: int | None = None

    @property
    def header_size(self) -> int:
        """Bytes of ours in every message."""
        return sequence.HEADER_SIZE if self.sequence else 0


def refuse_beyond_device(settings: Settings, place: Place) -> None:
    """Raise ValueError for an option that the device or the port cannot serve, and say what they can."""
    device, port = place.device, place.port
    most = port.active_mtu - settings.header_size
    for name, value, limit, why in (
        ("receive_depth", settings.receive_depth, device.max_qp_wr, f"max_qp_wr of {device.name}"),
        ("send_depth", settings.send_depth, device.max_qp_wr, f"max_qp_wr of {device.name}"),
        ("max_message", settings.max_message, most, f"MTU {port.active_mtu} of {device.name}, less headers"),
    ):
        if value is not None and not 1 <= value <= limit:
            raise ValueError(f"{name} is {value}: allowed are 1..{limit} ({why})")
