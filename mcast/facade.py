"""Names of a module that lie in others, and are imported when they are first used."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in `mcast`
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy(module: str, table: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of the module.

    `table` maps a module below `mcast` to the names that it has, or to its own name if it is a name, too.
    """
    home = {name: f"mcast.{where}" for where, names in table.items() for name in names.split()}

    def find(name: str) -> object:
        from importlib import import_module

        if name not in home:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        there = import_module(home[name])
        value = there if home[name] == f"{module}.{name}" else getattr(there, name)
        setattr(sys.modules[module], name, value)
        return value

    return find, lambda: sorted(home)
