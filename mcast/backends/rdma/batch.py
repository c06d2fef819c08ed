"""Received messages: records that C filled in, payloads where the device put them."""

from __future__ import annotations

import signal
import threading

from mcast.api import Batch, Gid, Message, QueuePair
from mcast.backends.rdma.calls import Calls, Lease, set_up

__all__ = ["Calls", "RdmaBatch"]


class RdmaBatch(Lease, Batch):
    """Views of a queue pair's receive memory. Releasing the batch posts the receives again, in one chain."""


set_up(QueuePair, Batch, RdmaBatch, Message, Gid, signal.set_wakeup_fd, threading.main_thread().ident)
