"""GIDs, multicast GIDs and multicast addresses: the values that name ports and groups."""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any, NoReturn, Self

from mcast.arguments.checks import check_int

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

AF_UNSPEC, AF_UNIX, AF_INET, AF_INET6, AF_IB = 0, 1, 2, 10, 27
"""Linux address families as they stand in a sockaddr; AF_IB carries a raw GID."""

LOCAL_CONTROL = ip_network("224.0.0.0/24")
"""Groups for traffic between the routers and hosts of one link (RFC 5771, 4).

Switches send messages of these groups to every port, and list them nowhere (RFC 4541, 2.1.2).
"""

IPV4_MAPPED = b"\0" * 10 + b"\xff\xff"
"""The first 12 bytes of a RoCEv2 GID that is made from an IPv4 address (K-EVENT-1)."""


GID_BYTES = 16

# Tuples, because a union is made anew each time, which takes longer than asking it.
_BYTES = (bytes, bytearray, memoryview)
_IP = (IPv4Address, IPv6Address)


class Gid(bytes):
    """A 128-bit global identifier: 16 bytes in network order, written as an IPv6 address.

    Made from 16 bytes, IPv6 text, or an address object (IPv4 becomes `::ffff:a.b.c.d`, as on RoCEv2). Raises
    ValueError for anything else.
    """

    __slots__ = ()

    def __new__(cls, value: bytes | str | IPv4Address | IPv6Address) -> Self:
        """Return the GID for 16 bytes, an IPv6 address, or an IPv4 address (mapped, RFC 4291)."""
        if isinstance(value, _BYTES):
            raw = bytes(value)
            if len(raw) != GID_BYTES:
                raise ValueError(f"a GID has 16 bytes, {raw.hex()!r} has {len(raw)}")
        elif isinstance(value, IPv4Address):
            raw = IPV4_MAPPED + value.packed
        elif isinstance(value, IPv6Address | str):
            try:
                address = IPv6Address(value) if isinstance(value, str) else value
            except AddressValueError as error:
                raise ValueError(f"{value!r} is not a GID: write it as an IPv6 address ({error})") from None
            if address.scope_id:
                raise ValueError(f"{value} names an interface: a GID does not, leave out what follows '%'")
            raw = address.packed
        else:
            raise ValueError(f"a GID is 16 bytes, IPv6 text or an address, not {type(value).__name__}")
        return super().__new__(cls, raw)

    @property
    def ipv4(self) -> IPv4Address | None:
        """The IPv4 address in `::ffff:a.b.c.d`; None for any other GID."""
        return IPv4Address(self[12:]) if self[:12] == IPV4_MAPPED else None

    @property
    def is_multicast(self) -> bool:
        """True for ff00::/8 and for `::ffff:<IPv4 multicast>`, the GIDs that attach accepts (SA-ATTACH-1)."""
        return self[0] == 0xFF or (self[:12] == IPV4_MAPPED and self[12] >> 4 == 0xE)

    def __str__(self) -> str:
        mapped = self.ipv4
        return str(IPv6Address(bytes(self))) if mapped is None else f"::ffff:{mapped}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        def build(value: object) -> Gid:
            if isinstance(value, cls):
                return value
            if isinstance(value, bytes | str | IPv4Address | IPv6Address):
                return cls(value)
            raise ValueError(f"a GID is 16 bytes or IPv6 text, not {type(value).__name__}")

        return core_schema.no_info_plain_validator_function(
            build, serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json")
        )


ZERO_GID = Gid(bytes(16))
"""Stands for no GID. As the group of an SA request it asks the SA to assign an MGID."""


class Mgid(Gid):
    """A multicast GID. Raises ValueError unless `is_multicast` holds (DT-6)."""

    __slots__ = ()

    def __new__(cls, value: bytes | str | IPv4Address | IPv6Address) -> Self:
        """Return the multicast GID for the same forms as `Gid` takes. Raises ValueError for another GID."""
        gid = super().__new__(cls, value)
        if not gid.is_multicast:
            raise ValueError(
                f"{gid} is not a multicast GID: an MGID begins with ff, or is ::ffff: and an IPv4 group"
            )
        return gid


LocalAddress = IPv4Address | IPv6Address
"""The address that a port is bound by."""


def needs_interface(address: LocalAddress) -> bool:
    """Return True if the address names a port only together with its interface: fe80::/10 is on every link.

    The IPv4 link-local addresses of 169.254.0.0/16 are bound to like any other (RFC 3927).
    """
    return isinstance(address, IPv6Address) and address.is_link_local


GroupName = IPv4Address | IPv6Address | Mgid


class McastAddress:
    """The address of a group to join, with a port number.

    An IPv4 or IPv6 group, or a raw MGID (sent as AF_IB).

    Text is accepted: `McastAddress(address="239.1.1.1", port=5000)`, `McastAddress.of("[ff0e::1]:5000")`. The
    port number changes nothing on the wire, but leave compares it with that of the join (K-JOIN-10). A
    unicast or zero address raises ValueError, the same on every provider (guard G-GROUP).

    An address is a frozen value, small enough to have a hundred thousand of them. A field of a pydantic model
    may be one, which is written as text.
    """

    __slots__ = ("_hash", "address", "key", "port")

    address: GroupName
    port: int
    key: object
    """Equal for addresses of one group, whatever their ports; hashed faster than an `ipaddress` object."""
    _hash: int

    def __init__(self, *, address: GroupName | str, port: int = 0) -> None:
        self._fill(_group(address), _port(port))

    @classmethod
    def model_construct(cls, address: Any = None, port: int = 0) -> McastAddress:
        """Make an address without checking it; the backend then refuses it as the real stack does.

        `address=None` stands for AF_UNSPEC, and an int for a sockaddr of that family without an address.
        """
        made = object.__new__(cls)
        made._fill(address, port)
        return made

    def _fill(self, address: GroupName, port: int) -> None:
        # As numbers no IPv4 group equals an IPv6 group; a tuple keeps other values apart from both.
        key = int(address) if isinstance(address, _IP) else (address,)
        fill = object.__setattr__
        fill(self, "address", address)
        fill(self, "port", port)
        fill(self, "key", key)
        fill(self, "_hash", hash((key, port)))

    @staticmethod
    def of(value: McastAddress | GroupName | str, port: int | None = None) -> McastAddress:
        """Make an address from a value: an address, `"a.b.c.d:port"`, `"[v6]:port"`, or an Mgid.

        Raises ValueError, which names the value and what is allowed.
        """
        if port is not None:
            port = _port(port)  # before the cache, to which True is 1
        if isinstance(value, str):
            return _parsed(value, port)
        if isinstance(value, McastAddress):
            return value if port is None else McastAddress(address=value.address, port=port)
        return McastAddress(address=value, port=port or 0)

    @property
    def family(self) -> int:
        """AF_INET, AF_INET6 or AF_IB; for an address made without a check AF_UNSPEC, or the bare family."""
        address: object = self.address
        if type(address) is IPv4Address:
            return AF_INET
        if isinstance(address, int):
            return address
        return next((family for kind, family in _FAMILIES if isinstance(address, kind)), AF_UNSPEC)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, McastAddress):
            return NotImplemented
        return self.key == other.key and self.port == other.port

    def __hash__(self) -> int:
        return self._hash

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a McastAddress is frozen: make another one instead of setting {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a McastAddress is frozen: {name!r} stays")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).model_construct, (self.address, self.port)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(address={self.address!r}, port={self.port!r})"

    def __str__(self) -> str:
        if not self.port:
            return str(self.address)
        return f"{self.address}:{self.port}" if self.family == AF_INET else f"[{self.address}]:{self.port}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            cls.of, serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json")
        )


_FAMILIES = ((IPv4Address, AF_INET), (IPv6Address, AF_INET6), (Gid, AF_IB))


def _port(given: object) -> int:
    try:
        return check_int(given, "port", 0, 0xFFFF, "it is one number, 0..65535")
    except TypeError as error:
        raise ValueError(str(error)) from None


def _group(value: object) -> GroupName:
    """Check that the value names a group, and return it as an address (guard G-GROUP)."""
    if isinstance(value, str):
        try:
            value = ip_address(value)
        except ValueError:
            raise ValueError(f"{value!r} is not an address: give IPv4 or IPv6 text, or an Mgid") from None
    if isinstance(value, Mgid):
        return value
    if not isinstance(value, _IP):
        raise ValueError(
            f"a group is IPv4 or IPv6 (text or ipaddress object) or an Mgid, not {type(value).__name__}"
        )
    if isinstance(value, IPv6Address) and value.scope_id is not None:
        raise ValueError(
            f"the address {value} names an interface: bind chooses it; leave out '%{value.scope_id}'"
        )
    if not value.is_multicast:
        kind = "the zero address" if value.is_unspecified else "a unicast address"
        raise ValueError(
            f"{value} is {kind}, not a multicast group: allowed are 224.0.0.0/4, ff00::/8, or an Mgid"
        )
    return value


@lru_cache(maxsize=4096)
def _parsed(text: str, port: int | None) -> McastAddress:
    """The address that a text names. The same text gives the same object."""
    if len(text) > _LONGEST:
        raise ValueError(f"{text[:_LONGEST]!r}... is not an address: it has {len(text)} characters")
    host, colon, own = _split_port(text)
    if not colon:
        return McastAddress(address=host, port=port or 0)
    if _PORT.fullmatch(own) is None or port is not None:
        raise ValueError(f"{text!r}: the port after ':' must be one number, 0..65535")
    return McastAddress(address=host, port=int(own))


_LONGEST = 100
"""More characters than any address with an interface and a port has."""
_PORT = re.compile("[0-9]{1,5}")


def _split_port(text: str) -> tuple[str, str, str]:
    """Split `a.b.c.d:port` or `[v6]:port` into host, colon and port.

    Without a port the last two are empty.
    """
    if not text.startswith("["):
        return text.partition(":") if text.count(":") == 1 else (text, "", "")
    host, bracket, rest = text[1:].partition("]")
    if not bracket or ":" not in host or (rest and not rest.startswith(":")):
        raise ValueError(f"{text!r} is not an address: in brackets it is [IPv6 group] or [IPv6 group]:port")
    return host, rest[:1], rest[1:]
