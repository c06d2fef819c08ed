"""The connection manager and the queue pair without a simulated fabric, as another provider uses them."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv6Address
from itertools import count

from mcast.api import JOIN_MASK as MASK
from mcast.api import CmEventType, JoinFlag, LinkLayer, PortSpace, QpInit, QpState, WcStatus
from mcast.backends.model.cm import CmaId, CmChannel
from mcast.backends.model.port import Interface, Limits, Port
from mcast.backends.model.qp import Burst, Header
from mcast.backends.model.queue_pairs import QueuePairs
from mcast.backends.model.sa_client import SaClient
from mcast.wire.addresses import Gid, LocalAddress, McastAddress

GROUP = McastAddress.of("239.1.1.1")
FULL, SEND_ONLY = int(JoinFlag.FULLMEMBER), int(JoinFlag.SENDONLY_FULLMEMBER)


class SaUnreachable:
    """No trace, no receivers that were worked out, and a clock at which all is due at once."""

    is_enabled = False
    now = 0

    def note(self, *args: object, **fields: object) -> None: ...
    def forget(self, route: int | Gid) -> None: ...
    def changed(self) -> None: ...

    def call_later(self, delay: int, action: Callable[[], None]) -> None:
        action()


class Host:
    """A host with one RoCE port: a `Network` of the connection manager."""

    refuses_block_loopback = False
    sa_capabilities = 0

    def __init__(self) -> None:
        self.port = Port(
            0,
            "udp0",
            LinkLayer.ETHERNET,
            7,
            0,
            1024,
            10,
            Limits(),
            IPv4Address("10.0.0.1"),
            IPv6Address("::7"),
        )
        self.clock = self.log = silent = SaUnreachable()
        self.hosts = self.igmp = self
        self.id_numbers: Iterator[int] = count(1)
        self.queue_pairs = QueuePairs([self.port], silent, silent)
        self.reported: list[Gid] = []

    def interface(self, hosts: frozenset[int], address: LocalAddress) -> Interface | None:
        found = self.port.interfaces[0]
        return found if address in found.addresses else None

    def route(self, hosts: frozenset[int], address: object) -> Interface | None:
        return self.port.interfaces[0]

    def join(self, port: Port, group: Gid) -> int:
        self.reported.append(group)
        return 0

    def leave(self, port: Port, group: Gid) -> None:
        self.reported.remove(group)

    def sa_client(self, port: Port) -> SaClient:
        raise AssertionError("there is no SA")


def bound(host: Host) -> CmaId:
    cm_id = CmaId(host, frozenset({0}), CmChannel(), PortSpace.UDP)
    assert cm_id.bind(IPv4Address("10.0.0.1")) == 0
    assert cm_id.create_qp(QpInit(max_recv_wr=2, max_send_wr=2)) == 0
    return cm_id


def test_join_reports_and_its_event_attaches() -> None:
    host = Host()
    cm_id = bound(host)
    assert cm_id.qp is not None
    assert cm_id.join(int(MASK), FULL, GROUP, "mine") == 0
    (group,) = host.reported
    assert not cm_id.qp.attached
    event = cm_id.channel.get()
    assert event.type is CmEventType.MULTICAST_JOIN
    assert host.queue_pairs.attached(host.port) == {group: (cm_id.qp,)}
    assert cm_id.leave(GROUP) == 0
    assert (host.reported, cm_id.qp.attached, cm_id.leave(GROUP)) == ([], {}, errno.EADDRNOTAVAIL)


def test_send_only_join_reports_nothing() -> None:
    host = Host()
    cm_id = bound(host)
    assert cm_id.join(int(MASK), SEND_ONLY, GROUP, None) == 0
    cm_id.channel.get()
    assert (host.reported, dict(host.queue_pairs.attached(host.port))) == ([], {})


def test_queue_pair_takes_what_its_receives_hold() -> None:
    host = Host()
    qp = bound(host).qp
    assert qp is not None
    assert qp.state is QpState.RTS
    header = Header(host.port.gids[1], 99, Gid("::ffff:239.1.1.1"), 0, qp.qkey, qp.pkey, 0)
    qp.deliver(Burst([b"a", b"b", b"c"], 1, header, None, 0), 0, 3)
    assert [burst.payloads[start:stop] for burst, start, stop in qp.lease(9)] == [[b"a", b"b"]]
    assert (qp.counters.received, qp.counters.dropped_no_receive) == (2, 1)


def test_part_of_a_burst_is_counted_as_a_part() -> None:
    """Messages 1 and 2 of four arrive: each counts once, whatever it is lost for."""
    host = Host()
    qp = bound(host).qp
    assert qp is not None
    header = Header(host.port.gids[1], 99, Gid("::ffff:239.1.1.1"), 0, qp.qkey, qp.pkey, 0)
    burst = Burst([b"a", b"b", b"c", b"d"], 1, header, None, 0)
    qp.deliver(burst._replace(header=header._replace(qkey=qp.qkey ^ 1)), 1, 3)
    assert (qp.counters.dropped_qkey, host.port.qkey_violations) == (2, 2)
    qp.deliver(burst._replace(header=header._replace(pkey=0x1234)), 1, 3)
    assert host.port.pkey_violations == 2
    large = b"x" * (host.port.mtu + 1)
    qp.deliver(burst._replace(payloads=[large] * 4, longest=len(large)), 1, 3)
    assert (qp.counters.dropped_mtu, host.port.oversized) == (2, 2)
    assert qp.counters.received == 0


def test_message_without_room_ends_the_queue_pair() -> None:
    """Messages before it in the burst arrive, and those after it do not."""
    host = Host()
    qp = bound(host).qp
    assert qp is not None
    assert qp.repost(3, 4) == 0
    header = Header(host.port.gids[1], 99, Gid("::ffff:239.1.1.1"), 0, qp.qkey, qp.pkey, 0)
    qp.deliver(Burst([b"one", b"two", b"large", b"late"], 5, header, None, 0), 0, 4)
    assert [burst.payloads[start:stop] for burst, start, stop in qp.lease(9)] == [[b"one"], [b"two"]]
    assert (qp.state, qp.error) == (QpState.ERR, WcStatus.LOC_QP_OP_ERR)
    assert (qp.counters.received, qp.counters.dropped_too_long) == (2, 1)


def test_device_without_multicast_says_so() -> None:
    port = Host().port
    port.multicast = False
    assert (port.info().max_mcast_grp, port.info().max_mcast_qp_attach) == (0, 0)


def test_models_load_no_provider() -> None:
    code = (
        "import sys, mcast.backends.model.cm, mcast.backends.model.queue_pairs\n"
        "providers = 'mcast.backends.sim', 'mcast.backends.rdma'\n"
        "print([name for name in sys.modules if name.startswith(providers)])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
