"""Arbitrary messages of the file protocol."""

from __future__ import annotations

from hypothesis import strategies as st

from mcast.cast import packets
from mcast.cast.packets import (
    Ask,
    Close,
    Data,
    Done,
    End,
    Hello,
    Join,
    Packet,
    Reason,
    Report,
    Verdict,
    Welcome,
)

words = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
u64, u32, u16 = (st.integers(0, (1 << bits) - 1) for bits in (64, 32, 16))
KINDS: dict[type[Packet], st.SearchStrategy[Packet]] = {
    Hello: st.builds(Hello, u64, u64, words),
    Join: st.builds(Join, u64, u64, u16, u16, words),
    Welcome: st.builds(Welcome, u64, u64),
    Data: st.builds(Data, u64, u64, st.binary(min_size=1, max_size=50)),
    Ask: st.builds(Ask, u64, u64, u32),
    Report: st.builds(Report, u64, u64, u32, u64, u16, st.integers(0, (1 << packets.WINDOW) - 1)),
    End: st.builds(End, u64, u64, u64, st.binary(min_size=32, max_size=32)),
    Done: st.builds(Done, u64, u64, st.sampled_from(Verdict), words),
    Close: st.builds(Close, u64, u64, st.sampled_from(Reason), words),
}
any_packet = st.one_of(*KINDS.values())
