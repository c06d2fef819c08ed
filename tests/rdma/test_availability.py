"""Each thing that can be wrong has its own reason and fix; loading is all or nothing."""

from __future__ import annotations

import errno as E
import os
import subprocess
import sys
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from mcast.api import (
    DeviceInfo,
    Gid,
    LinkLayer,
    PortInfo,
    PortState,
    Status,
    UnavailableReason,
    UnusableDevice,
)
from mcast.backends.rdma.availability import FIXES, Facts, judge

IP = IPv4Address("10.0.0.1")


def device(state: PortState = PortState.ACTIVE, addresses: tuple[IPv4Address, ...] = (IP,)) -> DeviceInfo:
    port = PortInfo(
        port_num=1,
        state=state,
        link_layer=LinkLayer.ETHERNET,
        active_mtu=1024,
        rate=2.5,
        lid=0,
        gids={0: Gid(IP)},
        addresses=addresses,
    )
    return DeviceInfo(
        name="rxe0", node_guid=1, max_mcast_grp=8, max_mcast_qp_attach=4, max_qp_wr=64, ports=(port,)
    )


WELL = Facts(devices=(device(),), needed=1000)
OTHERS = tuple(
    UnusableDevice(name, reason, detail, "mend it", E.ENODEV)
    for name, reason, detail in (
        ("rxe1", UnavailableReason.NO_PROVIDER, "no provider"),
        ("rxe2", UnavailableReason.NO_PROVIDER, "no provider"),
        ("mlx5_0", UnavailableReason.OTHER_NAMESPACE, "elsewhere"),
    )
)
NONE = Facts(needed=1000, unusable=OTHERS)

CASES = [
    (
        WELL._replace(missing=(UnavailableReason.NOT_BUILT, "no module")),
        UnavailableReason.NOT_BUILT,
        "no module",
    ),
    (
        WELL._replace(missing=(UnavailableReason.NO_LIBRARY, "cannot open")),
        UnavailableReason.NO_LIBRARY,
        "cannot",
    ),
    (WELL._replace(devices=()), UnavailableReason.NO_DEVICE, "no RDMA device"),
    (WELL._replace(absent="/dev/x"), UnavailableReason.NO_DEVICE, "no /dev/x"),
    (WELL._replace(barred="cannot open /dev/x"), UnavailableReason.NO_PERMISSION, "/dev/x"),
    (WELL._replace(memlock=999), UnavailableReason.MEMLOCK, "limit is 999 bytes, one QP needs 1000"),
    (WELL._replace(failed="query_port(): EIO"), UnavailableReason.BROKEN, "EIO"),
    (WELL._replace(devices=(device(PortState.DOWN),)), UnavailableReason.PORT_DOWN, "rxe0/1 is DOWN"),
    (WELL._replace(devices=(device(addresses=()),)), UnavailableReason.NO_ADDRESS, "rxe0"),
]


@pytest.mark.parametrize(
    ("facts", "reason", "says"), CASES, ids=[f"{case[1].name}-{case[2]}" for case in CASES]
)
def test_each_lack_has_its_reason_and_fix(facts: Facts, reason: UnavailableReason, says: str) -> None:
    status = judge(facts)
    assert not status.available
    assert status.reason is reason
    assert says in status.detail
    assert status.fix
    assert "\n" not in status.fix


def test_nothing_lacks() -> None:
    assert judge(WELL._replace(memlock=1000)) == Status(True, "rxe0 (10.0.0.1)")


def test_one_usable_device_is_enough() -> None:
    """The others are named with their reasons, and keep nobody out."""
    assert judge(WELL._replace(unusable=OTHERS)) == Status(True, "rxe0 (10.0.0.1)", unusable=OTHERS)


def test_without_a_usable_device_each_reason_is_told() -> None:
    """Which is not that the kernel has no device."""
    status = judge(NONE)
    assert (status.available, status.reason, status.fix) == (False, OTHERS[0].reason, "mend it")
    assert status.detail == "rxe1, rxe2: no provider; mlx5_0: elsewhere"
    assert status.unusable == OTHERS


def test_every_fix_is_of_a_reason_that_can_be_given() -> None:
    assert {reason for _, reason, _ in CASES} | {UnavailableReason.BROKEN} == set(FIXES)


def status_in(code: str = "", **environment: str) -> str:
    """Return the status of the backend in a fresh process, after `code`."""
    script = f"{code}\nimport mcast\nprint(mcast.backend_status('rdma'))"
    env = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_missing_library_has_the_loaders_words() -> None:
    """A missing library is said in the loader's words."""
    said = status_in(MCAST_LIBRDMACM="/nowhere/librdmacm.so.1")
    assert "NO_LIBRARY" in said
    assert "/nowhere/librdmacm.so.1: cannot open shared object file" in said
    assert "NO_LIBRARY" in status_in(MCAST_LIBIBVERBS="/nowhere/libibverbs.so.1")


def test_a_library_without_the_symbols_is_refused() -> None:
    said = status_in(MCAST_LIBIBVERBS="libc.so.6")
    assert "libc.so.6 has no ibv_get_device_list@IBVERBS_1.1" in said


def test_an_extension_that_was_not_built_is_said() -> None:
    said = status_in("import sys; sys.modules['mcast.backends.rdma._native'] = None")
    assert "NOT_BUILT" in said
    assert "MCAST_RDMA=1" in said


def test_an_extension_that_does_not_load_is_broken(tmp_path: Path) -> None:
    (tmp_path / "_native.abi3.so").write_bytes(b"not a library")
    said = status_in(f"import mcast.backends.rdma as r; r.__path__.insert(0, {str(tmp_path)!r})")
    assert "BROKEN" in said


OLD_LIBRARY = """
import re, subprocess, sys
from pathlib import Path
from mcast.backends.rdma import native
names = re.findall(r'REQUIRED\\((rdma_\\w+), "(RDMACM_1\\.\\d)"\\)', Path(HEADER).read_text())
source = "".join(f"void {name}(void) {{}}\\n" for name, _ in names)
versions = sorted({version for _, version in names})
script = ""
for version in versions:
    own = "".join(f"{name};" for name, of in names if of == version)
    script += f"{version} {{ global: {own} }};\\n"
Path("old.c").write_text(source)
Path("old.map").write_text(script)
flags = ["-shared", "-fPIC", "-Wl,--version-script=old.map"]
subprocess.run(["cc", *flags, "-o", "old.so", "old.c"], check=True)
import os
os.environ["MCAST_LIBRDMACM"] = "./old.so"
print(native.load().has_join_ex)
"""


def test_older_library_lacks_newer_symbols(tmp_path: Path) -> None:
    """An older library is taken without its newer symbols."""
    import mcast.backends.rdma as package

    header = Path(package.__file__).parent / "csrc" / "dynload.h"
    script = OLD_LIBRARY.replace("HEADER", repr(str(header)))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
