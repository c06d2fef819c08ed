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


def accepts_options(
    options: Callable[P, O],
) -> Callable[[Callable[[X, O], R]], Callable[Concatenate[X, P], R]]:
    """Let a method with a parameter for `options` take the arguments that make the options instead.

    Types, defaults and the signature that `help` shows are those of `options`.
    """

    def decorate(method: Callable[[X, O], R]) -> Callable[Concatenate[X, P], R]:
        @wraps(method)
        def called(first: X, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                taken = options(*args, **kwargs)
            except TypeError as error:  # name the function that the user knows
                words = str(error).replace(f"{options.__qualname__}.__init__()", f"{method.__qualname__}()")
                raise TypeError(words) from None
            return method(first, taken)

        seen = inspect.signature(method)
        receiver = next(iter(seen.parameters.values()))
        single = inspect.signature(options).parameters.values()
        vars(called)["__signature__"] = seen.replace(parameters=[receiver, *single])
        return called

    return decorate
