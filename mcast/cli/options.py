"""Options that say where on the host a command takes part in a group.

And the endpoint that they select.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import Parameter, Signature, signature
from ipaddress import IPv4Address, IPv6Address, ip_address
from math import inf
from typing import TYPE_CHECKING, Annotated

import typer

from mcast import backend_names, backend_status, open_backend
from mcast.cli.terminal import BACKEND, UsageError, backend_name, group, say, sentence
from mcast.cli.terminal import Json as Json
from mcast.cli.values import microseconds, number_option, seconds
from mcast.errors.tree import BackendError
from mcast.wire.addresses import McastAddress

if TYPE_CHECKING:
    from mcast.api import Backend, CqModeration
    from mcast.endpoint.blocking import Endpoint
    from mcast.endpoint.ports import LocalPort
    from mcast.endpoint.settings import Settings


OBJECTS_DEPTH = 1024
"""Default receive queue of commands that send and receive objects.

Equal to `mcast.cast.io.driver.DEFAULT_RECEIVE_DEPTH`, which would take long to import.
"""

DEFAULT = "rdma"
"""The backend of all commands but the demonstration, where nobody names one."""

SOCKETS = "udp"
"""The backend that needs no card."""

BIND = "MCAST_BIND"
"""The variable with an address to take part from, where no option says so."""


def _address(text: str) -> IPv4Address | IPv6Address:
    try:
        return ip_address(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an IPv4 or IPv6 address: see --bind and {BIND}") from None


def _ports_of(context: typer.Context) -> list[tuple[str, Sequence[object]]]:
    """Return `device/port` and addresses of each port, for the shell's completion.

    Ports of the backend that the command line names.
    """
    try:
        with open_backend(choose_backend(context.params["backend"])) as backend:
            ports = [(device.name, port) for device in backend.devices() for port in device.ports]
    except (BackendError, OSError, UsageError):
        return []
    return [(f"{name}/{port.port_num}", port.addresses) for name, port in ports]


def _addresses(context: typer.Context) -> list[str]:
    return [str(address) for _, addresses in _ports_of(context) for address in addresses]


def _devices(context: typer.Context) -> list[str]:
    return [name for name, _ in _ports_of(context)]


GroupArgument = Annotated[
    McastAddress, typer.Argument(parser=group, metavar="GROUP", help="The group, such as 239.1.1.1.")
]
Bind = Annotated[
    IPv4Address | None,  # or IPv6: the parser decides
    typer.Option(
        "--bind",
        "-b",
        parser=_address,
        autocompletion=_addresses,
        metavar="ADDR",
        help=f"Local address to use.  [env var: {BIND}]",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEV", autocompletion=_devices, help="Device to use instead, such as mlx5_0 or rxe1/1."
    ),
]


def _named(backend: str | None) -> str | None:
    return None if backend is None else backend_name(backend)


BackendName = Annotated[
    str | None,
    typer.Option(
        callback=_named,
        autocompletion=backend_names,
        envvar=BACKEND,
        metavar="NAME",
        help="Backend to use.  [default: rdma, if a device can be used]",
    ),
]


def choose_backend(backend: str | None) -> str:
    """Return the backend to use: that of --backend or MCAST_BACKEND, else rdma if a device can be used."""
    if backend is not None:
        return backend
    status = backend_status(DEFAULT)
    if status.available:
        return DEFAULT
    sockets = backend_status(SOCKETS)
    there = f"--backend {SOCKETS} ({sockets.detail}) or " if sockets.available else ""
    raise UsageError(
        f"no --backend is given, and {DEFAULT} cannot be used here: {status.detail}. Repair that "
        f"(`mcast doctor --backend {DEFAULT}`), or take {there}--backend sim, a simulated fabric: `mcast "
        "demo` has all ends in one process, `mcast sim serve` lets programs share a fabric"
    )


def network_options() -> str:
    """Return the options for a backend on which other programs are: those that can be used, else DEFAULT."""
    usable = [name for name in (SOCKETS, DEFAULT) if backend_status(name).available] or [DEFAULT]
    return " or ".join(f"--backend {name}" for name in usable)


def is_in_process(backend: str) -> bool:
    """Return True if the backend is a fabric inside this process; if others share one, stderr says which."""
    from mcast.api import SIMULATED, provider

    words = provider(backend).shared()
    if words:
        say(f"{backend}: {words}", err=True)
    return backend in SIMULATED and not words


def refuse_in_process(backend: str | None, what: str) -> None:
    """Refuse a fabric inside this process, which no other program can join."""
    if backend is not None and is_in_process(backend):
        raise UsageError(
            f"{backend!r} is a fabric inside this process, on which no other program can {what}: "
            f"run `mcast sim serve` in another terminal and export what it prints, use {network_options()}, "
            "or try `mcast demo`, which has both ends in one process",
        )


def _moderation(text: str) -> CqModeration:
    from mcast.api import CqModeration

    numbers = re.fullmatch("([0-9]{1,9})/([0-9.a-z]{1,20})", text)
    try:
        period = microseconds(0, inf)(numbers[2]) if numbers else 0.5
    except typer.BadParameter as error:
        raise UsageError(f"--moderation {text}: {error}") from None
    if numbers is None or period % 1:
        raise UsageError(
            f"--moderation is {text!r}: write MESSAGES/MICROSECONDS, both whole, such as 32/50 or 32/50us"
        )
    try:
        return CqModeration(count=int(numbers[1]), period=int(period))
    except ValueError as error:
        raise UsageError(f"--moderation {text}: {sentence(error)}") from None


def settings_of(
    busy_poll: Annotated[
        float,
        typer.Option(
            parser=seconds(0, inf),
            metavar="SECONDS",
            help="Poll this long before sleeping, as 50us; inf: never sleep.",
        ),
    ] = 0.0,
    traffic_class: Annotated[
        int | None, number_option(min=0, max=255, metavar="0..255", help="Traffic class of sent messages.")
    ] = None,
    dscp: Annotated[
        int | None, number_option(min=0, max=63, metavar="0..63", help="DSCP, instead of a traffic class.")
    ] = None,
    service_level: Annotated[
        int | None, number_option(min=0, max=15, metavar="0..15", help="Service level; on RoCE a priority.")
    ] = None,
    comp_vector: Annotated[
        int | None,
        number_option(min=0, help="Completion vector (interrupt) of the device."),
    ] = None,
    moderation: Annotated[
        str | None,
        typer.Option(metavar="N/US", help="Wake for N messages, or US after the first of them, as 32/50us."),
    ] = None,
) -> Settings:
    """The settings of a command's endpoints, or of its queue pairs, from the command's options.

    `timestamps` is an option of `mcast record` alone, because the other commands show no time of a message;
    `receive_depth` is one of the commands that receive, each with a default of its own.
    """
    from mcast.endpoint.settings import Settings

    if dscp is not None and traffic_class is not None:
        raise UsageError("--dscp is a part of --traffic-class: give one of them")
    traffic_class = traffic_class if dscp is None else dscp << 2
    return Settings(
        busy_poll=busy_poll,
        traffic_class=traffic_class,
        service_level=service_level,
        comp_vector=comp_vector,
        moderation=None if moderation is None else _moderation(moderation),
    )


SETTINGS = signature(settings_of).parameters
"""The settings that are options of commands."""


def with_settings(depth: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command that takes `settings` have the options of `settings_of` in their place.

    `depth` is the default of --receive-depth; None: the command has no such option.
    """
    return partial(_with_settings, depth=depth)


ReceiveDepth = Annotated[
    int, number_option(min=1, help="Messages that the receive queue holds, ready to receive.")
]


def _with_settings(command: Callable[..., None], depth: int | None) -> Callable[..., None]:
    scope = {**globals(), **command.__globals__}
    shared = [*SETTINGS.values()]
    if depth is not None:
        kind = Parameter.KEYWORD_ONLY
        shared.append(Parameter("receive_depth", kind, default=depth, annotation="ReceiveDepth"))
    taken = signature(command).parameters.values()
    listed = [one for each in taken for one in (shared if each.name == "settings" else [each])]
    read = [one.replace(annotation=eval(one.annotation, scope)) for one in listed]

    def run(**given: object) -> None:
        if (
            "bind" in given
            and given["bind"] is None
            and not given["device"]
            and (address := os.environ.get(BIND))
        ):
            given["bind"] = _address(address)
        settings = settings_of(**{name: given.pop(name) for name in SETTINGS})  # type: ignore[arg-type]
        if depth is not None:
            settings = replace(settings, receive_depth=given.pop("receive_depth"))  # type: ignore[arg-type]
        command(**given, settings=settings)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__annotations__ = {one.name: one.annotation for one in read}
    vars(run)["__signature__"] = Signature(read)
    return run


def in_option_names(error: ValueError) -> str:
    """Return the endpoint's error with the command's option in place of the keyword argument."""
    said = str(error).replace("bind=ADDRESS", "--bind ADDRESS")
    name = said.partition(" ")[0]
    options = (*SETTINGS, "receive_depth")
    return said.replace(name, f"--{name.replace('_', '-')}", 1) if name in options else said


def require(settings: Settings, local_ports: Iterable[LocalPort]) -> None:
    """End the command with one sentence if one of the ports cannot serve the settings."""
    from mcast.endpoint.settings import check_device_limits

    for local_port in local_ports:
        try:
            check_device_limits(settings, local_port)
        except ValueError as error:
            raise UsageError(
                f"{local_port.device.name}/{local_port.port.port_num}: {in_option_names(error)}"
            ) from None


def local_ports_of(backend: Backend) -> list[LocalPort]:
    """Each port that has an address, with its first one."""
    from mcast.endpoint.ports import LocalPort

    ports = [(device, port) for device in backend.devices() for port in device.ports if port.addresses]
    return [LocalPort(device, port, port.addresses[0]) for device, port in ports]


def port_of(device: str | None) -> tuple[str | None, int]:
    """Split `DEV` or `DEV/PORT` into device and port number."""
    name, _, port = (device or "").partition("/")
    if port and not (re.fullmatch("[0-9]{1,3}", port) and 1 <= int(port) <= 255):
        raise UsageError(f"{device!r} is not a device: give DEV, or DEV/PORT with a port from 1 to 255")
    return name or None, int(port or 1)


def network_hint(endpoint: Endpoint, reasons: Iterable[str], size: int) -> str:
    """Return lines about the network that fit to why objects were missed; "" where no network is between.

    size  maximum number of bytes of a message
    """
    from mcast.cast.protocol.members import MemberStatus
    from mcast.cast.protocol.receiver import NO_SEGMENT, SENDER_SILENT

    reasons = [*reasons] if endpoint.backend.suspicions() else []
    lost = NO_SEGMENT, MemberStatus.STALLED.value, MemberStatus.OVER_BUDGET.value
    if any(sign in one for one in reasons for sign in lost):
        return (
            "\n  likely: a link on the way has a smaller MTU than the interfaces at its ends, or loses much\n"
            f"    check: mcast ping GROUP --answer at one end, mcast ping GROUP -S {size} at the other"
        )
    if not any(one.startswith((SENDER_SILENT, MemberStatus.SILENT.value)) for one in reasons):
        return ""
    return (
        "\n  if the other end still runs: a firewall, or a switch without a querier\n"
        f"    check: as root, at both ends: mcast doctor --backend {endpoint.backend.name} --listen 130"
    )


@contextmanager
def endpoint_at(
    backend: str | Backend | None,
    bind: IPv4Address | IPv6Address | None,
    device: str | None,
    settings: Settings,
    sequence: bool | None = False,
) -> Iterator[Endpoint]:
    """Open an endpoint where the options say, which does not receive its own messages.

    One sentence if there is no such port.
    """
    from mcast.endpoint.blocking import open_endpoint

    name, port = port_of(device)
    if bind and name:
        raise UsageError("--bind and --device both select a port: give one of them")
    wanted = replace(settings, loopback="off", sequence=sequence)
    backend = choose_backend(backend) if backend is None else backend
    try:
        endpoint = open_endpoint(backend, bind, device=name, port_num=port, **vars(wanted))
    except ValueError as error:
        raise UsageError(in_option_names(error)) from None
    with endpoint:
        yield endpoint
