"""The errors of the contract.

Every error is a `McastError`, which is an OSError; programs catch its families.

```
McastError(OSError)          errno, call, arguments, phase, causes
├── InvalidArgument          EINVAL: a call that the stack refuses          (also ValueError)
├── NotSupported             EOPNOTSUPP, ENOSYS, 524: not on this device or link layer
├── TimedOut                 ETIMEDOUT: the SA or a peer did not answer     (also TimeoutError)
├── PermissionDenied         EPERM, EACCES: device files, locked memory     (also PermissionError)
├── OutOfResources           ENOMEM, ENOBUFS: a limit of device or host
├── AddressNotAvailable      EADDRNOTAVAIL: not local, or not joined
├── Unreachable              ENETUNREACH, EHOSTUNREACH: no route
├── MembershipLost           ENETRESET: the fabric forgot the membership    (also ConnectionResetError)
├── DeviceGone               ENODEV, ENXIO: no device, or not any more
├── QpError                  EIO: the queue pair went into ERR; `status` says why
├── Closed                   EBADF: used after close or destroy             (also ValueError)
├── Broken                   ENOTRECOVERABLE: a call was interrupted in the middle of a change
└── GuardError               refused before the stack could do harm         (also ValueError)
    ├── MessageTooLarge      EMSGSIZE: larger than one MTU; `limit`, `size`
    ├── AlreadyJoined        EADDRINUSE: this id has already joined this group
    └── SecondMlid           EEXIST: the queue pair is attached to the MGID with another MLID
BackendError                 no such backend, or one that cannot run here; `reason`, `fix`
├── UnknownBackend           (also LookupError)
└── BackendUnavailable
```
"""

from __future__ import annotations

import errno as E
import os
from collections.abc import Mapping
from enum import Enum, IntEnum
from types import MappingProxyType

from mcast.arguments.checks import short_repr
from mcast.errors.cause import ENOTSUPP, Cause, Phase
from mcast.errors.causes import errno_name, likely_causes
from mcast.wire.kinds import LinkLayer


class WcStatus(IntEnum):
    """The status of a work completion, with the numbers of ibv_wc_status.

    A number without a name becomes UNKNOWN.
    """

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21
    UNKNOWN = -1

    @classmethod
    def _missing_(cls, value: object) -> WcStatus:
        return cls.UNKNOWN


def errno_text(errno: int) -> str:
    """The text of strerror; for 524, which has none, the kernel's meaning."""
    return "Not supported (kernel-internal errno 524)" if errno == ENOTSUPP else os.strerror(errno)


class McastError(OSError):
    """A call that failed: `errno`, `call`, `arguments`, `phase` (JEX-11, LV-5, AT-2).

    posted      after a send, how many of its messages were posted before it failed: do not send those again
    causes      what the error most likely means, the likeliest first, each with how to check it and the next
                step
    found       causes that were found by asking the fabric; if there are any, `causes` has these and no
                guesses
    suspected   causes that the provider adds to the likely ones
    link_layer  the link layer of the port; None where it is not known
    """

    found: tuple[Cause, ...] = ()
    suspected: tuple[Cause, ...] = ()
    link_layer: LinkLayer | None = None
    posted: int = 0

    def __init__(
        self,
        errno: int,
        call: str,
        phase: Phase,
        arguments: Mapping[str, object] | None = None,
        detail: str = "",
    ) -> None:
        super().__init__(errno, detail or errno_text(errno))
        self.call = call
        self.phase = phase
        self._arguments = dict(arguments or {})
        self.detail = detail

    @property
    def arguments(self) -> Mapping[str, object]:
        """The arguments of the call that failed, by name."""
        return MappingProxyType(self._arguments)

    def __reduce__(self) -> tuple[object, ...]:
        # All state is in the instance's dict, so no subclass needs a __reduce__ for its own constructor.
        state = {
            name: value if name == "_arguments" else _portable(value) for name, value in vars(self).items()
        }
        state["_arguments"] = {name: _portable(value) for name, value in self._arguments.items()}
        return _remade, (type(self), self.args), state

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes that were found; if none was, the likely ones, the likeliest first.

        From `mcast.errors.rows`.
        """
        return self.found or (*self._likely(""), *self.suspected)

    def _likely(self, status: str) -> tuple[Cause, ...]:
        call = str(self.arguments.get("event", self.call))
        return likely_causes(self.phase, self.errno or 0, call, self.link_layer, status)

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        number = self.errno or 0
        lines = [f"{self.call}({given}): {errno_name(number)}: {self.detail or errno_text(number)}"]
        sure = "found" if self.found else "likely"
        return "\n".join([*lines, *(cause.shown(sure) for cause in self.causes)])


def _portable(value: object) -> object:
    """Return the value, or its text if it cannot be pickled: its failure would hide the error itself."""
    import pickle  # takes a while

    try:
        pickle.dumps(value)
    except Exception:  # a socket, a lock, or an object of a program
        return short_repr(value)
    return value


def _remade(cls: type[McastError], args: tuple[object, ...]) -> McastError:
    """Return an error without the state that its constructor computes; unpickling and copying set it."""
    error = cls.__new__(cls)
    OSError.__init__(error, *args)
    return error


class InvalidArgument(McastError, ValueError):
    """EINVAL: the stack refuses the call as it is."""


class NotSupported(McastError):
    """EOPNOTSUPP, ENOSYS or 524: this device or link layer cannot do what the call asks for."""


class TimedOut(McastError, TimeoutError):
    """ETIMEDOUT: no answer in time. After a send, `posted` says how many of its messages were posted."""


class PermissionDenied(McastError, PermissionError):
    """EPERM or EACCES: the process may not open the device files, or may not lock so much memory."""


class OutOfResources(McastError):
    """ENOMEM or ENOBUFS: a limit of the device or the host is reached (DT-7)."""


class AddressNotAvailable(McastError):
    """EADDRNOTAVAIL: the address is not local, or the id has not joined it (LV-5)."""


class Unreachable(McastError):
    """ENETUNREACH or EHOSTUNREACH: no route to the group (JEX-13)."""


class MembershipLost(McastError, ConnectionResetError):
    """ENETRESET: the port or the SM was restarted, and the membership is gone (SA-RESET-1)."""


class DeviceGone(McastError):
    """ENODEV or ENXIO: there is no device, or it was removed."""


class QpError(McastError):
    """EIO: the queue pair went into ERR.

    `status` is that of the work completion; `reset()` brings the queue pair back.

    `unsent` counts messages that earlier calls had posted, and that the device did not send.
    """

    unsent: int = 0

    def __init__(
        self,
        status: WcStatus,
        call: str,
        phase: Phase,
        arguments: Mapping[str, object] | None = None,
        detail: str = "",
    ) -> None:
        super().__init__(E.EIO, call, phase, arguments, detail or f"the QP is in ERR: {status.name}")
        self.status = status

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes that most likely lead to this status."""
        return self._likely(self.status.name)


class Closed(McastError, ValueError):
    """EBADF: the object was closed or destroyed before the call."""

    def __init__(self, what: str, call: str, phase: Phase) -> None:
        super().__init__(E.EBADF, call, phase, None, f"the {what} is closed")
        self.what = what


class Broken(McastError, RuntimeError):
    """ENOTRECOVERABLE: an exception interrupted an earlier call in the middle of a change.

    It was raised by a signal's handler or by another thread. `close` and `stats` still work.
    """

    def __init__(self, what: str, amid: str, fix: str, call: str, phase: Phase) -> None:
        """`what` is the object, `amid` the interrupted call, `fix` what to do now."""
        super().__init__(
            E.ENOTRECOVERABLE,
            call,
            phase,
            None,
            f"the {what} was interrupted in the middle of {amid}: {fix}",
        )
        self.what: str = what
        self.amid: str = amid


class GuardError(McastError, ValueError):
    """Refused by a guard of the contract, because the real stack would do harm without reporting it."""


class MessageTooLarge(GuardError):
    """EMSGSIZE (guard G-MTU): the stack would report success, and send nothing (K-DATA-6)."""

    def __init__(
        self, size: int, limit: int, index: int, group_mtu: int | None = None, source: str = ""
    ) -> None:
        """Make the error of a message that exceeds `limit`.

        `group_mtu` is the group's MTU if that is the limit, None if the port's is; `source` says how it is
        known.
        """
        mtu = "one MTU" if group_mtu is None else f"the group's MTU of {group_mtu}"
        said = f" ({source})" if source else ""
        detail = f"message {index} has {size} bytes, {mtu} carries {limit}{said}"
        super().__init__(E.EMSGSIZE, "send", Phase.SEND, {"message": index}, detail)
        self.size: int = size
        self.limit: int = limit
        self.index: int = index
        self.group_mtu: int | None = group_mtu
        self.source: str = source


class AlreadyJoined(GuardError):
    """EADDRINUSE (guard G-JOIN): the first leave would detach the queue pair for both joins (K-EVENT-5)."""

    def __init__(self, call: str, address: object) -> None:
        super().__init__(
            E.EADDRINUSE,
            call,
            Phase.JOIN,
            {"addr": address},
            "this id has already joined this group: leave it first",
        )
        self.address = address


class SecondMlid(GuardError):
    """EEXIST (guard G-MLID): a queue pair is attached to the group under another MLID.

    The kernel would leak the attachment (K-ATTACH-7), or the HCA answer as it likes (SA-ATTACH-3).
    """

    def __init__(self, gid: object, lid: int, attached_lid: int) -> None:
        super().__init__(
            E.EEXIST,
            "attach_mcast",
            Phase.ATTACH,
            {"gid": gid, "lid": f"{lid:#x}"},
            f"the QP is attached to this MGID with MLID {attached_lid:#x}",
        )
        self.gid: object = gid
        self.lid: int = lid
        self.attached_lid: int = attached_lid


_FAMILY: dict[int, type[McastError]] = {
    E.EINVAL: InvalidArgument,
    E.EOPNOTSUPP: NotSupported,
    E.ENOSYS: NotSupported,
    ENOTSUPP: NotSupported,
    E.ETIMEDOUT: TimedOut,
    E.EPERM: PermissionDenied,
    E.EACCES: PermissionDenied,
    E.ENOMEM: OutOfResources,
    E.ENOBUFS: OutOfResources,
    E.EADDRNOTAVAIL: AddressNotAvailable,
    E.ENETUNREACH: Unreachable,
    E.EHOSTUNREACH: Unreachable,
    E.ENETRESET: MembershipLost,
    E.ENODEV: DeviceGone,
    E.ENXIO: DeviceGone,
}


def mcast_error(
    errno: int, call: str, phase: Phase, arguments: Mapping[str, object] | None = None, detail: str = ""
) -> McastError:
    """An error of the family that `errno` belongs to. Backends raise it."""
    return _FAMILY.get(errno, McastError)(errno, call, phase, arguments, detail)


class UnavailableReason(Enum):
    """Reason why a backend cannot run here. Each reason has another remedy."""

    UNKNOWN_NAME = "no backend of that name"
    NOT_BUILT = "extension not built"
    BROKEN = "installed but broken"
    NO_LIBRARY = "library missing"
    NO_DEVICE = "no device"
    OTHER_NAMESPACE = "in another network namespace"
    NO_DEVICE_FILE = "no device file"
    NO_PROVIDER = "no libibverbs provider"
    NO_PERMISSION = "no permission on the device files"
    MEMLOCK = "locked-memory limit too small"
    PORT_DOWN = "port down"
    NO_ADDRESS = "no address"
    PORT_IN_USE = "UDP port in use"


class BackendError(Exception):
    """A backend that cannot be opened; `name`, `reason`, `detail` (a sentence) and `fix` (one line)."""

    def __init__(self, name: str, reason: UnavailableReason, detail: str, fix: str) -> None:
        super().__init__(name, reason, detail, fix)
        self.name: str = name
        self.reason: UnavailableReason = reason
        self.detail: str = detail
        self.fix: str = fix

    def __str__(self) -> str:
        return f"backend {self.name!r}: {self.reason.value}: {self.detail}; {self.fix}"


class UnknownBackend(BackendError, LookupError):
    """There is no backend of that name."""


class BackendUnavailable(BackendError):
    """The backend exists, but cannot run here."""
