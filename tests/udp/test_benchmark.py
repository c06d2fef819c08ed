"""benchmarks/udp: a sender keeps to its window while a receiver waits for a processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.udp import peer


def test_a_receiver_that_pauses_is_not_overrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For two seconds nothing is taken: these messages wait, and are not lost."""
    path = tmp_path / "credits"
    path.write_bytes(bytes(peer.Credits.BYTES))
    sender, receiver = peer.Credits(path), peer.Credits(path)
    now, sent, taken, ahead = 0.0, 0, 0, 0

    def send(count: int) -> None:
        nonlocal sent, ahead
        sent += count
        ahead = max(ahead, sent - taken)

    def sleep(seconds: float) -> None:
        nonlocal now, taken
        now += 0.1
        if now > 2:
            taken = sent
            receiver.got(0, taken)

    monkeypatch.setattr(peer, "monotonic", lambda: now)
    monkeypatch.setattr("benchmarks.udp.peer.time.sleep", sleep)
    sender.pace(1, 4 * peer.WINDOW, send)
    assert (sent, ahead) == (4 * peer.WINDOW, peer.WINDOW)
