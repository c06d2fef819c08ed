"""The registry: names, entry points, and what is said of a backend that cannot be had."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from mcast import backend_names, backend_status, open_backend
from mcast.api import BackendUnavailable, UnavailableReason, UnknownBackend
from mcast.contract import registry


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Packages with entry points `good`, `broken`, `wrong` and one that would shadow `sim`."""
    (tmp_path / "third.py").write_text("from mcast.backends.sim import INFINIBAND as GOOD\nWRONG = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    values = {
        "good": "third:GOOD",
        "broken": "no_such_module:X",
        "wrong": "third:WRONG",
        "sim": "third:WRONG",
    }
    entries = [EntryPoint(name, value, registry.GROUP) for name, value in values.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)


SIMULATORS = ("sim", "sim-roce", "sim-ib", "sim-shared", "sim-shared-ib")


def test_the_built_in_names_come_first() -> None:
    assert backend_names()[:7] == tuple(registry.BUILTIN) == (*SIMULATORS, "udp", "rdma")


@pytest.mark.usefixtures("entry_point")
def test_an_installed_backend_opens_under_its_name() -> None:
    assert backend_names()[7:] == ("broken", "good", "wrong")
    assert registry.provider("good").name == "good"
    with open_backend("good", ports=2) as backend:
        assert len(backend.devices()) == 2


@pytest.mark.usefixtures("entry_point")
def test_a_built_in_backend_cannot_be_shadowed() -> None:
    assert backend_status("sim").available


@pytest.mark.usefixtures("entry_point")
@pytest.mark.parametrize(
    ("name", "detail"), [("broken", "No module named 'no_such_module'"), ("wrong", "of type int")]
)
def test_a_broken_package_is_told_with_a_fix(name: str, detail: str) -> None:
    status = backend_status(name)
    assert not status.available
    assert status.reason is UnavailableReason.BROKEN
    assert detail in status.detail
    assert "mcast.backends" in status.fix
    with pytest.raises(BackendUnavailable, match="installed but broken"):
        open_backend(name)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownBackend, match=f"there are {', '.join(SIMULATORS)}, udp, rdma"):
        backend_status("nope")


def test_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="prots"):
        open_backend("sim", prots=4)


def test_override_replaces_a_name_while_open() -> None:
    """An override stands in for a name while it is open."""
    roce, infiniband = registry.provider("sim"), registry.provider("sim-ib")
    with registry.override_provider("rdma", infiniband), registry.override_provider("new", roce):
        assert backend_status("rdma").available
        with registry.override_provider("rdma", roce), open_backend("rdma", ports=1) as inner:
            assert inner.name == "sim-roce"
            assert "new" in backend_names()
        with open_backend("rdma", ports=1) as outer, open_backend("new", ports=2) as new:
            assert (outer.name, new.name) == ("sim-ib", "sim-roce")
        assert registry.provider("rdma").name == "rdma"
    assert registry.provider("rdma").open is not infiniband.open
    with pytest.raises(UnknownBackend):
        open_backend("new")
