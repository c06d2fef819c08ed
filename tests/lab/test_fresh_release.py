"""The files of `make wheel` in a fresh Debian 12 and 13: pip installs them, an ordinary user runs them."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

import mcast

from .fresh import SECONDS, FreshRoot, fresh_root, needs_root

pytestmark = [needs_root, pytest.mark.long, pytest.mark.timeout(2 * SECONDS)]

ROOT = Path(__file__).parents[2]
RELEASES = ("bookworm", "trixie")
"""Debian 12 and Debian 13."""
FILES = "/opt/files"
"""What goes to PyPI."""
INSTALL = f"""
python3 -m venv /opt/mcast /opt/sdist
/opt/mcast/bin/pip install -q --find-links {FILES} 'rdma-mcast[conformance,lab]==%s' rdma-lab==%s
/opt/sdist/bin/pip install -q {FILES}/*.tar.gz
"""
SIMULATED = ("sim-roce", "sim-ib")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("release") / "files"
    done = subprocess.run(
        ["make", "-s", "wheel", f"WHEELS={made}"], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return made


@pytest.fixture(scope="module", params=RELEASES)
def debian(
    request: pytest.FixtureRequest, files: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FreshRoot]:
    """A Debian with the wheels in /opt/mcast, and with what pip built from the sdists in /opt/sdist."""
    with fresh_root(request.param, tmp_path_factory.mktemp(request.param)) as root:
        shutil.copytree(files, root.root / FILES.lstrip("/"))
        root.install(INSTALL % (mcast.__version__, mcast.__version__))
        yield root


def output(root: FreshRoot, *command: str) -> str:
    status, said = root.run(*command)
    assert status == 0, said
    return said


def test_pip_takes_the_wheel_with_c(debian: FreshRoot, files: Path) -> None:
    """Each extension of the wheel for this processor can be imported."""
    (wheel,) = files.glob(f"rdma_mcast-*-abi3-*{platform.machine()}.whl")
    with ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.endswith(".abi3.so")]
    modules = [name.removesuffix(".abi3.so").replace("/", ".") for name in names]
    assert {"mcast.backends.rdma._native", "mcast.backends.udp._native"} <= set(modules)
    output(debian, "/opt/mcast/bin/python", "-c", f"import {', '.join(modules)}")


def test_info_names_each_provider(debian: FreshRoot) -> None:
    """Without rdma-core `rdma` is not available, and the reason and the fix are there."""
    found = json.loads(output(debian, "mcast", "info", "--json"))
    assert found["version"] == mcast.__version__
    providers = found["providers"]
    assert all(providers[name]["available"] for name in (*SIMULATED, "udp"))
    assert (providers["rdma"]["available"], providers["rdma"]["reason"]) == (False, "library missing")
    assert "apt-get install" in providers["rdma"]["fix"]


def test_demo_verifies_each_copy(debian: FreshRoot) -> None:
    for command in (("mcast", "demo"), ("mcast", "demo", "--backend", "udp")):
        assert "demo: 3/3 receivers verified" in output(debian, *command)


def test_suite_conforms(debian: FreshRoot) -> None:
    names = (*SIMULATED, "udp")
    said = output(debian, "mcast", "conformance", *(f"--backend={name}" for name in names))
    assert said.rstrip().endswith("conformance: " + ", ".join(f"{name} conforms" for name in names))
    found = re.search(r"^(\d+) passed", said, re.M)
    assert found is not None
    assert int(found[1]) > 900


def test_sdists_install_without_a_compiler(debian: FreshRoot) -> None:
    assert "demo: 3/3 receivers verified" in output(debian, "/opt/sdist/bin/mcast", "demo")
    assert output(debian, "/opt/sdist/bin/rdma-lab", "--version").split()[-1] == mcast.__version__


def test_lab_runs_what_its_help_says(debian: FreshRoot) -> None:
    """`rdma-lab check` names the line that installs the rest; then a command finds both kinds of devices."""
    assert output(debian, "rdma-lab", "--help").startswith("Usage: rdma-lab [OPTIONS] COMMAND")
    _, said = debian.run("rdma-lab", "check", "--json")
    debian.install(f"export DEBIAN_FRONTEND=noninteractive\n{json.loads(said)['fix'].replace('sudo ', '')}")
    output(debian, "rdma-lab", "check")
    for fabric, device in (("roce", "rxe"), ("infiniband", "softib")):
        command = ("rdma-lab", "run", "--ports=2", f"--fabric={fabric}", "--output-timeout=150", "--")
        said = output(debian, *command, "ls", "/sys/class/infiniband")
        assert {f"{device}1", f"{device}2"} <= set(said.split())
