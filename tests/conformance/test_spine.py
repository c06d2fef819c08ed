"""The suite about itself: every clause and every fact has a test, and no test names one that is not there."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest

from mcast.conformance.clauses import CLAUSES
from mcast.conformance.facts import FACTS

PROVEN = {"clause": frozenset(CLAUSES), "fact": frozenset(id_ for id_, f in FACTS.items() if not f.beyond)}
"""Mark -> the ids that must have a test."""

SOURCES = [path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py"))]


def marked(mark: str, source: str) -> Iterator[tuple[str, str]]:
    """Each id in such a mark of a test, or of a set of its parameters, with the name of the test."""
    tree = ast.parse(source)
    tables = {
        target.id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    for test in tree.body:
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
            for decorator in test.decorator_list:
                used = [node for node in ast.walk(decorator) if isinstance(node, ast.Name)]
                for root in (decorator, *(tables[name.id] for name in used if name.id in tables)):
                    yield from ((id_, test.name) for id_ in _arguments(mark, root))


def _arguments(mark: str, root: ast.AST) -> Iterator[str]:
    for node in ast.walk(root):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == mark:
            yield from (str(ast.literal_eval(argument)) for argument in node.args)


def faults(mark: str, required: Collection[str], sources: Iterable[str]) -> list[str]:
    """Return the defects of the spine, a sentence each."""
    named = {id_ for source in sources for id_, _ in marked(mark, source)}
    return [f"no test of {mark} {id_}" for id_ in required if id_ not in named] + [
        f"a test names {mark} {id_}, which is not there or beyond any test"
        for id_ in sorted(named - set(required))
    ]


@pytest.mark.parametrize("mark", PROVEN)
def test_every_clause_and_fact_has_a_test(mark: str) -> None:
    """Every clause and fact has a test and none is unknown."""
    assert faults(mark, PROVEN[mark], SOURCES) == []


def test_each_fact_names_the_tests_that_show_it() -> None:
    shown = {(id_, test) for source in SOURCES for id_, test in marked("fact", source)}
    assert shown == {(fact.id, test) for fact in FACTS.values() for test in fact.tests}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('@clause("A-1")\ndef test_x(): ...', ["no test of clause A-2"]),
        ('@clause("A-1", "A-2")\ndef test_x(): ...', []),
        ('@clause("A-1")\n@mark(param(1, marks=clause("A-2")))\ndef test_x(): ...', []),
        ('T = [param(1, marks=[clause("A-2")])]\n@clause("A-1")\n@mark("t", T)\ndef test_x(): ...', []),
        ('@clause("A-1", "A-2")\ndef helper(): ...', ["no test of clause A-1", "no test of clause A-2"]),
        ('@fact("A-1", "A-2")\ndef test_x(): ...', ["no test of clause A-1", "no test of clause A-2"]),
        ('# @clause("A-2")\n@clause("A-1")\ndef test_x(): ...', ["no test of clause A-2"]),
        (
            '@clause("A-1", "A-2", "A-3")\ndef test_x(): ...',
            ["a test names clause A-3, which is not there or beyond any test"],
        ),
    ],
)
def test_the_check_catches_what_is_missing(source: str, expected: list[str]) -> None:
    assert faults("clause", ("A-1", "A-2"), [source]) == expected


@pytest.mark.parametrize("mark", PROVEN)
def test_the_check_catches_an_id_lost_from_this_suite(mark: str) -> None:
    lost = min(PROVEN[mark])
    without = [source.replace(f'"{lost}"', '"X-1"') for source in SOURCES]
    assert faults(mark, PROVEN[mark], without) == [
        f"no test of {mark} {lost}",
        f"a test names {mark} X-1, which is not there or beyond any test",
    ]


def test_the_lists_have_no_gaps() -> None:
    for prefix, count in {"JEX": 17, "JM": 2, "AT": 5, "LV": 5, "DT": 10}.items():
        assert [id_ for id_ in CLAUSES if id_.startswith(f"{prefix}-")] == [
            f"{prefix}-{number}" for number in range(1, count + 1)
        ]
    for topic in {id_.split("-")[1] for id_ in FACTS}:
        numbers = [int(id_.split("-")[2]) for id_ in FACTS if id_.startswith(f"K-{topic}-")]
        assert numbers == [*range(1, len(numbers) + 1)]
