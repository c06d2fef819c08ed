"""The names of providers: one literal table, and the entry-point group `mcast.backends`.

A name leads to a `Provider` value, whose module is imported when the name is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from mcast.errors.tree import BackendUnavailable, UnavailableReason, UnknownBackend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from mcast.contract.backend import Backend
    from mcast.contract.provider import Provider, Status

BUILTIN = {
    "sim": "mcast.backends.sim:SIM",
    "sim-roce": "mcast.backends.sim:ROCE",
    "sim-ib": "mcast.backends.sim:INFINIBAND",
    "sim-shared": "mcast.backends.sim:SHARED_ROCE",
    "sim-shared-ib": "mcast.backends.sim:SHARED_INFINIBAND",
    "udp": "mcast.backends.udp:PROVIDER",
    "rdma": "mcast.backends.rdma:PROVIDER",
}
"""Name -> "module:value" of the provider. `sim` is the served fabric of MCAST_SIM, else `sim-roce`."""

SIMULATED = frozenset({"sim", "sim-roce", "sim-ib"})
"""The names of the simulators, which need no hardware and make as many ports as the caller asks for."""

GROUP = "mcast.backends"

_OVERRIDES: dict[str, list[Provider]] = {}
"""Name -> the providers that replace it during tests, the latest last."""


def backend_names() -> tuple[str, ...]:
    """Return every name that open_backend takes.

    The built-in ones, then those of installed packages in alphabetical order.
    """
    return (*BUILTIN, *sorted((_installed().keys() | _OVERRIDES) - BUILTIN.keys()))


def provider(name: str) -> Provider:
    """Return the provider with that name.

    Raises UnknownBackend, or BackendUnavailable (BROKEN) when the provider's module cannot be imported.
    """
    if name in _OVERRIDES:
        return _OVERRIDES[name][-1]._replace(name=name)
    if name in BUILTIN:
        return _load(name, partial(_built_in, name), "install mcast again")
    entry = _installed().get(name)
    if entry is None:
        raise UnknownBackend(
            name,
            UnavailableReason.UNKNOWN_NAME,
            f"there are {', '.join(backend_names())}",
            f"name one of these, or install the package with that entry point in {GROUP!r}",
        )
    fix = f"repair or remove the package that declares {entry.value!r} in {GROUP!r}"
    return _load(name, entry.load, fix)


def backend_status(name: str) -> Status:
    """Return the availability of a provider: if it cannot run here, why, and what to do.

    Raises only UnknownBackend."""
    try:
        return provider(name).status()
    except BackendUnavailable as error:
        from mcast.contract.provider import Status

        return Status(False, error.detail, error.reason, error.fix)


def open_backend(name: str, **options: object) -> Backend:
    """Open a provider by name; `options` are the provider's own.

    Raises UnknownBackend, or BackendUnavailable, which has the reason and what to do.
    """
    return provider(name).open(**options)


def open_at(name: str, bind: object, options: Mapping[str, object]) -> Backend:
    """Open a backend by name for an endpoint with that local address, None if it has not been chosen.

    Where several processes share the network, the address says which host the process is.
    """
    found = provider(name)
    where = {"bind": bind} if bind is not None and not options and found.shared() else {}
    return found.open(**options, **where)


@contextmanager
def override_provider(name: str, stand_in: Provider) -> Iterator[None]:
    """Inside the `with`, the name leads to `stand_in`, in every thread.

    A test uses this for an application that opens its backend by name. Overrides nest, and the name need not
    exist.
    """
    _OVERRIDES.setdefault(name, []).append(stand_in)
    try:
        yield
    finally:
        _OVERRIDES[name].pop()
        if not _OVERRIDES[name]:
            del _OVERRIDES[name]


def _installed() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # 20 ms to import, and a built-in name needs none

    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _built_in(name: str) -> object:
    module, _, value = BUILTIN[name].partition(":")
    return getattr(import_module(module), value)


def _load(name: str, load: Callable[[], object], fix: str) -> Provider:
    try:
        found = load()
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        raise BackendUnavailable(name, UnavailableReason.BROKEN, detail, fix) from error
    from mcast.contract.provider import Provider  # the command's help names backends, and loads none

    if not isinstance(found, Provider):
        detail = (
            f"the entry point leads to a value of type {type(found).__name__}, not to an mcast.api.Provider"
        )
        raise BackendUnavailable(name, UnavailableReason.BROKEN, detail, fix)
    return found._replace(name=name)
