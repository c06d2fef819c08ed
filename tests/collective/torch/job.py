"""The torchrun job of test_ranks.py: ranks on `udp`, each of which compares its result with gloo's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

from examples.torch_weights.torch_weights import train
from mcast import collective
from mcast.cast.io.sinks import BufferSink
from mcast.collective import Collective, RankFailed

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
WORLD: Any = dist.group.WORLD
RANK, SIZE = dist.get_rank(), dist.get_world_size()
LAST = SIZE - 1
DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
QUANTIZED = {"qint8", "qint32", "quint8", "quint2x4", "quint4x2"}
"""Quantized dtypes, which are refused, because a tensor is more than its bytes."""


def random(dtype: Any, count: int, seed: int) -> Any:
    """Return a tensor of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    size = count * torch.empty(0, dtype=dtype).element_size()
    # every byte is a valid bool only if it is 0 or 1
    values = torch.randint(2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return values.view(dtype)


def raw(tensor: Any) -> Any:
    """Return the bytes of a tensor, which are equal for NaN, too."""
    return tensor.view(torch.uint8)


def by_gloo(exchange: Any, tensor: Any) -> bool:
    """Return True if gloo has that dtype; else run the exchange on the tensor's bytes."""
    try:
        exchange(tensor)
    except (RuntimeError, TypeError, ValueError):
        exchange(raw(tensor))
        return False
    return True


def every_dtype_is_broadcast_as_by_gloo(ranks: Collective) -> None:
    compared = set()
    for dtype in DTYPES:
        name = str(dtype).partition(".")[2]
        if name in QUANTIZED:
            continue
        for root in (0, LAST):
            ours, gloos = random(dtype, 5000, RANK), random(dtype, 5000, RANK)
            where = ours.data_ptr()
            ranks.broadcast(ours, root)
            if by_gloo(lambda tensor, root=root: dist.broadcast(tensor, root), gloos):
                compared.add(name)
            assert ours.data_ptr() == where
            assert raw(ours).equal(raw(gloos)), dtype
            assert raw(ours).equal(raw(random(dtype, 5000, root))), dtype
    named = {"bfloat16", "float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"}
    assert named | {"complex64", "complex128"} <= compared, compared


def every_dtype_is_gathered_as_by_gloo(ranks: Collective) -> None:
    for dtype in DTYPES:
        if str(dtype).partition(".")[2] in QUANTIZED:
            continue
        mine = random(dtype, 33, RANK)
        into = torch.empty(SIZE * 33, dtype=dtype)
        parts = ranks.allgather(mine, into)
        gloos = [torch.zeros_like(raw(mine)) for _ in range(SIZE)]
        dist.all_gather(gloos, raw(mine))
        assert raw(into).equal(torch.cat(gloos)), dtype
        assert all(bytes(part) == bytes(one.tolist()) for part, one in zip(parts, gloos, strict=True))


def tensors_are_filled_in_their_place(ranks: Collective) -> None:
    large = torch.zeros(4, 6)
    ranks.broadcast(large[1:3] if RANK else torch.ones(2, 6))
    assert large.sum() == 12 * (RANK > 0)
    parameter = torch.nn.Parameter(torch.full((3,), float(RANK)))
    ranks.broadcast(parameter, LAST)
    assert parameter.tolist() == [LAST] * 3
    scalar = torch.tensor(float(RANK))
    ranks.broadcast(scalar, 1)
    assert scalar == 1
    ranks.broadcast(torch.empty(0, 4))
    ranks.broadcast(bytearray(b"mcast" if RANK == 0 else 5))
    sizes = [len(part) for part in ranks.allgather(torch.zeros(RANK, dtype=torch.bfloat16))]
    assert sizes == [2 * rank for rank in range(SIZE)]


class Wrapper(torch.Tensor):  # type: ignore[misc]  # torch is Any for a checker without it
    """A tensor of four floats that are elsewhere, as a DTensor is."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32, device="cpu")

    @classmethod
    def __torch_dispatch__(cls, operation: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(operation)


@contextmanager
def all_raise(failing: int, error: type[Exception], words: str) -> Iterator[None]:
    """The rank that fails raises its own error, and each of the others one that names the rank."""
    with pytest.raises(error if failing == RANK else RankFailed, match=words) as raised:
        yield
    assert failing == RANK or failing in raised.value.failed  # type: ignore[attr-defined]


def tensors_without_plain_memory_are_refused(ranks: Collective) -> None:
    whole = torch.zeros(4)
    for wrong, words in (
        (torch.zeros(4, 4)[:, :1], r"lie apart in memory: give a copy by \.contiguous"),
        (torch.zeros(2, dtype=torch.complex64).conj(), r"lazy conjugate: give \.resolve_conj"),
        (torch.zeros(4, device="meta"), r"is on meta: give a copy by \.cpu"),
        (torch.zeros(4).to_sparse(), "lie apart in memory"),
        (torch.quantize_per_tensor(torch.zeros(4), 0.5, 0, torch.qint32), r"quantized.*give \.int_repr"),
        (Wrapper(), "this Wrapper has no memory of its own"),
    ):
        with all_raise(1, TypeError, words):
            ranks.broadcast(wrong if RANK == 1 else whole)
        with all_raise(1, TypeError, words):
            ranks.allgather(wrong if RANK == 1 else whole)
    with pytest.raises(ValueError, match="rank 1 broadcasts 20 bytes from rank 0"):
        ranks.broadcast(torch.zeros(4 + (RANK == 1)))
    with all_raise(2, ValueError, "all ranks together have"):
        ranks.allgather(whole, torch.zeros(4 * SIZE + (RANK == 2)))


def bytes_leave_the_root_once(ranks: Collective) -> None:
    """Counted at the interface: segments, feedback, repairs, and what gloo says to agree."""
    tensor = torch.full((16 << 20,), RANK, dtype=torch.bfloat16)
    ranks.broadcast(tensor)  # the sender has found its rate
    tensor.fill_(RANK + 1)
    assert ranks.endpoint is not None
    dist.barrier()
    endpoint, wire = ranks.endpoint.stats().sent_bytes, transmitted()
    dist.barrier()
    ranks.broadcast(tensor)
    assert tensor.eq(1).all()
    dist.barrier()
    if RANK == 0:
        endpoint, wire = ranks.endpoint.stats().sent_bytes - endpoint, transmitted() - wire
        sys.stdout.write(f"root: {endpoint / tensor.nbytes:.4f} {wire / tensor.nbytes:.4f}\n")


def transmitted() -> int:
    """Return the bytes that this network's interface has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return sum(int(line.split(":")[1].split()[8]) for line in lines if ":" in line)


def gloo_carries_the_bytes_where_one_rank_has_no_group() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcast").addHandler(handler)
    with Collective(WORLD, "udp", bind="10.254.0.9" if RANK == 2 else None) as ranks:
        assert ranks.reason.startswith("rank 2: ValueError: no port has the address 10.254.0.9"), ranks.reason
        with patch.object(collective.agreement, "MAX_PART", 10_000):
            every_dtype_is_broadcast_as_by_gloo(ranks)
        tensors_are_filled_in_their_place(ranks)
        tensors_without_plain_memory_are_refused(ranks)
        read_only = b"mcast" if RANK == 0 else bytearray(5)
        ranks.broadcast(read_only)
        assert read_only == b"mcast"
    words = f"gloo carries the bytes of {SIZE} ranks, not multicast: {ranks.reason}"
    assert [one for one in said if "carries" in one] == [words][: RANK == 0]
    logging.getLogger("mcast").removeHandler(handler)


def a_group_numbers_its_ranks() -> None:
    """The two last ranks, in another order; the other ranks are not in the group."""
    group = dist.new_group([LAST, LAST - 1], backend="gloo")
    if RANK < LAST - 1:
        with pytest.raises(TypeError, match=r"nor a torch\.distributed group that this process is in"):
            Collective(group, "udp")
        return
    with Collective(group, "udp") as ranks:
        assert not ranks.reason, ranks.reason
        assert ranks.rank == dist.get_rank(group)
        tensor = torch.tensor([RANK])
        ranks.broadcast(tensor, 1)
        assert tensor.item() == dist.get_global_rank(group, 1)


def a_group_without_gloo_is_refused() -> None:
    group: Any = dist.new_group(backend="fake")
    with pytest.raises(ValueError, match="a collective needs gloo: make a group by torch"):
        Collective(group, "udp")


def single_calls_share_a_collective() -> None:
    for turn in range(2):
        tensor = torch.full((9,), float(turn + RANK))
        collective.broadcast(tensor, comm=WORLD, backend="udp")
        assert tensor.tolist() == [turn] * 9
    assert collective.cached._of(WORLD, "udp") is collective.cached._of(WORLD, "udp")
    assert [bytes(part) for part in collective.allgather(b"%d" % RANK, comm=WORLD, backend="udp")] == [
        b"%d" % rank for rank in range(SIZE)
    ]


def a_rank_that_fails_in_the_middle_ends_the_call_on_all() -> None:
    ranks = Collective(WORLD, "udp")
    broken = patch.object(BufferSink, "buffer_at", side_effect=MemoryError("no room"))
    with all_raise(1, MemoryError, "no room"):
        if RANK == 1:
            broken.start()
        ranks.broadcast(torch.zeros(100_000))
    broken.stop() if RANK == 1 else None
    with pytest.raises(RuntimeError, match="this collective has ended"):
        ranks.broadcast(torch.zeros(1))


def an_error_between_two_calls_reaches_the_others() -> None:
    with all_raise(1, LookupError, "of rank 1's own"), Collective(WORLD, "udp") as ranks:
        if RANK == 1:
            raise LookupError("of rank 1's own")
        ranks.allgather(b"")


def the_timeout_of_the_group_holds() -> None:
    """The rank that does not come is waited for 2 s, although `wait` has no end."""
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    ranks = Collective(group, "udp", peer_timeout=2)
    begun = monotonic()
    if RANK != 1:
        with pytest.raises(TimeoutError, match=r"within 2 s"):
            ranks.broadcast(torch.zeros(1))
        assert 1.9 < monotonic() - begun < 10
    dist.barrier()
    if RANK == 1:  # whose exchange may still meet those that the others have abandoned
        with pytest.raises((ConnectionError, RankFailed)):
            ranks.broadcast(torch.zeros(1))
    dist.barrier()


def main() -> None:
    with Collective(WORLD, "udp") as ranks:
        assert not ranks.reason, ranks.reason
        every_dtype_is_broadcast_as_by_gloo(ranks)
        every_dtype_is_gathered_as_by_gloo(ranks)
        tensors_are_filled_in_their_place(ranks)
        tensors_without_plain_memory_are_refused(ranks)
        bytes_leave_the_root_once(ranks)
    gloo_carries_the_bytes_where_one_rank_has_no_group()
    a_group_numbers_its_ranks()
    a_group_without_gloo_is_refused()
    single_calls_share_a_collective()
    a_rank_that_fails_in_the_middle_ends_the_call_on_all()
    an_error_between_two_calls_reaches_the_others()
    the_timeout_of_the_group_holds()
    assert train(WORLD, "udp") == [6.0 + rank for rank in range(SIZE)]
    dist.barrier()
    sys.stdout.write(f"rank {RANK} is done\n")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
