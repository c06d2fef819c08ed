"""The ranks of a torch.distributed group, and the memory of tensors.

torch is not imported here: a group or a tensor exists only in a program that has imported it.

The exchanges run on the group itself, by gloo, so they count among the collectives that every rank of the
group calls in the same order. Each has its own timeout, at most that of the group, because the destructor
of a group waits for what was abandoned. gloo tells exchanges of different kinds apart, so that what a rank
says when it leaves meets no other exchange, and copies of the group are not needed. After an exchange that
ran into its timeout gloo closes the connections: the group then fails on every rank.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from typing_extensions import Buffer

from mcast.collective.communicator import wait_for

_GRACE = 0.5
"""Seconds after which gloo ends an exchange that was abandoned: later, so that the error is ours."""

_attributes: WeakKeyDictionary[ProcessGroup, dict[str, Any]] = WeakKeyDictionary()


class ProcessGroup(Protocol):
    """A group of torch.distributed, with the gloo backend for CPU tensors."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def _get_backend(self, device: Any, /) -> Any: ...


class Tensor(Protocol):
    """A contiguous CPU tensor of torch, of any dtype."""

    @property
    def nbytes(self) -> int: ...
    def data_ptr(self) -> int: ...
    def is_contiguous(self) -> bool: ...


def is_group(group: object) -> bool:
    """Return True for a group of torch.distributed."""
    kind = getattr(sys.modules.get("torch.distributed"), "ProcessGroup", None)
    return kind is not None and isinstance(group, kind)


def shown(buffer: Buffer | Tensor) -> Buffer:
    """Return the memory of a tensor, and everything else as it is.

    Raises TypeError for a tensor that has no plain memory in this process.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(buffer, torch.Tensor):
        return buffer  # type: ignore[return-value]  # if it is no buffer, the next one says so
    tensor: Any = buffer
    if tensor.device.type != "cpu":
        raise TypeError(f"this tensor is on {tensor.device}: give a copy by .cpu(), or one for the result")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise TypeError("this tensor has elements that lie apart in memory: give a copy by .contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError("this tensor is a lazy conjugate: give .resolve_conj() and .resolve_neg() of it")
    if tensor.is_quantized:
        raise TypeError("this tensor is quantized, and its bytes alone say nothing: give .int_repr() of it")
    if not tensor.nbytes:
        return bytearray()
    if not tensor.data_ptr():
        raise TypeError(f"this {type(tensor).__name__} has no memory of its own: give its local tensor")
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # so that the memory lives as long as a view of it
    view: Buffer = memory
    return view


class TorchRanks:
    """Implementation of `Communicator`. Raises ValueError if the group does not use gloo for CPU tensors."""

    library: str = "gloo"

    def __init__(self, group: ProcessGroup) -> None:
        self._torch: Any = sys.modules["torch"]
        self._options: Any = sys.modules["torch.distributed.distributed_c10d"]
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._group: Any = group
        try:
            backend = group._get_backend(self._torch.device("cpu"))
            found = backend.name()
        except RuntimeError:
            found = "nothing"
        if found != "gloo":
            raise ValueError(
                f"{found} carries the CPU tensors of this group, and a collective needs gloo: make a group "
                "by torch.distributed.new_group(backend='gloo'), on all processes"
            )
        self._timeout: float = backend.options._timeout.total_seconds()

    def copy(self, bound: float) -> TorchRanks:
        return self

    def maximum(self, values: Sequence[int], bound: float) -> Sequence[int]:
        tensor = self._torch.tensor(values, dtype=self._torch.int64)
        options = self._options.AllreduceOptions()
        options.reduceOp = self._options.ReduceOp.MAX
        self._run(self._group.allreduce, [tensor], options=options, bound=bound)
        most: list[int] = tensor.tolist()
        return most

    def allgather(self, mine: bytes, bound: float) -> bytes:
        whole = bytearray(len(mine) * self.size)
        parts = list(self._bytes(whole).split(len(mine)))
        own, options = self._bytes(bytearray(mine)), self._options.AllgatherOptions()
        self._run(self._group.allgather, [parts], [own], options=options, bound=bound)
        return bytes(whole)

    def broadcast(self, part: memoryview, root: int, bound: float) -> None:
        options = self._options.BroadcastOptions()
        options.rootRank = root
        # torch warns of memory that cannot be written, also at the root
        tensor = self._bytes(bytearray(part) if part.readonly else part)
        self._run(self._group.broadcast, [tensor], options=options, bound=bound)

    def attributes(self) -> dict[str, Any]:
        return _attributes.setdefault(self._group, {})

    def free(self) -> None:
        pass  # the group is the program's

    def _bytes(self, buffer: Buffer) -> Any:
        return self._torch.frombuffer(buffer, dtype=self._torch.uint8)

    def _run(self, exchange: Callable[..., Any], *tensors: object, options: Any, bound: float) -> None:
        bound = min(bound, self._timeout)
        options.timeout = timedelta(seconds=bound + _GRACE)
        try:
            work = exchange(*tensors, options)
            wait_for(work.is_completed, bound, work, tensors)
            work.wait()
        except RuntimeError as error:
            said = re.sub(r"^\[.*?\] ", "", str(error)).partition(". ")[0]  # without the line of its source
            raise ConnectionError(f"a rank has left, and gloo's connections with it ({said})") from error
