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
