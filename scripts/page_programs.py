"""Write the Python blocks of the pages into a folder, one folder for each page, for ruff and mypy.

usage: python -m scripts.page_programs FOLDER
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.house.test_docs import PAGES, fences, is_file_name


def main(folder: Path) -> None:
    """Replace the folder by one with a file for each block."""
    shutil.rmtree(folder, ignore_errors=True)
    for page in PAGES:
        blocks = [fence for fence in fences(page) if fence.language == "python"]
        home = folder / page.stem.lower().replace("-", "_")
        for fence in blocks:
            home.mkdir(parents=True, exist_ok=True)
            name = fence.title if is_file_name(fence.title) else f"{home.name}_{fence.line}.py"
            (home / name).write_text(fence.text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
