"""Which ports could be used: the active ones that have an address."""

from __future__ import annotations

import pytest

from mcast import McastAddress
from mcast.backends.sim import Fabric, open_fabric
from mcast.endpoint.ports import active


def test_active_ports_with_an_address_of_the_group_s_family_where_there_is_one() -> None:
    fabric = Fabric.roce(ports=3)
    with open_fabric(fabric) as backend:
        fabric.set_link(fabric.ports[0], up=False)
        fabric.set_ipv4(fabric.ports[1], None)
        four, six = McastAddress.of("239.1.1.1"), McastAddress.of("ff0e::1")
        found = {
            group: [str(place.address) for place in active(backend, group)] for group in (None, four, six)
        }
        assert found == {
            None: ["fd00::2", "10.0.0.3"],
            four: ["fd00::2", "10.0.0.3"],
            six: ["fd00::2", "fd00::3"],
        }
        assert [place.device.name for place in active(backend)] == ["roce1", "roce2"]


def test_where_there_is_none_one_sentence_says_so() -> None:
    fabric = Fabric.roce(ports=1)
    with open_fabric(fabric) as backend:
        fabric.set_link(fabric.ports[0], up=False)
        with pytest.raises(ValueError, match="has no active port with an address: see `mcast info`"):
            active(backend)
