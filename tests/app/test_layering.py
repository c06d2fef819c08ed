"""The arrows of the design: applications and the command -> api <- backends; read from the imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

import mcast

ROOT = Path(mcast.__file__).parent
CORE = {
    "api",
    "addresses",
    "batch",
    "errors",
    "causes",
    "cause_rows",
    "diagnosis",
    "interrupts",
    "interrupts_by_exchange",
    "mapping",
    "mcmember",
    "sa_refusal",
}
APPLICATION = {
    "bench",
    "bench_mpi",
    "endpoint",
    "group",
    "session",
    "settings",
    "sequence",
    "inbox",
    "policy",
    "ports",
    "probe",
    "probing",
    "recovery",
    "station",
    "stats",
    "view",
    "aio",
}
BACKENDS = sorted(path.name for path in (ROOT / "backends").iterdir() if (path / "__init__.py").exists())


PACKAGES = {".".join(path.parent.relative_to(ROOT.parent).parts) for path in ROOT.rglob("__init__.py")}


def imports(text: str, package: Sequence[str]) -> Iterator[str]:
    """The modules of mcast that a text imports, at its top or not: `api` for `mcast.api`.

    `package` is where the text stands, for its relative imports.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            # `from package import module` names the module; `from module import value` does not.
            names = [f"{base}.{alias.name}" for alias in node.names] if base in PACKAGES else [base]
        else:
            continue
        yield from (name.removeprefix("mcast.") for name in names if name.startswith("mcast."))


def offences(paths: Iterable[Path], allowed: set[str]) -> list[str]:
    """`file: module` of each import that is none of the allowed modules, nor in one."""
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(paths)
        for name in imports(path.read_text(), path.relative_to(ROOT.parent).parent.parts)
        if not any(name == fine or name.startswith(f"{fine}.") for fine in allowed)
    ]


BESIDE = {"api": "testbed", "interrupts": "_interrupts", "interrupts_by_exchange": "_interrupts"}
"""The test bed's type in a signature, under TYPE_CHECKING; and what is written in C."""


@pytest.mark.parametrize("module", sorted(CORE))
def test_the_contract_stands_on_nothing(module: str) -> None:
    assert offences([ROOT / f"{module}.py"], CORE | {BESIDE.get(module, module)}) == []


def test_captures_know_the_contract_alone() -> None:
    assert offences((ROOT / "capture").glob("*.py"), CORE | {"capture"}) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_knows_the_contract_alone(backend: str) -> None:
    allowed = CORE | {"testbed", "capture", f"backends.{backend}"}
    assert offences((ROOT / "backends" / backend).rglob("*.py"), allowed) == []


@pytest.mark.parametrize("module", sorted(APPLICATION))
def test_the_application_layer_stands_on_contract_and_registry(module: str) -> None:
    assert offences([ROOT / f"{module}.py"], CORE | APPLICATION | {"registry"}) == []


SUBJECT = {"sim.py": "backends.sim"}
"""The commands whose very subject is one provider, and which; every other works with any."""


@pytest.mark.parametrize("path", sorted((ROOT / "cli").rglob("*.py")), ids=lambda path: path.name)
def test_a_command_names_no_backend(path: Path) -> None:
    public = {name for name in mcast.__all__ if not (ROOT / name).exists()}
    above = APPLICATION | {"registry", "capture", "cli", "conformance", "lab"}
    subject = {SUBJECT[path.name]} if path.name in SUBJECT else set()
    assert offences([path], CORE | public | above | subject) == []


def test_the_pytest_plugin_knows_the_simulator_and_no_other_backend() -> None:
    allowed = CORE | APPLICATION | {"registry", "backends.sim"}
    assert offences([ROOT / "pytest_plugin.py"], allowed) == []


def test_the_suite_uses_the_contract_alone() -> None:
    assert offences((ROOT / "conformance").glob("*.py"), CORE | {"testbed", "registry", "conformance"}) == []


def test_the_reader_of_imports_sees_them_all() -> None:
    text = """
import mcast.backends.sim
def late():
    from mcast.backends import rdma
    from ..backends.sim import qp
    from mcast.api import Backend
    import json
"""
    seen = list(imports(text, ("mcast", "cli")))
    assert seen == ["backends.sim", "backends.rdma", "backends.sim.qp", "api"]
