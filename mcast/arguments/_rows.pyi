from typing_extensions import Buffer

def copy_rows(
    to: Buffer, at: int, apart: int, of: Buffer, begin: int, step: int, size: int, count: int, /
) -> None: ...
