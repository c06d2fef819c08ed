"""Errors: their class tree, the table of their causes, and the findings about a host.

`mcast.errors` has the classes of `mcast.errors.tree`, and Cause and Phase; most are in `mcast` itself.
"""

from __future__ import annotations

from mcast.facade import lazy

TYPE_CHECKING = False  # as in `mcast`
if TYPE_CHECKING:
    from mcast.errors.cause import Cause as Cause
    from mcast.errors.cause import Phase as Phase
    from mcast.errors.tree import AddressNotAvailable as AddressNotAvailable
    from mcast.errors.tree import AlreadyJoined as AlreadyJoined
    from mcast.errors.tree import BackendError as BackendError
    from mcast.errors.tree import BackendUnavailable as BackendUnavailable
    from mcast.errors.tree import Broken as Broken
    from mcast.errors.tree import Closed as Closed
    from mcast.errors.tree import DeviceGone as DeviceGone
    from mcast.errors.tree import GuardError as GuardError
    from mcast.errors.tree import InvalidArgument as InvalidArgument
    from mcast.errors.tree import McastError as McastError
    from mcast.errors.tree import MembershipLost as MembershipLost
    from mcast.errors.tree import MessageTooLarge as MessageTooLarge
    from mcast.errors.tree import NotSupported as NotSupported
    from mcast.errors.tree import OutOfResources as OutOfResources
    from mcast.errors.tree import PermissionDenied as PermissionDenied
    from mcast.errors.tree import QpError as QpError
    from mcast.errors.tree import SecondMlid as SecondMlid
    from mcast.errors.tree import TimedOut as TimedOut
    from mcast.errors.tree import UnavailableReason as UnavailableReason
    from mcast.errors.tree import UnknownBackend as UnknownBackend
    from mcast.errors.tree import Unreachable as Unreachable
    from mcast.errors.tree import WcStatus as WcStatus

_NAMES = {
    "errors.cause": "Cause Phase",
    "errors.tree": "AddressNotAvailable AlreadyJoined BackendError BackendUnavailable Broken Closed "
    "DeviceGone GuardError InvalidArgument McastError MembershipLost MessageTooLarge "
    "NotSupported OutOfResources PermissionDenied QpError SecondMlid TimedOut "
    "UnavailableReason UnknownBackend Unreachable WcStatus",
}
if not TYPE_CHECKING:  # a type checker that saw this function would accept any name
    __getattr__, __dir__ = lazy(__name__, _NAMES)
