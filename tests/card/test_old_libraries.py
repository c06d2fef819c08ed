"""The provider where librdmacm and libibverbs are too old for some functions: on a card that hides them."""

from __future__ import annotations

import errno as E
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcast.api import JoinAttrEx, McastError, NotSupported
from mcast.backends.rdma.region import RdmaRegion

from .build import build
from .card import Access, Card
from .ends import BOUND, GROUP, End
from .provider import CardBackend, loaded

TEXT = b"from registered memory" * 20


LACKING = ("ibv_reg_mr_iova2", "ibv_reg_dmabuf_mr", "_ibv_query_gid_table", "rdma_join_multicast_ex")


@pytest.fixture
def card(tmp_path: Path) -> Iterator[Card]:
    """A card whose library lacks all that the provider can do without."""
    with loaded(build(without=LACKING), tmp_path) as card:
        yield card
        assert card.reports() == ()
        assert card.leftovers() == ()


def test_memory_is_registered_without_relaxed_ordering(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend)
    to, memory = end.join(), bytearray(TEXT)
    with end.qp.register(memory, relaxed_ordering=True) as region:
        assert isinstance(region, RdmaRegion)
        assert card.access(region.lkey) == Access.LOCAL_WRITE
        end.qp.send_one(to, memory)
        message = end.qp.recv_one(BOUND)
        assert message is not None
        assert bytes(message.payload) == TEXT
    backend.close()


def test_device_memory_names_the_version_needed(card: Card, backend: CardBackend) -> None:
    """Device memory is refused with the version to take."""
    card.ethernet(1)
    fd = os.memfd_create("device")
    with pytest.raises(NotSupported, match="upgrade rdma-core to 34 or newer") as caught:
        End(backend).qp.register_dmabuf(fd, 4096)
    os.close(fd)
    assert caught.value.errno == E.ENOSYS
    backend.close()


def test_gids_are_asked_for_one_by_one(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    ((port,),) = (device.ports for device in backend.devices())
    assert {index: str(gid) for index, gid in port.gids.items()} == {0: "::ffff:10.0.0.1"}
    assert card.count("ibv_query_gid") > 1


def test_send_only_join_names_the_version_needed(card: Card, backend: CardBackend) -> None:
    """A send only join is refused with the version to take."""
    card.ethernet(1)
    end = End(backend)
    with pytest.raises(McastError, match="upgrade rdma-core to 17 or newer") as caught:
        end.id.join_multicast_ex(JoinAttrEx.send_only(GROUP))
    assert caught.value.errno == E.ENOSYS
    end.join()
    backend.close()
