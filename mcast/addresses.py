"""GIDs, multicast GIDs and multicast addresses: the values that name ports and groups."""

from __future__ import annotations

from ipaddress import AddressValueError, IPv4Address, IPv6Address, ip_address
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, field_validator
from pydantic_core import CoreSchema, core_schema

AF_UNSPEC, AF_UNIX, AF_INET, AF_INET6, AF_IB = 0, 1, 2, 10, 27
"""Linux address families as they stand in a sockaddr; AF_IB carries a raw GID."""

IPV4_MAPPED = b"\0" * 10 + b"\xff\xff"
"""The first 12 bytes of a RoCEv2 GID made from an IPv4 address (facts: kernel, join event)."""


class Gid(bytes):
    """A 128-bit global identifier: 16 bytes in network order, written as an IPv6 address.

    Takes 16 bytes, IPv6 text, or an address object (IPv4 becomes `::ffff:a.b.c.d`, as on RoCEv2).
    Raises ValueError for anything else.
    """

    __slots__ = ()

    def __new__(cls, value: bytes | str | IPv4Address | IPv6Address) -> Self:
        if isinstance(value, IPv4Address):
            raw = IPV4_MAPPED + value.packed
        elif isinstance(value, IPv6Address):
            raw = value.packed
        elif isinstance(value, str):
            try:
                raw = IPv6Address(value).packed
            except AddressValueError as error:
                raise ValueError(f"{value!r} is not a GID: write it as an IPv6 address ({error})") from None
        else:
            raw = bytes(value)
        if len(raw) != 16:
            raise ValueError(f"a GID has 16 bytes, {raw.hex()!r} has {len(raw)}")
        return super().__new__(cls, raw)

    @property
    def ipv4(self) -> IPv4Address | None:
        """The IPv4 address inside `::ffff:a.b.c.d`, else None."""
        return IPv4Address(self[12:]) if self[:12] == IPV4_MAPPED else None

    @property
    def is_multicast(self) -> bool:
        """True for ff00::/8 and for `::ffff:<IPv4 multicast>`: what attach accepts (facts: SA, attach)."""
        return self[0] == 0xFF or (self[:12] == IPV4_MAPPED and self[12] >> 4 == 0xE)

    def __str__(self) -> str:
        mapped = self.ipv4
        return str(IPv6Address(bytes(self))) if mapped is None else f"::ffff:{mapped}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def build(value: object) -> Gid:
            if isinstance(value, cls):
                return value
            if isinstance(value, bytes | str | IPv4Address | IPv6Address):
                return cls(value)
            raise ValueError(f"a GID is 16 bytes or IPv6 text, not {type(value).__name__}")

        return core_schema.no_info_plain_validator_function(
            build, serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json")
        )


class Mgid(Gid):
    """A multicast GID. Raises ValueError unless `is_multicast` holds (DT-6)."""

    __slots__ = ()

    def __new__(cls, value: bytes | str | IPv4Address | IPv6Address) -> Self:
        gid = super().__new__(cls, value)
        if not gid.is_multicast:
            raise ValueError(
                f"{gid} is not a multicast GID: an MGID begins with ff, or is ::ffff: and an IPv4 group"
            )
        return gid


GroupName = IPv4Address | IPv6Address | Mgid


class McastAddress(BaseModel):
    """The multicast address of a join: an IPv4 or IPv6 group, or a raw MGID (sent as AF_IB), with a port.

    The port chooses nothing on the wire, but it is part of what leave compares (facts: kernel, LV-5).
    Text is accepted: `McastAddress(address="239.1.1.1", port=5000)`, `McastAddress.of("[ff0e::1]:5000")`.
    A unicast or zero address is refused here, the same on every provider (guard G-GROUP).

    `model_construct` goes round the refusal, and the backend answers as the real stack does. There,
    `address=None` stands for AF_UNSPEC, and an int for a sockaddr of that bare family.
    """

    model_config = ConfigDict(frozen=True, strict=True, arbitrary_types_allowed=True)

    address: IPv4Address | IPv6Address | Mgid
    port: int = Field(default=0, ge=0, le=0xFFFF)

    @field_validator("address", mode="plain")
    @classmethod
    def _group(cls, value: object) -> GroupName:
        if isinstance(value, str):
            try:
                value = ip_address(value)
            except ValueError:
                raise ValueError(f"{value!r} is not an address: give IPv4 or IPv6 text, or an Mgid") from None
        if isinstance(value, Mgid):
            return value
        if not isinstance(value, IPv4Address | IPv6Address):
            raise ValueError(
                f"a group is IPv4 or IPv6 (text or ipaddress object) or an Mgid, not {type(value).__name__}"
            )
        if isinstance(value, IPv6Address) and value.scope_id is not None:
            raise ValueError(f"{value} names an interface: bind chooses it; leave out '%{value.scope_id}'")
        if not value.is_multicast:
            kind = "the zero address" if value.is_unspecified else "a unicast address"
            raise ValueError(
                f"{value} is {kind}, not a multicast group: allowed are 224.0.0.0/4, ff00::/8, or an Mgid"
            )
        return value

    @classmethod
    def of(cls, value: McastAddress | GroupName | str, port: int | None = None) -> McastAddress:
        """Make an address from what people write: an address, `"a.b.c.d:port"`, `"[v6]:port"`, an Mgid.

        Raises pydantic.ValidationError (a ValueError) that names the value and what is allowed.
        """
        if isinstance(value, McastAddress):
            return value if port is None else cls(address=value.address, port=port)
        address: Any = value
        if isinstance(value, str):
            address, text = _split_port(value)
            if text:
                if not text.isdecimal() or port is not None:
                    raise ValueError(f"{value!r}: the port after ':' must be one number, 0..65535")
                port = int(text)
        return cls(address=address, port=port or 0)

    @property
    def family(self) -> int:
        """AF_INET, AF_INET6 or AF_IB; for raw values AF_UNSPEC or the bare family."""
        address: object = self.address
        if isinstance(address, int):
            return address
        return next((family for kind, family in _FAMILIES if isinstance(address, kind)), AF_UNSPEC)

    def __str__(self) -> str:
        if not self.port:
            return str(self.address)
        return f"{self.address}:{self.port}" if self.family == AF_INET else f"[{self.address}]:{self.port}"


_FAMILIES = ((IPv4Address, AF_INET), (IPv6Address, AF_INET6), (Gid, AF_IB))


def _split_port(text: str) -> tuple[str, str]:
    """`a.b.c.d:port` or `[v6]:port` in its two parts; without a port the second is empty."""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        return host, port.removeprefix(":")
    host, _, port = text.partition(":") if text.count(":") == 1 else (text, "", "")
    return host, port
