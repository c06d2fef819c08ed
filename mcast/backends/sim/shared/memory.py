"""A client's part of the shared memory: its own ring, the server's page, and the rings of others."""

from __future__ import annotations

import os
from collections.abc import Callable

from mcast.backends.sim.shared.rings import PageReader, RingReader, RingWriter

MOST_RINGS = 128
"""Rings of others that are kept mapped; of more, the one mapped first is let go."""


class SharedMemory:
    """`ring` is None where the kernel seals no memory, and `page` where the server's cannot be mapped."""

    def __init__(self) -> None:
        self.ring: RingWriter | None = None
        self.page: PageReader | None = None
        self.posts: int = -1
        """The pipe that posts of one message go into."""
        self._readers: dict[int, RingReader] = {}
        try:
            self.ring = RingWriter()
        except (OSError, AttributeError):  # AttributeError: Python was built for an older kernel
            pass

    def take_page(self, fd: int) -> None:
        """Map the server's page; the descriptor is this object's, and closed."""
        try:
            self.page = PageReader(fd)
        except (OSError, ValueError):  # then every send is a request
            pass
        finally:
            os.close(fd)

    def take_posts(self, fd: int) -> None:
        """The server has made the pipe; the descriptor is this object's."""
        if self.posts >= 0:
            os.close(self.posts)
        self.posts = fd

    def known(self, number: int) -> RingReader | None:
        """Somebody's ring, if it is mapped."""
        return self._readers.get(number)

    def reader(self, number: int, ask: Callable[[], int | None]) -> RingReader | None:
        """Somebody's ring, whose descriptor `ask` gets the first time; None where it is not to be had."""
        found = self._readers.get(number)
        if found is None:
            fd = ask()
            if fd is None:
                return None
            try:
                found = RingReader(fd)
            except (OSError, ValueError):
                return None
            finally:
                os.close(fd)
            page = self.page
            kept = {one: ring for one, ring in self._readers.items() if page and page.is_open(one)}
            while len(kept) >= MOST_RINGS:
                del kept[next(iter(kept))]
            self._readers = {**kept, number: found}
        return found

    def close(self) -> None:
        """Let go of all memory: a mapping, and the descriptor that it keeps, end with the last call there."""
        ring, self.ring, self.page, self._readers = self.ring, None, None, {}
        if ring is not None:
            ring.forget_descriptor()
        pipe, self.posts = self.posts, -1
        if pipe >= 0:
            os.close(pipe)
