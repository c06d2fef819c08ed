"""Copies of values that hold views of memory, for `__reduce__`."""

from __future__ import annotations


def reduce_with_copies(fields: tuple[object, ...], cls: type[object] | None = None) -> tuple[object, ...]:
    """Return what `__reduce__` needs to make a value from its fields again; views become views of copies.

    `fields` is a named tuple, or the constructor's arguments of `cls`.
    """
    views = [
        ((bytes if one.readonly else bytearray)(one), one.shape) if isinstance(one, memoryview) else None
        for one in fields
    ]
    others = [None if isinstance(one, memoryview) else one for one in fields]
    return _rebuild, (cls or type(fields), views, others)


def _rebuild(
    cls: type[object], views: list[tuple[bytes | bytearray, tuple[int, ...]] | None], others: list[object]
) -> object:
    return cls(*(one if view is None else _shaped(*view) for view, one in zip(views, others, strict=True)))


def _shaped(data: bytes | bytearray, shape: tuple[int, ...]) -> memoryview:
    view = memoryview(data)
    return view.cast("B", shape) if data and len(shape) > 1 else view
