from typing_extensions import Buffer

def frame(
    to: Buffer,
    at: int,
    header: Buffer,
    k: int,
    block: int,
    first: int,
    count: int,
    segments: Buffer = ...,
    begin: int = ...,
    size: int = ...,
    /,
) -> None: ...

class Placer:
    def __new__(cls, header: bytes, /) -> Placer: ...
    def begin(self, session: int, source: bytes, /) -> None: ...
    def end(self, session: int, /) -> None: ...
    def open(
        self,
        session: int,
        object: int,
        block: int,
        wanted: bytes,
        need: int,
        memory: Buffer | None,
        parity: Buffer | None,
        segment: int,
        k: int,
        /,
    ) -> None: ...
    def close(self, session: int, object: int, block: int, /) -> None: ...
    def place(
        self, records: bytes, memory: Buffer, first: int, /
    ) -> tuple[
        int,
        list[tuple[int, int, int, bytes, int]],
        tuple[int, int] | tuple[int, int, int] | None,
        int,
    ]: ...
