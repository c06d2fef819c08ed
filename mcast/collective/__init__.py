"""Collectives for MPI and PyTorch jobs: multicast carries the bytes.

mpi4py or torch.distributed starts, numbers and synchronises the ranks.

`Collective` is what a program keeps for its loop. `broadcast` and `allgather` are for single calls: the first
one of a communicator makes its collective, and the later ones use it.

Each rank that sends has a group, in which it is the sender of `mcast.cast` and the other ranks are receivers.
A call has three steps. All ranks agree on it, by one reduction: that they call the same, and that
none has a buffer that cannot be. The root sends one object, which carries a token that only the ranks know;
what fails on a rank ends its part in the group, which the others hear. Then all agree on the outcome.
"""

from __future__ import annotations

from mcast.collective.agreement import RankFailed
from mcast.collective.cached import allgather, broadcast
from mcast.collective.calls import Collective

__all__ = ["Collective", "RankFailed", "allgather", "broadcast"]
