"""The fast calls in C, and the switch that lets the one implementation serve instead of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from mcast.api import Batch, QueuePair
from mcast.backends.rdma.batch import RdmaBatch
from mcast.backends.rdma.calls import Calls, Lease
from mcast.backends.rdma.qp import RdmaQueuePair

FAST: dict[type, tuple[type, type]] = {RdmaQueuePair: (Calls, QueuePair), RdmaBatch: (Lease, Batch)}
"""The provider's class -> where its fast calls are, and where the one implementation of them is."""

_HOOK = re.compile("_[a-z]")


def fast_calls(provider: type) -> frozenset[str]:
    """The calls that the class has twice, in C and in the contract; those like `_recv` are in C alone."""
    fast, contract = FAST[provider]
    there = {name: getattr(contract, name) for one in contract.__mro__[:-1] for name in vars(one)}
    whole = {name for name, one in there.items() if not getattr(one, "__isabstractmethod__", False)}
    calls = {name for name in vars(fast) if callable(getattr(fast, name)) and not _HOOK.match(name)}
    return frozenset(whole & calls)


@contextmanager
def one_implementation(*names: str) -> Iterator[None]:
    """Inside the block the contract's own methods of these names serve; without names, all that are fast."""
    instead = [
        patch.object(provider, name, getattr(contract, name), create=True)
        for provider, (_, contract) in FAST.items()
        for name in fast_calls(provider) & set(names or fast_calls(provider))
    ]
    for one in instead:
        one.start()
    try:
        yield
    finally:
        for one in instead:
            one.stop()
