"""Asks the Subnet Administrator and switches through libibumad, which is loaded when it is first needed.

Needs read and write access to /dev/infiniband/umad*, which only root has by default.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import ETIMEDOUT
from functools import cache
from time import monotonic
from typing import Any, NamedTuple

from mcast.wire import mad
from mcast.wire.addresses import Gid
from mcast.wire.mcmember import RECORD_SIZE, McMask, McMemberRecord, SaMethod, SaStatus

LIBRARY = "libibumad.so.3"
ANSWER_SECONDS = 0.25
"""Maximum number of seconds that get_event waits for the SA, which has just answered the join."""

_TID = slice(12, 16)
"""The half of the transaction id that a program may choose.

The kernel puts its agent's number into the other half.
"""


class SaUnreachable(Exception):
    """The SA did not answer in time, or cannot be asked from here."""


class SaTimeout(SaUnreachable):
    """The question was sent, and nothing came back in time."""


class _Port(ctypes.Structure):
    """umad_port_t of umad.h."""

    _fields_ = (
        ("ca_name", ctypes.c_char * 20),
        ("portnum", ctypes.c_int),
        ("base_lid", ctypes.c_uint),
        ("lmc", ctypes.c_uint),
        ("sm_lid", ctypes.c_uint),
        ("sm_sl", ctypes.c_uint),
        ("state", ctypes.c_uint),
        ("phys_state", ctypes.c_uint),
        ("rate", ctypes.c_uint),
        ("capmask", ctypes.c_uint32),
        ("gid_prefix", ctypes.c_uint64),
        ("port_guid", ctypes.c_uint64),
        ("pkeys_size", ctypes.c_uint),
        ("pkeys", ctypes.POINTER(ctypes.c_uint16)),
        ("link_layer", ctypes.c_char * 20),
    )


class PortAttributes(NamedTuple):
    """The port that asks: its GID, P_Keys, rate in Gbit/s, and where the SM is."""

    gid: Gid
    pkeys: tuple[int, ...]
    rate: int
    sm_lid: int
    sm_sl: int


@cache
def _library() -> Any:
    try:
        library = ctypes.CDLL(LIBRARY, use_errno=True)
    except OSError as error:
        raise SaUnreachable(f"{error}: apt-get install libibumad3") from None
    library.umad_size.restype = ctypes.c_size_t
    _check(library.umad_init(), "umad_init")
    return library


def _check(result: int, call: str) -> int:
    if result < 0:
        raise SaUnreachable(f"{call}: {os.strerror(-result)}")
    return result


class SubnetAdministrator:
    """The SA and the switches, as one port reaches them. Each question waits at most `timeout` seconds.

    Question and answer are datagrams, and an SM that starts hears none: the kernel asks again each second.
    """

    def __init__(self, library: Any, port: int, agent: int, at: PortAttributes, timeout: float) -> None:
        self._library, self._port, self._agent = library, port, agent
        self.port: PortAttributes = at
        self._smi_agent: int | None = None
        self._timeout = timeout
        self._tids = itertools.count(int(monotonic() * 1000) & 0xFFFFFF)

    def group(self, mgid: Gid) -> McMemberRecord | None:
        """The group's record; None if there is none in a partition of this port. Raises Silent."""
        wanted = McMemberRecord(mgid=mgid).pack()
        status, data = self._ask(mad.MC_MEMBER_RECORD, int(McMask.MGID), wanted)
        return McMemberRecord.unpack(data[:RECORD_SIZE]) if status == SaStatus.OK else None

    def member(self, mgid: Gid, port: Gid, sm_key: int) -> McMemberRecord | None:
        """The record of that port in the group; None if the port is no member. Raises Silent.

        The SA names members to holders of its SM_Key, and does not answer a wrong one (SA-REQUEST-5).
        """
        mask, wanted = int(McMask.MGID | McMask.PORT_GID), McMemberRecord(mgid=mgid, port_gid=port).pack()
        status, data = self._ask(mad.MC_MEMBER_RECORD, mask, wanted, sm_key)
        return McMemberRecord.unpack(data[:RECORD_SIZE]) if status == SaStatus.OK else None

    def switch_forwards(self, switch: int, port: int, mlid: int) -> bool:
        """Return True if the multicast table of the switch with that LID forwards the group to a port.

        Raises SaUnreachable.
        """
        answer = self._manage(switch, mad.get_mft_block(next(self._tids), port, mlid))
        return mad.mft_block_forwards(answer[mad.SMP_DATA_AT :], port, mlid)

    def set_pkeys(self, lid: int, pkeys: Sequence[int]) -> None:
        """Write the P_Key table of an HCA's port, as an SM does. Raises Silent."""
        answer = self._manage(lid, mad.set_pkeys(next(self._tids), pkeys))
        if status := int.from_bytes(answer[4:6]):
            raise SaUnreachable(f"the port with LID {lid} refuses the P_Keys, status {status:#06x}")

    def _manage(self, lid: int, request: bytes) -> bytes:
        """The answer of the subnet management agent at that LID."""
        if self._smi_agent is None:
            registered = self._library.umad_register(
                self._port, mad.SMP_CLASS, mad.SMP_CLASS_VERSION, 0, None
            )
            self._smi_agent = _check(registered, "umad_register")
        return self._exchange(self._smi_agent, request, (lid, 0, 0, 0))

    def capability_mask2(self) -> int | None:
        """ClassPortInfo:CapabilityMask2, 27 bits; None if the SA does not tell. Raises Silent."""
        status, data = self._ask(mad.CLASS_PORT_INFO, 0, b"")
        return mad.capability_mask2(data) if status == SaStatus.OK else None

    def _ask(self, attribute: int, mask: int, data: bytes, sm_key: int = 0) -> tuple[int, bytes]:
        """Status and data of the answer to a Get."""
        request = mad.sa_mad(SaMethod.GET, next(self._tids), attribute, mask, data, sm_key=sm_key)
        to = (self.port.sm_lid, mad.GSI_QP, self.port.sm_sl, mad.GSI_QKEY)
        answer = self._exchange(self._agent, request, to)
        return int.from_bytes(answer[4:6]), answer[mad.DATA_AT :]

    def _exchange(self, agent: int, request: bytes, to: tuple[int, int, int, int]) -> bytes:
        """The answer of a LID, QP, SL and Q_Key to a MAD."""
        header, milliseconds = self._library.umad_size(), max(1, int(self._timeout * 1000))
        out = ctypes.create_string_buffer(header + mad.MAD_BYTES)
        ctypes.memmove(ctypes.byref(out, header), request, len(request))
        self._library.umad_set_addr(out, *to)
        tries = max(1, int(self._timeout))
        waits = (milliseconds // tries, tries - 1)
        _check(self._library.umad_send(self._port, agent, out, mad.MAD_BYTES, *waits), "umad_send")
        deadline = monotonic() + self._timeout
        while monotonic() <= deadline:
            back = ctypes.create_string_buffer(header + mad.MAD_BYTES)
            length = ctypes.c_int(mad.MAD_BYTES)
            came = self._library.umad_recv(self._port, back, ctypes.byref(length), milliseconds)
            if came == -ETIMEDOUT:  # before the kernel, which waits as long, has given the request back
                break
            _check(came, "umad_recv")
            answer = back.raw[header:]
            if answer[_TID] == request[_TID]:
                if status := self._library.umad_status(back):
                    raise SaTimeout(f"the SA: {os.strerror(status)}")
                return answer
        raise SaTimeout("the SA did not answer")


@contextmanager
def subnet_administrator(device: str | None, port: int, timeout: float) -> Iterator[SubnetAdministrator]:
    """The SA of that port; None and 0 are the first InfiniBand port that is up. Raises Silent."""
    library = _library()
    name = None if device is None else device.encode()
    attributes = _Port()
    _check(library.umad_get_port(name, port, ctypes.byref(attributes)), "umad_get_port")
    try:
        at = _read(attributes)
    finally:
        library.umad_release_port(ctypes.byref(attributes))
    handle = _check(library.umad_open_port(name, port), "umad_open_port")
    try:
        registered = library.umad_register(handle, mad.SA_CLASS, mad.SA_CLASS_VERSION, 0, None)
        agent = _check(registered, "umad_register")
        yield SubnetAdministrator(library, handle, agent, at, timeout)
    finally:
        library.umad_close_port(handle)


def _read(port: _Port) -> PortAttributes:
    pkeys = tuple(port.pkeys[index] for index in range(port.pkeys_size)) if port.pkeys else ()
    gid = Gid(bytes(ctypes.c_uint64(port.gid_prefix)) + bytes(ctypes.c_uint64(port.port_guid)))
    return PortAttributes(gid, tuple(filter(None, pkeys)), port.rate, port.sm_lid, port.sm_sl)
