"""Base classes of the contract's objects: those that can be closed, and those that belong to a port."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NoReturn, ParamSpec, Self, TypeVar

from mcast.contract.poison import Guard, ReentrantCall, Refused
from mcast.errors.cause import Phase
from mcast.errors.tree import Closed, McastError
from mcast.wire.kinds import LinkLayer

P = ParamSpec("P")
T = TypeVar("T")


class Handle:
    """An object that stands for something open in this process, and can be neither pickled nor copied."""

    __slots__ = ()
    _instead: ClassVar[str] = "pass its address or name, and open another one there"
    """Next step for a program that wanted to pickle or copy the object."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: it holds resources of this process; "
            f"{self._instead}"
        )


class _DefaultGuard:
    """Gives an object its guard when that is first used, unless the provider has set one."""

    def __get__(self, thing: Closeable | None, owner: type[Closeable]) -> Guard:
        if thing is None:
            return self  # type: ignore[return-value]
        guard: Guard = vars(thing).setdefault("_guard", Guard(owner.__name__))
        return guard


class Closeable(Handle, ABC):
    """An object that is closed once, at the latest at the end of a `with`.

    The provider's hooks that change something (`_create_id`, `_bind_addr`, `_attach_mcast` and their like)
    and `_close` run under `_guard`; those that may wait (`_get_event`, `_send`, `_recv`, `_flush`) take it
    themselves, and not while they wait. An exception in a hook counts as an interrupt in the middle of the
    change, and breaks what the guard is for, but for `Refused(error)`, and for McastError and `ReentrantCall`
    where `_strict` is False.
    """

    _closed = False
    _freed = False
    """True once a close has freed everything: until then it can be called again."""
    _strict = False
    """True if the provider's hooks refuse by `Refused` alone: a McastError is a signal's handler's, then."""
    _guard: Guard = _DefaultGuard()  # type: ignore[assignment]
    """Guard of the changes of the object: its own by default, as on a served fabric.

    A provider may share one between several objects.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """True after close or destroy; every other call then raises `Closed`."""
        return self._closed

    def _require_open(self, call: str, phase: Phase) -> None:
        """Raise `Closed` for `call` if the object is closed.

        The fastest calls look at `_closed` themselves before.
        """
        if self._closed:
            raise Closed(type(self).__name__, call, phase)

    def _change(self, call: str, phase: Phase, hook: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Carry out a change of the object, if it is open."""
        if_open: Callable[..., T] = self._if_open
        return self._guard.run(call, phase, if_open, call, phase, hook, *args, **kwargs)

    def _if_open(self, call: str, phase: Phase, hook: Callable[..., T], *args: object, **kwargs: object) -> T:
        if self._closed:
            raise Refused(Closed(type(self).__name__, call, phase))
        if self._strict:
            return hook(*args, **kwargs)
        try:
            return hook(*args, **kwargs)
        except (McastError, ReentrantCall) as error:
            raise Refused(error) from error.__cause__

    def close(self) -> None:
        """Close the object and all that was made from it; calls that wait there raise `Closed`. Idempotent.

        May be called from any thread, and from a signal's handler, a finalizer or an argument's `__float__`:
        in the middle of another call of the same thread, the object is closed when that call ends. A close
        that was interrupted goes on when it is called again.
        """
        self._guard.close(self._close_or_refuse)

    def _close_or_refuse(self) -> None:
        try:
            self._close()
        except McastError as error:
            if self._strict:
                raise
            raise Refused(error) from error.__cause__

    @abstractmethod
    def _close(self) -> None:
        """Close the object, under its guard; called again after it was interrupted, and after it is done."""


class OnPort(Closeable):
    """An object that belongs to a port of a device, from when it is bound to one."""

    @property
    def link_layer(self) -> LinkLayer | None:
        """The link layer of the object's port; None without a port, or where the provider does not say."""
        return None

    def _change(self, call: str, phase: Phase, hook: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Carry out a change; an error has the port's link layer, which narrows down its causes."""
        try:
            return super()._change(call, phase, hook, *args, **kwargs)
        except McastError as error:
            error.link_layer = self.link_layer
            raise
