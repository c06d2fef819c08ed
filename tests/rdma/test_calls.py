"""The calls in C, on a card made of memory: what they do where all is in order, and what they leave behind.

One process for each test: the libraries are loaded once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..card.build import build

ROOT = Path(__file__).parents[2]

PRELUDE = """
import gc, os, resource, signal, sys, threading, time
from tests.card.card import Card
import numpy, pytest
from mcast.api import Closed, McastError, QpState
from mcast.api import RECORD_DTYPE
from benchmarks.rdma.ours import End, null_backend
backend = null_backend(["10.0.0.1"])
end = End(backend, "10.0.0.1")
group, qp = end.join("239.1.1.1"), end.qp
free = lambda: qp.counters.recv_free
depth = free()
"""

THE_END = """
backend.close()
card = Card(os.environ["MCAST_LIBRDMACM"])
assert card.reports() == card.leftovers() == ()
"""

SCRIPTS = {
    "every kind of payload arrives, in order": """
sent = [b"", b"bytes", bytearray(b"array"), memoryview(b"view"), numpy.arange(300, dtype="u1").data]
for batch in (sent, tuple(sent), sent * 60):
    assert qp.send(group, batch, 7) == len(batch)
    for payload in batch:
        message = qp.recv_one(1)
        assert bytes(message.payload) == bytes(payload)
        assert (message.imm, message.src_qp, str(message.group)) == (7, qp.qp_num, "::ffff:239.1.1.1")
assert qp.recv_one(0) is None and qp.recv_one(timeout=0.01) is None
assert free() == depth
""",
    "a released batch shows nothing, a dropped one gives its receives back": """
qp.send(group, [b"a", b"b"])
batch = qp.recv(8, 1)
payload = batch[1].payload
assert (len(batch), batch.lengths, free()) == (2, [1, 1], depth - 2)
batch.release()
batch.release()
assert free() == depth
for look in (lambda: payload[0], lambda: batch[0], lambda: list(batch), lambda: batch.memory):
    with pytest.raises(ValueError): look()
qp.send(group, [b"a", b"b"])
batch = qp.recv(8, 1)
views = [message.payload for message in batch]
del batch, views
assert free() == depth
""",
    "closing a queue pair that others use ends their calls": """
sys.setswitchinterval(1e-6)

def use(call, entered):
    with pytest.raises(Closed):
        while True:
            entered.set()
            call()

for _ in range(100):
    used, entered = End(backend, "10.0.0.1"), threading.Event()
    one, target = used.qp, used.join("239.1.1.1")
    calls = [lambda: one.recv_one(0.01), lambda: one.recv(4, 0.01), lambda: one.send_one(target, b"x")]
    threads = [threading.Thread(target=use, args=(call, entered)) for call in calls]
    for thread in threads: thread.start()
    entered.wait(100)
    used.close()
    for thread in threads: thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
""",
    "a payload that is in use keeps its receives": """
qp.send(group, [b"kept"])
batch = qp.recv(1, 1)
for use in (lambda: batch[0].payload[1:], lambda: numpy.frombuffer(batch[0].payload, "u1")):
    user = use()
    with pytest.raises(BufferError): batch.release()
    assert (bytes(user)[-3:], free()) == (b"ept", depth - 1)
    del user
batch.release()
assert free() == depth
""",
    "registered memory is received into, and sent from": """
qp.register(rows := bytearray(8 * 64), 64)
qp.send(group, [b"one", b"three"])
with qp.recv(8, 1) as batch:
    columns = numpy.frombuffer(batch.records, RECORD_DTYPE)
    assert columns["length"].tolist() == [3, 5]
    first, second = columns["offset"]
    assert (rows[first : first + 3], rows[second : second + 5]) == (b"one", b"three")
    assert len(batch.memory) == len(rows)
other = bytearray(b"0123456789" * 40)
with qp.register(other):
    qp.send(group, [memoryview(other)[390:], memoryview(other)[:50]])
    assert [bytes(message.payload) for message in qp.recv(2, 1)] == [b"0123456789", b"0123456789" * 5]
""",
    "an error state ends sends and receives": """
qp.modify(QpState.ERR)
sends = (lambda: qp.send_one(group, b""), lambda: qp.send(group, [b""]))
for call in (*sends, lambda: qp.recv(1, 1), lambda: qp.recv_one(1)):
    with pytest.raises(McastError): call()
qp.reset()
qp.send_one(group, b"again")
assert bytes(qp.recv_one(1).payload) == b"again"
""",
    "closing ends a call of another thread": """
failed = []
def wait():
    try:
        qp.recv_one()
    except Closed as error:
        failed.append(error)
thread = threading.Thread(target=wait)
thread.start()
qp.send(group, [])
threading.Timer(0.2, qp.close).start()
thread.join(100)
assert len(failed) == 1 and not thread.is_alive()
with pytest.raises(Closed): qp.send_one(group, b"")
""",
    "a signal that another thread takes ends a wait": """
class Interrupted(Exception): pass
def interrupt(number, frame): raise Interrupted
signal.signal(signal.SIGUSR1, interrupt)
def take():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # which it has from who started it
    os.kill(os.getpid(), signal.SIGUSR1)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
for wait in (qp.recv_one, lambda seconds: qp.recv(1, seconds)):
    thread = threading.Timer(0.3, take)
    with pytest.raises(Interrupted):
        thread.start()
        wait(1000)
    thread.join()
""",
    "who waits sleeps": """
before = resource.getrusage(resource.RUSAGE_THREAD)
assert qp.recv_one(2.5) is None
after = resource.getrusage(resource.RUSAGE_THREAD)
assert after.ru_nvcsw - before.ru_nvcsw <= 4
""",
    "a fork uses nothing of its parent": """
qp.send_one(group, b"for the parent")
child = os.fork()
if not child:
    try:
        qp.recv_one(0)
    except McastError as error:
        os._exit(error.errno)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9  # EBADF
assert bytes(qp.recv_one(1).payload) == b"for the parent"
""",
    "nothing is left of many queue pairs": """
def resident():
    gc.collect()
    with open("/proc/self/statm") as file: return int(file.read().split()[1])
def cycle():
    one = End(backend, "10.0.0.1")
    to = one.join("239.1.1.2")
    one.qp.send(to, [b"x"] * 4)
    held = one.qp.recv(4, 1)
    assert bytes(held[0].payload) == b"x"
    one.close()
def grown():
    before = resident()
    for _ in range(100): cycle()
    return resident() - before
for _ in range(30): cycle()
pages = [grown()]
while pages[-1] >= 100 and len(pages) < 3:  # the kernel may give a huge page meanwhile, and not each time
    pages.append(grown())
assert pages[-1] < 100, pages
""",
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_on_a_card_of_memory(what: str) -> None:
    library = str(build())
    environment = {**os.environ, "MCAST_LIBRDMACM": library, "MCAST_LIBIBVERBS": library}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + SCRIPTS[what] + THE_END],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert (done.returncode, done.stderr) == (0, "")
