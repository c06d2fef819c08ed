"""Options that are written once: a function takes the arguments of the class that holds its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
O = TypeVar("O")  # noqa: E741
X = TypeVar("X")
R = TypeVar("R")


def taking(
    options: Callable[P, O],
) -> Callable[[Callable[[X, O], R]], Callable[Concatenate[X, P], R]]:
    """Let a method with a parameter for `options` take the arguments that make the options instead.

    Types, defaults and the signature that `help` shows are those of `options`.
    """

    def decorate(method: Callable[[X, O], R]) -> Callable[Concatenate[X, P], R]:
        @wraps(method)
        def taken(first: X, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return method(first, options(*args, **kwargs))

        seen = inspect.signature(method)
        receiver = next(iter(seen.parameters.values()))
        single = inspect.signature(options).parameters.values()
        vars(taken)["__signature__"] = seen.replace(parameters=[receiver, *single])
        return taken

    return decorate
