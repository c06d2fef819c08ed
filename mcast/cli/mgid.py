"""`mcast mgid`: how an address becomes an MGID and a MAC address, and which others become the same."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Annotated, Any, NamedTuple

import typer

from mcast.arguments.amounts import parse_int
from mcast.cli.terminal import Json, json_output, print_wrapped, say
from mcast.wire import mapping
from mcast.wire.addresses import Gid, Mgid
from mcast.wire.kinds import RDMA_UDP_QKEY, PortSpace
from mcast.wire.mapping import Signature
from mcast.wire.mcmember import MLID_FIRST, MLID_LAST
from mcast.wire.packets import ROCE_UDP_PORT
from mcast.wire.partition import DEFAULT_PKEY, FULL_MEMBER, matching_pkeys

_MAC = re.compile(r"[0-9a-f]{2}([:-][0-9a-f]{2}){5}", re.IGNORECASE)
_MAC_FOLDS = "IPv4 groups differ in 28 bits, of which the MAC address has 23"

SCOPES = {
    1: "interface-local",
    2: "link-local",
    3: "realm-local",
    4: "admin-local",
    5: "site-local",
    8: "organization-local",
    14: "global",
}
"""RFC 4291, 2.7 and RFC 7346; an InfiniBand subnet is link-local (IBA vol 1, 4.1.1)."""

_FLAGS = {
    mapping.TRANSIENT: "T: transient",
    2: "P: from a unicast prefix",
    4: "R: has a rendezvous point",
}

_SIGNATURES = {
    Signature.IPOIB_IPV4: "IPv4, by IPoIB or PS_IPOIB",
    Signature.IPOIB_IPV6: "IPv6, by IPoIB or PS_IPOIB",
    Signature.RDMA_CM_IPV4: "IPv4, by rdma_cm's PS_UDP",
    Signature.RDMA_CM_IPV6: "IPv6, by rdma_cm's PS_UDP",
    Signature.SA_ASSIGNED: "an MGID that an SA assigned",
}

_IPV4_BLOCKS = {
    ip_network("224.0.0.0/24"): "local network control: routers keep it, switches flood it (RFC 5771)",
    ip_network("224.0.1.0/24"): "internetwork control (RFC 5771)",
    ip_network("232.0.0.0/8"): "source-specific multicast (RFC 4607)",
    ip_network("233.0.0.0/8"): "GLOP, made of an AS number (RFC 3180)",
    ip_network("239.255.0.0/16"): "administratively scoped, local (RFC 2365)",
    ip_network("239.192.0.0/14"): "administratively scoped, organization-local (RFC 2365)",
    ip_network("239.0.0.0/8"): "administratively scoped (RFC 2365)",
    ip_network("224.0.0.0/4"): "globally scoped (RFC 5771)",
}
"""The first block that contains the group says what the group is for."""


class Mac(bytes):
    """The MAC address of groups."""

    def __str__(self) -> str:
        return self.hex(":")


Given = IPv4Address | IPv6Address | Mgid | Mac


class Address(NamedTuple):
    """The address that was given; the class's name is what the help shows."""

    value: Given


Section = dict[str, Any]


class SharedName(NamedTuple):
    """Other groups with the same MGID or MAC address.

    where   link layer and kind of address
    others  number of other groups
    why     reason, in words
    groups  all or some of them
    """

    where: str
    others: int
    why: str
    groups: tuple[str, ...] = ()


def _given(text: str) -> Given:
    """An IPv4 or IPv6 group, an MGID whose signature says how it was made, or a MAC address of groups."""
    if _MAC.fullmatch(text):
        mac = Mac(bytes.fromhex(text.replace("-", ":").replace(":", "")))
        if mapping.is_group_mac(mac):
            return mac
        raise typer.BadParameter(
            f"{text} is not a multicast MAC address: those begin with 33:33, or with 01:00:5e and a byte "
            "below 80"
        )
    try:
        address = ip_address(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not an address: give an IPv4 or IPv6 group, an MGID, or a MAC address"
        ) from None
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            raise typer.BadParameter(f"{text} names an interface: leave out '%{address.scope_id}'")
        gid = Gid(address)
        fields = mapping.mgid_fields(gid)
        if gid.is_multicast and (fields is None or fields.signature or mapping.ipv4_group_of(gid)):
            return Mgid(bytes(gid))
    if not address.is_multicast:
        raise typer.BadParameter(
            f"{text} is a unicast address: groups are 224.0.0.0/4, ff00::/8 and ::ffff:<IPv4 group>"
        )
    return address


def _address(text: str) -> Address:
    return Address(_given(text))


def _pkey(text: str) -> int:
    """The number of a partition, with the membership bit that an IPoIB MGID has (RFC 4391, 4)."""
    number = parse_int(text, 16) or 0
    if not 0 < number <= 0xFFFF or number == FULL_MEMBER:
        raise typer.BadParameter(
            f"{text!r} is not a P_Key: give a hexadecimal number from 1 to ffff, except 8000, such as 0x8001"
        )
    return number | FULL_MEMBER


def _scope(text: str) -> int:
    for number, name in SCOPES.items():
        if text.lower() in (name, name.removesuffix("-local")):
            return number
    digit = parse_int(text, 16)
    if digit is None or digit > 15:
        names = ", ".join(SCOPES.values())
        raise typer.BadParameter(f"{text!r} is not a scope: give one hexadecimal digit, or one of {names}")
    return digit


def mgid(
    addresses: Annotated[
        list[Address],
        typer.Argument(parser=_address, metavar="ADDRESS", help="IPv4 or IPv6 groups, MGIDs, MACs."),
    ],
    pkey: Annotated[
        int, typer.Option(parser=_pkey, metavar="P_KEY", help="The partition on InfiniBand, in hex.")
    ] = "0xffff",  # type: ignore[assignment]  # text, read by the parser
    scope: Annotated[
        int, typer.Option(parser=_scope, metavar="SCOPE", help="The scope of the IPoIB broadcast group.")
    ] = "2",  # type: ignore[assignment]
    as_json: Json = False,
) -> None:
    """Show the addresses of a group on each link layer.

    Shows the MGID and the MAC address, and the other groups that have the same.
    """
    broadcast = mapping.ipoib_broadcast_mgid(pkey, scope)
    explained = [_explain(address.value, broadcast) for address in addresses]
    collisions = _collisions(explained)
    if as_json:
        json_output.result({"addresses": explained, "collisions": collisions})
        return
    for number, explanation in enumerate(explained):
        if number:
            say()
        _show(explanation, brief=len(explained) > 1)
    if len(addresses) > 1:
        _show_collisions(collisions)


def _explain(given: Given, broadcast: bytes) -> Section:
    if isinstance(given, Mac):
        return _of_mac(given)
    if isinstance(given, Mgid):
        return _of_mgid(given, broadcast)
    return _of_group(given, broadcast)


# --- what is said of a group -------------------------------------------------------------


def _of_group(group: IPv4Address | IPv6Address, broadcast: bytes) -> Section:
    ipv4 = isinstance(group, IPv4Address)
    return {
        "given": str(group),
        "kind": "IPv4 group" if ipv4 else "IPv6 group",
        "meaning": _meaning(group),
        "sections": [
            _infiniband("InfiniBand, rdma_cm (PS_UDP)", group, PortSpace.UDP, broadcast),
            _infiniband("InfiniBand, IPoIB and rdma_cm (PS_IPOIB)", group, PortSpace.IPOIB, broadcast),
            _rocev2(group),
            _rocev1(group),
        ],
        "shared": list(_shared(group)),
    }


def _infiniband(
    title: str, group: IPv4Address | IPv6Address, port_space: PortSpace, broadcast: bytes
) -> Section:
    made = mapping.infiniband_mgid(group, port_space, broadcast)
    qkey = RDMA_UDP_QKEY if port_space is PortSpace.UDP else None
    return {"title": title, "mgid": str(made), **_fields(made), "qkey": qkey, "mlid": None}


def _rocev2(group: IPv4Address | IPv6Address) -> Section:
    if isinstance(group, IPv6Address):
        return {"title": "RoCEv2", "mgid": None, "refused": "IPv6 groups (errno 524): use an IPv4 group"}
    made = mapping.roce_mgid(group)
    return {
        "title": "RoCEv2",
        "mgid": str(made),
        "ip": str(group),
        "udp_port": ROCE_UDP_PORT,
        "mac": str(Mac(mapping.group_mac(made))),
        "pkey": DEFAULT_PKEY,
        "qkey": RDMA_UDP_QKEY,
        "mlid": 0,
    }


def _rocev1(group: IPv4Address | IPv6Address) -> Section:
    made = mapping.roce_v1_mgid(group)
    return {"title": "RoCEv1", "mgid": str(made), "mac": str(Mac(mapping.group_mac(made)))}


def _fields(made: Gid) -> Section:
    fields = mapping.mgid_fields(made)
    if fields is None:
        return {}
    found: Section = {"flags": fields.flags, "scope": fields.scope}
    if fields.signature:
        found["signature"] = fields.signature.value
    if fields.pkey is not None:
        found["pkey"] = fields.pkey
    return found


def _flags(flags: int) -> str:
    return "; ".join(text for bit, text in _FLAGS.items() if flags & bit) or "assigned for good"


def _meaning(group: IPv4Address | IPv6Address) -> str:
    if isinstance(group, IPv4Address):
        return next(text for block, text in _IPV4_BLOCKS.items() if group in block)
    flags, scope = group.packed[1] >> 4, group.packed[1] & 15
    return f"{SCOPES.get(scope, f'scope {scope:x}')}, {_flags(flags)}"


# --- who else has the same name ----------------------------------------------------------


def _shared(group: IPv4Address | IPv6Address) -> Iterator[SharedName]:
    if isinstance(group, IPv4Address):
        yield SharedName("InfiniBand MGID", 0, "the MGID has all 28 bits in which IPv4 groups differ")
        others = mapping.ipv4_groups_of(mapping.group_mac(Gid(group)))
        yield SharedName(
            "RoCEv2 MAC",
            len(others) - 1,
            _MAC_FOLDS,
            tuple(str(other) for other in others if other != group),
        )
        yield SharedName("RoCEv1 MAC", 0, "the MAC address has the whole IPv4 address")
    elif mapping.is_sa_assigned(group):
        yield SharedName("InfiniBand MGID", 0, "the address is used unchanged")
        yield _IPV6_MAC
    else:
        yield SharedName(
            "InfiniBand MGID",
            mapping.IPV6_GROUPS_OF_MGID - 1,
            "the MGID has the last 80 bits of the address, without its flags and scope",
            tuple(str(other) for other in mapping.ipv6_groups_like(group) if other != group),
        )
        yield _IPV6_MAC


_IPV6_MAC = SharedName(
    "RoCEv1 MAC", mapping.IPV6_GROUPS_OF_MAC - 1, "IPv6 groups differ in 120 bits, of which the MAC has 32"
)


# --- and back ----------------------------------------------------------------------------


def _of_mgid(given: Mgid, broadcast: bytes) -> Section:
    fields, ipv4 = mapping.mgid_fields(given), mapping.ipv4_group_of(given)
    if fields is None or fields.signature is None:
        assert ipv4 is not None
        version = "RoCEv2" if fields is None else "RoCEv1"
        return _of_group(ipv4, broadcast) | {
            "given": str(given),
            "kind": f"MGID of {version} for the IPv4 group {ipv4}",
        }
    section = {"title": "InfiniBand", "mgid": str(given), **_fields(given), "stands_for": _stands_for(given)}
    mapped = mapping.infiniband_mgid(IPv6Address(bytes(given)), PortSpace.UDP, broadcast)
    if mapped != given:
        section["as_ipv6_group"] = str(mapped)
    return {
        "given": str(given),
        "kind": "MGID of InfiniBand",
        "meaning": _SIGNATURES[fields.signature],
        "sections": [
            section,
            {"title": "RoCE", "mgid": None, "refused": "raw MGIDs (errno 524): use an IPv4 group"},
        ],
        "shared": [],
    }


def _stands_for(given: Mgid) -> str:
    ipv4 = mapping.ipv4_group_of(given)
    fields = mapping.mgid_fields(given)
    assert fields is not None
    if ipv4 is not None:
        return f"the IPv4 group {ipv4}"
    if mapping.is_ipoib_broadcast(given):
        return "255.255.255.255: the broadcast group of IPoIB"
    if fields.signature is Signature.SA_ASSIGNED:
        return "the MGID itself, which the SA chose"
    if fields.signature in (Signature.IPOIB_IPV6, Signature.RDMA_CM_IPV6):
        return f"each of 2^40 IPv6 groups, such as {mapping.ipv6_group_of(given)}"
    return "no group: an IPv4 group leaves bytes 6 to 11 zero"


def _of_mac(given: Mac) -> Section:
    found, ipv4 = mapping.ipv4_groups_of(given), IPv4Address(given[2:])
    if found:
        kind, meaning = f"MAC address of {len(found)} IPv4 groups on RoCEv2", _MAC_FOLDS
    else:
        of_v1 = f" and of the IPv4 group {ipv4}" if ipv4.is_multicast else ""
        kind = f"MAC address of IPv6 groups{of_v1} on RoCEv1"
        meaning = "the MAC address has the last 32 bits of the MGID"
    section: Section = {"title": "RoCEv2" if found else "RoCEv1", "mac": str(given)}
    if found:
        section["stands_for"] = list(map(str, found))
    return {"given": str(given), "kind": kind, "meaning": meaning, "sections": [section], "shared": []}


def _collisions(explained: Iterable[Section]) -> list[Section]:
    """The MGIDs and MAC addresses that several of the given addresses have: `same`, `name`, `addresses`."""
    named: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for explanation in explained:
        for section in explanation["sections"]:
            for what in ("mgid", "mac"):
                name = section.get(what)
                if name:
                    key = (f"{section['title'].partition(',')[0]} {what.upper()}", name)
                    named[key][explanation["given"]] = None
    return [
        {"same": what, "name": name, "addresses": list(given)}
        for (what, name), given in named.items()
        if len(given) > 1
    ]


# --- as text -----------------------------------------------------------------------------


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else ", ".join(text)


_DEFAULT_PARTITION = " (the default partition)"
_ANY_MLID = f"0x{MLID_FIRST:04x} to 0x{MLID_LAST:04x}; the SA chooses one when the group is made"
_NO_MLID = "none, because RoCE has no SA; switches learn of members by IGMP"

_FIELDS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "mgid": ("MGID", lambda mgid: mgid or "none"),
    "refused": ("", lambda what: f"the kernel refuses {what}"),
    "ip": ("IP", str),
    "udp_port": ("UDP port", str),
    "mac": ("MAC", str),
    "flags": ("flags", lambda flags: f"{flags:x} ({_flags(flags)})"),
    "scope": ("scope", lambda scope: f"{scope:x} ({SCOPES.get(scope, 'reserved, or not assigned')})"),
    "signature": ("signature", lambda number: f"{number:04x} ({_SIGNATURES[Signature(number)]})"),
    "pkey": (
        "P_Key",
        lambda pkey: f"0x{pkey:04x}" + _DEFAULT_PARTITION * (pkey in matching_pkeys(DEFAULT_PKEY)),
    ),
    "qkey": ("Q_Key", lambda qkey: f"0x{qkey:08x}" if qkey else "that of the IPoIB broadcast group"),
    "mlid": ("MLID", lambda mlid: _NO_MLID if mlid == 0 else _ANY_MLID),
    "stands_for": ("stands for", _joined),
    "as_ipv6_group": ("but", lambda mgid: f"joined as an IPv6 group, not as an Mgid, it becomes {mgid}"),
}
"""Field -> its label, and its value as text."""


def _show(explanation: Section, brief: bool) -> None:
    """Print what is known of one address; `brief` leaves out the groups that were not asked about."""
    meaning = f", {explanation['meaning']}" if explanation["meaning"] else ""
    print_wrapped(f"{explanation['given']}  ", f"{explanation['kind']}{meaning}")
    for section in explanation["sections"]:
        say(f"\n{section['title']}")
        for key, value in section.items():
            if key != "title":
                label, text = _FIELDS[key]
                print_wrapped(f"  {label:12}", text(value))
    if explanation["shared"]:
        say("\nshared with")
    for shared in explanation["shared"]:
        print_wrapped(f"  {shared.where:17}", _who(shared._replace(groups=()) if brief else shared))


def _who(shared: SharedName) -> str:
    others, groups = shared.others, shared.groups
    if not others:
        return f"no other IPv4 group: {shared.why}"
    number = f"{others} other" if others < 1000 else f"about 2^{(others + 1).bit_length() - 1} other"
    examples = f" ({'' if others == len(groups) else 'such as '}{', '.join(groups)})" if groups else ""
    return f"{number} groups{examples}: {shared.why}"


def _show_collisions(collisions: list[Section]) -> None:
    say("\ncollisions of these" if collisions else "\ncollisions of these: none")
    for found in collisions:
        print_wrapped(f"  {found['same']:17}", f"{found['name']}: {', '.join(found['addresses'])}")
