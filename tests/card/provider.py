"""The rdma provider on the card: its own code, loaded by its own path, over a device made of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from mcast.api import Capability, DeviceInfo
from mcast.backends.rdma import devices, native
from mcast.backends.rdma.backend import RdmaBackend

from .card import Card, addresses_of


class CardBackend(RdmaBackend):
    """RdmaBackend where the host has neither devices nor interfaces with their addresses."""

    name = "card"

    def __init__(self, card: Card) -> None:
        self._card = card
        self._set_up()
        self.capabilities = frozenset({Capability.CONNECTED_QP})

    def devices(self) -> tuple[DeviceInfo, ...]:
        return tuple(self._with_addresses(device) for device in super().devices())

    def _with_addresses(self, device: DeviceInfo) -> DeviceInfo:
        number = self._card.numbers[device.name]
        ports = tuple(
            port.model_copy(update={"addresses": addresses_of(self._card.port(number, port.port_num))})
            for port in device.ports
        )
        return device.model_copy(update={"ports": ports})


@contextmanager
def loaded(library: Path, sysfs: Path) -> Iterator[Card]:
    """Let the rdma provider load a new card in place of the real libraries; `sysfs` is an empty directory."""
    instead = dict.fromkeys(native.LIBRARIES, str(library))
    with (
        patch.dict(os.environ, instead),
        patch.object(devices, "SYSFS", sysfs),
        patch.object(devices, "kernel_devices", dict),  # the kernel knows nothing of the card
    ):
        card = Card(library, sysfs)
        card.reset()
        native._loaded = None
        try:
            native.load()
            yield card
        finally:
            native._loaded = None  # what is loaded next is what the environment names then
