"""Which groups an endpoint is in, or is about to be in."""

from __future__ import annotations

import errno as E

from mcast.api import AlreadyJoined, Destination, DeviceInfo, McastError, Phase, mcast_error
from mcast.endpoint.membership import Change, EndpointGroup, GroupState
from mcast.wire.addresses import Gid, McastAddress


class Roster:
    """The groups of an endpoint by address, and by MGID once they are joined."""

    def __init__(self) -> None:
        self.groups: dict[McastAddress, EndpointGroup] = {}
        self.by_mgid: dict[Gid, EndpointGroup] = {}
        self.only_group: EndpointGroup | None = None
        """The group of every message, if there is just one."""
        self.members: int = 0
        """How many groups the endpoint receives from."""
        self.ended: bool = False
        """Whether a group is gone or the endpoint closed, which the calls that receive must raise."""

    def require_room(self, address: McastAddress, device: DeviceInfo) -> None:
        """Raise the error of a group that the device cannot join beside the others."""
        if len(self.groups) >= device.max_mcast_grp and address not in self.groups:
            detail = f"{device.name} allows {device.max_mcast_grp} groups (max_mcast_grp): leave one first"
            about = {"group": address, "device": device.name}
            raise mcast_error(E.ENOMEM, "join", Phase.JOIN, about, detail)

    def require_unknown(self, address: McastAddress) -> None:
        """Raise AlreadyJoined for a group whose membership is lost: the stack has forgotten it, but the next
        attempt to restore it, or its leave, would end the other one."""
        known = next((one for one in self.groups if one.address == address.address), None)
        if known is not None:
            raise AlreadyJoined("join", known)

    def enter(self, group: EndpointGroup) -> None:
        """Add a group that the endpoint has asked to join."""
        self.groups[group.address] = group
        self.members += not group.send_only

    def note_joined(self, group: EndpointGroup, destination: Destination) -> None:
        """Note that the group is joined: from now on messages of its MGID are its own."""
        group.destination = destination
        self.by_mgid[destination.gid] = group
        self._note_groups()
        group.counts.joins += 1

    def collision(self, group: EndpointGroup, destination: Destination) -> McastError | None:
        """Why the group cannot be joined beside the others: another address of the endpoint has the same
        MGID.

        The messages of the two could not be told apart, and leaving one would leave both.
        """
        known = self.by_mgid.get(destination.gid)
        if known is None or known is group:
            return None
        detail = f"{group.address} and {known.address} have the MGID {destination.gid}: join one of them"
        return mcast_error(E.EADDRINUSE, "join", Phase.JOIN, {"group": group.address}, detail)

    def leave(self, group: EndpointGroup) -> bool:
        """End the membership; return whether it was one of the endpoint's."""
        group.happens(Change.LEAVE)
        known = self.groups.get(group.address) is group
        if known:
            del self.groups[group.address]
            self.members -= not group.send_only
        return known

    def look_for_ended(self) -> None:
        """A group that is gone may have been left: note whether there is another."""
        self.ended = any(one.state is GroupState.GONE for one in self.groups.values())

    def detach(self, group: EndpointGroup) -> None:
        """Note that messages of the group's MGID are its own no longer."""
        if group.destination is not None and self.by_mgid.get(group.destination.gid) is group:
            del self.by_mgid[group.destination.gid]
            self._note_groups()

    def end(self) -> None:
        """Leave every group, for the endpoint is closed."""
        self.ended = True
        for group in self.groups.values():
            group.happens(Change.LEAVE)

    def _note_groups(self) -> None:
        self.only_group = next(iter(self.by_mgid.values())) if len(self.by_mgid) == 1 else None
