"""What the InfiniBand test bed reads from saquery and ibroute; no device is needed."""

from __future__ import annotations

import pytest

from mcast.api import Gid
from mcast.backends.rdma.infiniband_bed import PortInGroup, memberships, multicast_table
from mcast.wire.mcmember import JoinState

SAQUERY = """MCMember Record dump:
\t\tMGID....................ff12:4001:ffff::f01:109
\t\tPortGid.................fe80::5254:0:1:11
\t\tqkey....................0x1234567
\t\tmlid....................0xc00d
\t\tmtu.....................0x84
\t\tJoinState...............0x1
\t\tProxyJoin...............0x0
MCMember Record dump:
\t\tMGID....................ff12:401b:ffff::1
\t\tPortGid.................fe80::5254:0:1:1
\t\tmlid....................0xc003
\t\tJoinState...............0x8
"""

IBROUTE = """Multicast mlids [0xc000-0xc3ff] of switch Lid 6 guid 0x5254000000020020 (softib switch 2):
           0                   1
     Ports: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4
 MLid
0xc000        x x x
0xc00d        x   x               x
2 valid mlids dumped
"""


def test_each_dump_of_saquery_is_one_port_in_one_group() -> None:
    one, other = Gid("ff12:4001:ffff::f01:109"), Gid("ff12:401b:ffff::1")
    assert memberships(SAQUERY) == [
        PortInGroup(one, Gid("fe80::5254:0:1:11"), 0xC00D, JoinState.FULL),
        PortInGroup(other, Gid("fe80::5254:0:1:1"), 0xC003, JoinState.SEND_ONLY_FULL),
    ]
    assert memberships("") == []


def test_a_column_of_ibroute_is_a_port() -> None:
    assert multicast_table(IBROUTE) == {0xC000: {1, 2, 3}, 0xC00D: {1, 3, 11}}


def test_what_ibroute_says_instead_of_a_table_is_the_error() -> None:
    with pytest.raises(RuntimeError, match="ibroute: iberror: failed"):
        multicast_table("iberror: failed\n")
