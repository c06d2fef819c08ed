"""A provider as a value: whether it can run here, how it is opened and how it is tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from mcast.contract.backend import Backend
from mcast.contract.testbed import Testbed
from mcast.contract.values import UnusableDevice
from mcast.errors.finding import Finding
from mcast.errors.tree import UnavailableReason


class Status(NamedTuple):
    """Availability of a provider on this host.

    available  True if it can
    detail     what was found, a sentence
    reason     why the provider cannot run; None if it can
    fix        one command or step that repairs this; "" if there is nothing to repair
    unusable   the devices that are left out, also where the provider can run
    """

    available: bool
    detail: str
    reason: UnavailableReason | None = None
    fix: str = ""
    unusable: tuple[UnusableDevice, ...] = ()


class DeviceIdentity(NamedTuple):
    """Model of a device, as far as the host knows it. Nothing here identifies the host or the single device.

    driver          the kernel's driver, such as mlx5_core; "" if not known
    driver_version  version of a driver that does not come with the kernel; "" if it does
    firmware        version of the firmware; "" if there is none
    hardware        what identifies the model -> value, such as PCI vendor and device
    """

    driver: str = ""
    driver_version: str = ""
    firmware: str = ""
    hardware: Mapping[str, str] = {}


class Identity(NamedTuple):
    """Libraries and devices that a provider runs on.

    libraries  library that is loaded -> its version
    devices    name of a device -> what it is
    """

    libraries: Mapping[str, str] = {}
    devices: Mapping[str, DeviceIdentity] = {}


class Provider(NamedTuple):
    """A provider as the registry and the entry-point group `mcast.backends` know it.

    name     the name that `open_backend` takes
    summary  what the provider is, a few words
    status   returns whether the provider can run here; has no side effects
    open     opens the provider; its keyword arguments are the provider's own options; raises
             BackendUnavailable
    testbed  opens the provider with what the conformance suite needs (mcast.contract.testbed)
    checks   inspects this host without changing it, and returns a finding for each thing that the provider
             needs; its argument is how many seconds it may listen to the network, 0 for not at all
    shared   returns in words which network of other processes `open` without options joins; "" if the network
             is the provider's own, or the host's. Where there are words, `open` takes `bind`, the address
             that will be used
    identify  returns versions of libraries, drivers and firmware, for reports; asked while a backend is open
    """

    name: str
    summary: str
    status: Callable[[], Status]
    open: Callable[..., Backend]
    testbed: Callable[[], AbstractContextManager[Testbed]]
    checks: Callable[[float], Sequence[Finding]] = lambda listen: ()
    shared: Callable[[], str] = lambda: ""
    identify: Callable[[], Identity] = Identity
