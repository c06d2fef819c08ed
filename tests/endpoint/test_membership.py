"""The life of a membership: the table is whole, and nothing else changes a state."""

from __future__ import annotations

import ast
from itertools import chain
from pathlib import Path

import pytest

import mcast
from mcast.endpoint.membership import (
    IGNORED,
    TRANSITIONS,
    TRANSITIONS_WITHOUT_POLICY,
    Action,
    Change,
    EndpointGroup,
    GroupState,
    Transitions,
)
from mcast.wire.addresses import McastAddress

ENDPOINT = Path(mcast.__file__ or "").parent / "endpoint"
BOTH = pytest.mark.parametrize(
    "transitions", [TRANSITIONS, TRANSITIONS_WITHOUT_POLICY], ids=["policy", "none"]
)


def assigned(text: str) -> set[str]:
    """The attributes that a text assigns."""
    nodes = list(ast.walk(ast.parse(text)))
    targets = chain.from_iterable(node.targets for node in nodes if isinstance(node, ast.Assign))
    flat = chain.from_iterable(one.elts if isinstance(one, ast.Tuple) else [one] for one in targets)
    return {one.attr for one in flat if isinstance(one, ast.Attribute)}


def test_no_other_file_assigns_a_state() -> None:
    writers = [path.name for path in sorted(ENDPOINT.glob("*.py")) if "state" in assigned(path.read_text())]
    assert writers == ["membership.py"]


def test_each_state_change_and_action_is_used() -> None:
    assert {state for state, _ in TRANSITIONS} | {
        transition.state for transition in TRANSITIONS.values()
    } == set(GroupState)
    assert {change for _, change in TRANSITIONS} == set(Change)
    assert {action for transition in TRANSITIONS.values() for action in transition.actions} == set(Action)


@BOTH
def test_what_is_left_stays_left_and_all_can_be_left(transitions: Transitions) -> None:
    assert [state for state, _ in transitions if state is GroupState.LEFT] == []
    left = {
        state
        for (state, change) in transitions
        if change is Change.LEAVE and transitions[state, change].state is GroupState.LEFT
    }
    assert left == set(GroupState) - {GroupState.LEFT}


@BOTH
def test_final_loss_is_raised_by_receives(transitions: Transitions) -> None:
    """A final loss is raised by calls that receive."""
    gone = [
        transition for (_, change), transition in transitions.items() if transition.state is GroupState.FAILED
    ]
    assert gone
    assert all(transition.actions[-1] is Action.WAKE_RECEIVERS for transition in gone)


def test_without_a_policy_nothing_is_planned() -> None:
    lived = {GroupState.JOINING}
    for _ in GroupState:
        lived |= {
            transition.state
            for (state, _), transition in TRANSITIONS_WITHOUT_POLICY.items()
            if state in lived and _ is not Change.QP_FAILED
        }
    assert GroupState.LOST not in lived


def test_a_change_without_a_row_changes_nothing() -> None:
    group = EndpointGroup(McastAddress.of("239.1.1.1"), False, 8, 0)
    group.transition(Change.LEAVE)
    assert group.transition(Change.CONFIRMED) == ()
    assert group.state is GroupState.LEFT


def test_each_change_has_a_row_or_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each change in each state has a row or a reason or cannot be."""
    every = {(state, change) for state in GroupState for change in Change}
    assert TRANSITIONS.keys() == TRANSITIONS_WITHOUT_POLICY.keys()
    assert TRANSITIONS.keys() & IGNORED.keys() == set()
    joining, joined = GroupState.JOINING, GroupState.JOINED
    assert every - TRANSITIONS.keys() - IGNORED.keys() == {
        (joining, Change.QP_RESTORED),  # it was never lost
        (joining, Change.GIVEN_UP),
        (joined, Change.CONFIRMED),  # a join has one event
        (joined, Change.COLLISION),
        (joined, Change.QP_RESTORED),  # it is not lost
        (joined, Change.GIVEN_UP),
    }
    group = EndpointGroup(McastAddress.of("239.1.1.1"), False, 8, 0)
    assert group.transition(Change.QP_RESTORED) == ()
    assert group.state is joining
    assert [record.message for record in caplog.records] == [
        "239.1.1.1 is joining, and 'the queue pair was reset' is impossible then: ignored; please report it"
    ]
    caplog.clear()
    assert group.transition(Change.QP_FAILED) == ()
    assert caplog.records == []
