"""`make mutants`: plants mistakes by rule, by mutmut, and says which of them no type and no test finds.

mypy looks at all of them at once. Then pytest collects the tests once, and for each one that mypy passes a
process is forked from there: it exchanges the code of one function, and runs the tests that reach the changed
line, first those that are quick and have found others there. So a mistake costs what its tests cost, and they
run no slower than without it.

Of each module it takes the same random share for the same seed; a larger share has all of a smaller one. The
modules keep pace: Ctrl-C ends a run early, with a table that is as fair.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import gc
import importlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import chdir, suppress
from math import ceil
from operator import itemgetter
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, TextIO

import coverage
import pytest
from mutmut.configuration import config as settings
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.type_checking import run_type_checker
from mutmut.utils.file_utils import walk_mutatable_files
from mutmut.utils.format_utils import get_mutant_name

ENDS = ("types", "tests", "hung", "unseen")
"""End of a mistake: mypy finds it; a test fails; a test takes many times as long as without it; or none."""

BROKEN = 3
"""The status of a forked process that could not plant its mistake."""


class Mistake(NamedTuple):
    """One mutant of mutmut's.

    text      where it stands in the text that mutmut makes of the module
    lines     of the statement that it changes, in the module: who reaches the statement reaches one of them
    function  what takes the place of the function
    was, new  the changed line
    """

    name: str
    path: Path
    owner: str
    text: range
    lines: range
    function: ast.FunctionDef | ast.AsyncFunctionDef
    was: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.lines.start}: {self.was.strip()}  ->  {self.new.strip()}  ({self.name})"

    @property
    def qualname(self) -> str:
        return f"{self.owner}.{self.function.name}".lstrip(".")

    @property
    def module(self) -> dict[str, Any]:
        """Contents of the module."""
        name = ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")
        return vars(importlib.import_module(name))

    def made(self) -> FunctionType:
        """The changed function: of its class, for `super` and private names."""
        self.function.decorator_list = []
        body: list[ast.stmt] = [self.function]
        if self.owner:
            body = [ast.ClassDef(self.owner, [], [], body, [])]
        tree = ast.fix_missing_locations(ast.Module(body, []))
        code = compile(tree, self.path, "exec", __future__.annotations.compiler_flag, dont_inherit=True)
        names = self.module | (dict(vars(self.module[self.owner])) if self.owner else {})
        exec(code, names)
        made = vars(names[self.owner])[self.function.name] if self.owner else names[self.function.name]
        made = getattr(made, "__func__", made)  # of a static or class method
        assert isinstance(made, FunctionType)
        return made


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Those that mutmut changes: of the module, and of its classes, whose names they come with."""
    for owner, body in [
        ("", tree.body),
        *((one.name, one.body) for one in tree.body if isinstance(one, ast.ClassDef)),
    ]:
        for one in body:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                yield owner, one


def statement(function: ast.stmt, line: int) -> range:
    """The lines of the innermost statement there; those of the whole function if it is its head."""
    found = range(0)
    for node in ast.walk(function):
        if isinstance(node, ast.stmt | ast.ExceptHandler) and node is not function:
            last = node.end_lineno or line
            if body := getattr(node, "body", None):
                last = max(node.lineno, body[0].lineno - 1)
            if node.lineno <= line <= last:
                found = range(node.lineno, last + 1)
    return found or range(function.lineno, (function.end_lineno or line) + 1)


def mistakes(path: Path) -> tuple[str, list[Mistake]]:
    """The text that mutmut makes of a module, and all mistakes in it."""
    source = path.read_text("utf-8")
    here = {(owner, one.name): one for owner, one in functions(ast.parse(source))}
    text = mutate_file_contents(str(path), source).code
    lines = text.splitlines()
    found, whole = [], list[str]()
    for owner, one in functions(ast.parse(text)):
        mangled, marked, number = one.name.rpartition("__mutmut_")
        if not marked:
            continue
        name, mutant = mangled.rpartition("ǁ")[2] if owner else mangled.removeprefix("x_"), one.name
        last = one.end_lineno or one.lineno
        own = [line.replace(mutant, name) for line in lines[one.lineno - 1 : last]] + [""]
        if number == "orig":
            whole = own
            continue
        at = next(at for at, pair in enumerate(zip(whole, own, strict=False)) if pair[0] != pair[1])
        stands = range(min(part.lineno for part in (one, *one.decorator_list)), last + 1)
        reached = statement(here[owner, name], here[owner, name].lineno + at)
        one.name = name
        name = get_mutant_name(path, mutant)
        found.append(Mistake(name, path, owner, stands, reached, one, whole[at], own[at]))
    return text, found


def types(texts: dict[Path, str], every: list[Mistake], taken: list[Mistake]) -> set[str]:
    """The names of those taken in which mypy finds something; a tree has them all beside each other."""
    shutil.copytree("mcast", "mutants/mcast", dirs_exist_ok=True)
    lines = {path: text.splitlines() for path, text in texts.items()}
    names = {one.name for one in taken}
    for one in every:
        if one.name not in names:
            for line in one.text:
                lines[one.path][line - 1] = ""
    for path, some in lines.items():
        ("mutants" / path).write_text("\n".join(some) + "\n", "utf-8")
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # mypy is there, too
    with chdir("mutants"):
        wrong = {(one.file_path, one.line_number) for one in run_type_checker(settings().type_check_command)}
    root = Path("mutants").absolute()
    found = {one.name for one in taken for line in one.text if (root / one.path, line) in wrong}
    if not found and wrong:
        raise SystemExit(f"mypy finds something without a mistake: {min(wrong)}")
    return found


def drawn(every: dict[Path, list[Mistake]], seed: int, share: float) -> list[Mistake]:
    """The first of each module in the order that the seed gives: the modules keep pace."""
    found = []
    for path, some in every.items():
        order = random.Random(f"{seed} {path}").sample(some, len(some))
        found += [(at / len(some), one) for at, one in enumerate(order[: ceil(len(some) * share)])]
    return [one for _, one in sorted(found, key=itemgetter(0))]


class Beats:
    """A plugin of the forked process's: tells its parent of each test that begins or fails."""

    def __init__(self, writer: int) -> None:
        self.writer = writer

    def pytest_runtest_logstart(self) -> None:
        os.write(self.writer, b".")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self.writer, b"!")


class Outcomes:
    """A plugin of the run without a mistake: how long each test takes, and which lines it reaches."""

    def __init__(self) -> None:
        self.took: dict[str, float] = {}
        self.cover = coverage.Coverage(data_file=None, config_file=False, include=settings().only_mutate)
        self.cover.set_option("run:disable_warnings", ["trace-changed"])
        self.cover.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.cover.switch_context(item.nodeid)
        began = time.monotonic()
        try:
            return (yield)
        finally:
            self.took[item.nodeid] = time.monotonic() - began

    def tell(self, file: TextIO) -> None:
        self.cover.stop()
        data = self.cover.get_data()
        json.dump((self.took, {path: data.contexts_by_lineno(path) for path in data.measured_files()}), file)
        file.flush()


class Planting:
    """A plugin of pytest's: instead of all tests once, it runs for each mistake those that reach it."""

    def __init__(self, taken: list[Mistake], typed: set[str]) -> None:
        self.taken, self.typed = taken, typed
        self.ends: dict[str, str] = {}
        self.took: dict[str, float] = {}
        self.found = Counter[tuple[Path, str]]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        reached = self.looked(session)
        items = {item.nodeid: item for item in session.items}
        for mistake in self.taken:
            assert mistake.module
        gc.unfreeze()
        functions = defaultdict(list)
        for one in gc.get_objects():
            if isinstance(one, FunctionType):
                functions[one.__code__.co_filename, one.__code__.co_qualname].append(one)
        gc.freeze()
        with suppress(KeyboardInterrupt):
            for mistake in self.taken:
                path = str(mistake.path.absolute())
                tests = {test for line in mistake.lines for test in reached.get(path, {}).get(str(line), ())}
                if mistake.name in self.typed:
                    end = "types"
                elif not tests:
                    end = "unseen"
                else:
                    at = mistake.path
                    order = sorted(tests, key=lambda test: self.took[test] / (1 + self.found[at, test]))
                    old = functions[path, mistake.qualname]
                    assert old, mistake
                    end, last = self.run(session, [items[test] for test in order], mistake.made(), old)
                    self.found[at, last] += end == "tests"
                self.ends[mistake.name] = end
                if end in ("hung", "unseen"):
                    print(f"{end}, {len(tests)} tests: {mistake}", flush=True)
        return True

    def looked(self, session: pytest.Session) -> dict[str, dict[str, list[str]]]:
        """The tests of each line of each file."""
        with tempfile.TemporaryFile("w+") as file:
            end, last = self.run(session, session.items, file)
            if end != "unseen":
                raise pytest.UsageError(f"{last} fails without a mistake")
            file.seek(0)
            self.took, reached = json.load(file)
        return dict(reached)

    def run(
        self,
        session: pytest.Session,
        items: list[pytest.Item],
        new: FunctionType | TextIO,
        old: Sequence[FunctionType] = (),
    ) -> tuple[str, str]:
        """Run the tests in a process of its own, up to the first that fails: how that ends, at which test.

        The old functions have the new one's code there; or nothing is changed, and a look goes to the file.
        """
        reader, writer = os.pipe()
        if not (pid := os.fork()):
            status = BROKEN
            try:
                os.setpgid(0, 0)
                nowhere = os.open(os.devnull, os.O_RDWR)
                for standard in range(3):
                    os.dup2(nowhere, standard)
                plugins = session.config.pluginmanager
                plugins.unregister(self)
                plugins.register(Beats(writer))
                if isinstance(new, FunctionType):
                    for one in old:
                        one.__code__, one.__defaults__ = new.__code__, new.__defaults__
                        one.__kwdefaults__ = new.__kwdefaults__
                else:
                    plugins.register(outcomes := Outcomes())
                session.items[:] = items
                status = 1
                session.config.hook.pytest_runtestloop(session=session)
                status = int(session.testsfailed > 0)
                if not isinstance(new, FunctionType):
                    outcomes.tell(new)
            finally:
                os._exit(status)
        os.close(writer)
        ended, last = os.pidfd_open(pid), ""
        rest = iter(items)
        try:
            while True:
                most = 600 if last not in self.took else self.took[last] + settings().timeout_constant
                ready, _, _ = select.select([reader, ended], [], [], most * settings().timeout_multiplier)
                if not ready:
                    return "hung", last
                said = os.read(reader, 1) if reader in ready else b""
                if said == b"!":
                    return "tests", last
                if said:
                    last = next(rest).nodeid
                elif ended in ready:
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    pid = 0
                    assert status != BROKEN
                    return "tests" if status else "unseen", last
        finally:
            os.close(reader)
            os.close(ended)
            if pid:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.1, help="of the mistakes of each module")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="PATH", help="modules whose path begins so")
    parser.add_argument("names", nargs="*", help="these mistakes alone, without a look at their types")
    given = parser.parse_args()
    paths = [path for path in sorted(walk_mutatable_files()) if str(path).startswith(given.only)]
    texts, every = dict[Path, str](), dict[Path, list[Mistake]]()
    for path in paths:
        texts[path], every[path] = mistakes(path)
    whole = [one for some in every.values() for one in some]
    if given.names:
        taken = [one for one in whole if one.name in given.names]
    else:
        taken = drawn(every, given.seed, given.share)
    planting = Planting(taken, set() if given.names else types(texts, whole, taken))
    with tempfile.TemporaryDirectory() as folder:
        status = pytest.main(
            [
                *settings().pytest_add_cli_args,
                *settings().pytest_add_cli_args_test_selection,
                "--hypothesis-profile=mutants",
                f"--basetemp={folder}/tests",
                "-qs",
            ],
            [planting],
        )
    print("| module | mistakes | planted |", *(f"{end} |" for end in ENDS))
    print("|---|" + "---|" * (2 + len(ENDS)))
    total = Counter[str]()
    for path in paths:
        count = Counter(planting.ends[one.name] for one in every[path] if one.name in planting.ends)
        count |= {"all": len(every[path])}
        total += count
        print(row(str(path), count))
    print(row("all", total))
    sys.exit(status)


def row(title: str, count: Counter[str]) -> str:
    figures = (count["all"], sum(count[end] for end in ENDS), *(count[end] for end in ENDS))
    return f"| `{title}` | " + " | ".join(f"{figure:,}".replace(",", " ") for figure in figures) + " |"


if __name__ == "__main__":
    main()
