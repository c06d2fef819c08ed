"""The GitHub action and the container recipe of the lab: their files, and their steps in a fresh Debian."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rdma_lab import LabMachine, LabUnavailableError, kernels
from rdma_lab.cache_key import cache_key

from .composite import script
from .fresh import CLONE, in_fresh_debian, needs_root

ROOT = Path(__file__).parents[2]
LAB = ROOT / "lab"
ACTION = LAB / "action.yml"
IN_CLONE = f"{CLONE}/lab"
"""The folder of the action in the root file system that `fresh-debian` makes."""
OF_GITHUB = {"GITHUB_ACTION_PATH", "GITHUB_OUTPUT", "RUNNER_TEMP"}
"""Variables that GitHub's runner sets for each step, with paths that hold in a container, too."""


@pytest.fixture(scope="module")
def action() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load(ACTION.read_text("utf-8"))
    return parsed


# --- the files --------------------------------------------------------------


def test_inputs_reach_the_steps_by_variables(action: dict[str, Any]) -> None:
    """Each input is used, what a step uses is set, and no input becomes a part of a script."""
    used = set()
    for step in action["runs"]["steps"]:
        env = step.get("env", {})
        inputs = re.compile(r"^\$\{\{ inputs\.([\w-]+) \}\}$")
        used |= {name for text in env.values() for name in inputs.findall(text)}
        run = step.get("run", "")
        assert "${{" not in run
        named = set(re.findall(r"\$\{?([A-Z_]+)\b", run))
        assert named - OF_GITHUB == env.keys()
    assert used == action["inputs"].keys()


def test_shell_is_correct(action: dict[str, Any], tmp_path: Path) -> None:
    scripts = [LAB / "install.sh"]
    for number, step in enumerate(step for step in action["runs"]["steps"] if "run" in step):
        scripts.append(tmp_path / f"step{number}")
        scripts[-1].write_text(f"#!/bin/bash\nset -eo pipefail\n{step['run']}")
    for one in scripts:
        subprocess.run(["bash", "-n", one], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--exclude=SC2154", *scripts], check=True)


def test_pages_give_inputs_that_exist(action: dict[str, Any]) -> None:
    fences = re.findall(
        r"^```yaml\n(jobs:.*?)^```", (ROOT / "docs/lab-in-ci.md").read_text("utf-8"), re.M | re.S
    )
    texts = [*fences, (ROOT / "docs/assets/mcast-lab.yml").read_text("utf-8")]
    steps = [step for text in texts for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]
    ours = [step["with"] for step in steps if step.get("uses", "").startswith("OWNER/REPO/lab@")]
    assert len(ours) == 3
    for given in ours:
        assert "run" in given
        assert given.keys() <= action["inputs"].keys()


# --- its steps, here --------------------------------------------------------


def run_here(tmp_path: Path, first: str = "", **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run the steps on this machine, with the `rdma-lab` of these tests; only `run` is printed, not done."""
    folder = tmp_path / "temp" / "rdma-lab" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    real = shlex.quote(str(Path(sys.executable).with_name("rdma-lab")))
    (folder / "rdma-lab").write_text(
        f'#!/bin/bash\nif [ "$1" = run ]; then printf \'<%s>\' "$@"; else exec {real} "$@"; fi\n'
    )
    (folder / "rdma-lab").chmod(0o755)
    (folder / "python").unlink(missing_ok=True)
    (folder / "python").symlink_to(sys.executable)
    text = script(ACTION, inputs, str(LAB), str(tmp_path / "temp"), first)
    (tmp_path / ".cache" / "rdma-lab").mkdir(parents=True, exist_ok=True)
    env = os.environ | {"HOME": str(tmp_path)}
    return subprocess.run(["bash", "-c", text], cwd=tmp_path, env=env, capture_output=True, text=True)


def test_inputs_become_options(tmp_path: Path) -> None:
    for name in ("results", "more results"):
        (tmp_path / name).mkdir()
    command = 'echo "it\'s $HOME"\nls | cat'
    done = run_here(
        tmp_path,
        run=command,
        fabric="infiniband",
        ports="4",
        switches="3",
        share="results\nmore results\n",
        timeout="10 min",
        console="results/console of the guest.txt",
        **{"output-timeout": "5min"},
    )
    assert done.returncode == 0, done.stderr
    words = ["run", "--verbose", "--fabric", "infiniband", "--ports", "4", "--switches", "3"]
    words += [
        "--share",
        "results",
        "--share",
        "more results",
        "--timeout",
        "10 min",
        "--output-timeout",
        "5min",
        "--console",
        "results/console of the guest.txt",
        "--",
        "bash",
        "-eo",
        "pipefail",
        "-c",
        command,
    ]
    assert done.stdout.partition("\n")[2].startswith("".join(f"<{word}>" for word in words))


def test_what_the_lab_keeps_is_stored_and_restored(tmp_path: Path) -> None:
    kept = tmp_path / ".cache" / "rdma-lab" / "guest"
    kept.parent.mkdir(parents=True)
    kept.write_text("kept")
    assert run_here(tmp_path, run="true").stdout.startswith("cache miss: rdma-lab-")
    assert run_here(tmp_path, f"rm {shlex.quote(str(kept))}", run="true").stdout.startswith("cache hit: ")
    assert kept.read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fabric", "ethernet", "ethernet"),
        ("share", "nowhere", "'nowhere' cannot be shared: it is not a directory; make it first"),
    ],
)
def test_a_wrong_input_is_named(tmp_path: Path, name: str, value: str, message: str) -> None:
    done = run_here(tmp_path, run="true", **{name: value})
    assert done.returncode in (2, 125)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "<run>" not in done.stdout


def test_missing_packages_have_a_fix(tmp_path: Path) -> None:
    """A system without the packages is told what to do."""
    (tmp_path / "apt-get").write_text(
        "#!/bin/sh\n[ $1 = update ] || { echo E: no such package; exit 100; }\n"
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "rdma-lab").write_text(
        '#!/bin/sh\necho \'{"fix": "apt-get install qemu"}\'; exit 1\n'
    )
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    for program in (tmp_path / "apt-get", tmp_path / "bin" / "rdma-lab"):
        program.chmod(0o755)
    (tmp_path / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "sudo").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([LAB / "install.sh", tmp_path, "roce"], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "rdma-lab: apt-get install qemu failed: the lab needs Debian 12 or 13, or a container of it, such as "
        "debian:12\n"
    )


def test_install_shows_its_help(tmp_path: Path) -> None:
    """It makes no folder of that name."""
    done = subprocess.run([LAB / "install.sh", "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: install.sh VENV [roce|infiniband]\n")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "name the folder to install into"),
        (["--verbose"], "--verbose is not a folder"),
        (["venv", "ethernet"], "ethernet is not a fabric"),
        (["venv", "roce", "now"], "now is one word too many"),
    ],
)
def test_install_refuses_other_words(tmp_path: Path, words: list[str], why: str) -> None:
    done = subprocess.run([LAB / "install.sh", *words], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"rdma-lab: install.sh: {why}: {LAB / 'install.sh'} VENV [roce|infiniband]\n"
    assert list(tmp_path.iterdir()) == []


# --- the key of the cache ---------------------------------------------------


def test_cache_key_changes_with_what_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "newest", lambda wanted: f"{wanted}.99-amd64")
    key = cache_key(LabMachine())
    kernel = kernels.find().version
    assert re.fullmatch(
        rf"rdma-lab-[\w.]+-linux-{re.escape(kernel)}-qemu-\d[\w.+-]+-roce-3-1024M-0-shared", key
    )
    others = [
        LabMachine(ports=4),
        LabMachine(memory=512),
        LabMachine(share=[tmp_path]),
        LabMachine(kernel="6.12"),
        LabMachine(fabric="infiniband"),
    ]
    assert len({key, *map(cache_key, others)}) == 6
    assert "-linux-6.12.99-amd64-" in cache_key(LabMachine(kernel="6.12"))
    infiniband = LabMachine(fabric="infiniband", ports=8, switches=3)
    assert cache_key(infiniband) == cache_key(LabMachine(fabric="infiniband"))
    assert "," not in key  # actions/cache refuses it
    assert len(key) < 512


def test_cache_key_of_an_unknown_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_output", lambda *_: "")
    with pytest.raises(LabUnavailableError, match=r"the package sources have no kernel 9: .* apt-get update"):
        cache_key(LabMachine(kernel="9"))


@pytest.mark.parametrize(
    ("wanted", "fix"),
    [
        ("9", "run apt-get update, or add the security or the backports source of your release"),
        ("6.9", "name one of these"),
        ("newest", "name one of these"),
    ],
)
def test_unknown_kernel_has_a_fix_that_helps(monkeypatch: pytest.MonkeyPatch, wanted: str, fix: str) -> None:
    """Another package source has newer kernels than these, and no older ones."""
    listed = "".join(
        f"linux-image-{one}-amd64 - Linux\n" for one in ("6.12.90+deb12", "6.1.0-50", "6.1.0-47")
    )
    monkeypatch.setattr(kernels, "_output", lambda *_: listed)
    with pytest.raises(LabUnavailableError) as error:
        cache_key(LabMachine(kernel=wanted))
    assert str(error.value) == f"the package sources have no kernel {wanted}: they have 6.1, 6.12: {fix}"


# --- in a fresh Debian ------------------------------------------------------


@needs_root
@pytest.mark.long
def test_steps_run_in_a_fresh_debian() -> None:
    """On both fabrics; then a job that has nothing but the cache resumes the guest of the first one."""
    run = "ibv_devinfo; echo made >results/file"

    def job(first: str, **inputs: str) -> str:
        inputs |= {"run": run, "share": "results"}
        return "bash -c " + shlex.quote(script(ACTION, inputs, IN_CLONE, "/tmp/runner", first))

    again = "rm -r ~/.cache/rdma-lab results/file"
    jobs = [
        job("mkdir results"),
        job(again, fabric="infiniband"),
        job(again, fabric="roce"),
        "cat results/file",
    ]
    out = in_fresh_debian("\n".join(jobs))
    soft_roce, infiniband, resumed = re.split(r"^cache (?:miss|hit): ", out, flags=re.M)[1:]
    assert re.findall("^cache (miss|hit): ", out, re.M) == ["miss", "miss", "hit"]
    for part in (soft_roce, resumed):
        assert re.findall(r"hca_id:\s+(\w+)", part) == ["rxe1", "rxe2", "rxe3"]
        assert part.count("link_layer:\t\tEthernet") == 3
    assert re.findall(r"hca_id:\s+(\w+)", infiniband) == ["softib1", "softib2", "softib3"]
    assert infiniband.count("link_layer:\t\tInfiniBand") == infiniband.count("PORT_ACTIVE") == 3
    assert "emulated, resumed" in resumed or "KVM" in resumed
    assert "resumed" not in soft_roce
    assert out.endswith("made\n")


@needs_root
@pytest.mark.long
def test_container_recipe_in_a_fresh_debian() -> None:
    """Its lines leave a system with rdma-lab alone, which runs a command on both fabrics."""
    recipe = (LAB / "Containerfile").read_text("utf-8")
    lines = [line.partition(" ") for line in recipe.splitlines() if not line.startswith("#")]
    assert [word for word, _, _ in lines] == ["FROM", "COPY", "RUN", "CMD"]
    copied, folder = lines[1][2].split()
    assert (lines[0][2], copied) == ("debian:12", ".")
    text = f"mkdir -p {folder}; cp -r {IN_CLONE}/. {folder}; rm -r /root/mcast; cd /\n{lines[2][2]}\n"
    text += "! /opt/rdma-lab/bin/python -c 'import mcast' 2>/dev/null\n"
    text += "rdma-lab check\nrdma-lab run -- ibv_devinfo\nrdma-lab run --fabric infiniband -- ibv_devinfo\n"
    out = in_fresh_debian(text)
    assert re.findall(r"hca_id:\s+(\w+)", out) == [
        f"{name}{n}" for name in ("rxe", "softib") for n in (1, 2, 3)
    ]
    assert out.count("PORT_ACTIVE") == 6
