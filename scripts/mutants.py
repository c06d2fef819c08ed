"""`make mutants`: plants mistakes by rule, by mutmut, and says which of them no test and no type finds.

Of each module it takes the same random share for the same seed; a larger share has all of a smaller one.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections import Counter
from math import ceil
from pathlib import Path

from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import walk_mutatable_files
from mutmut.utils.format_utils import get_mutant_name

FOUND = ("killed", "caught by type check", "timeout")
"""How a mutant ends that was found. A time-out is a hang, and wants a look whether it is the mutant's."""


def mutants(path: Path) -> list[str]:
    """The names of all mutants of a module."""
    made = mutate_file_contents(str(path), path.read_text("utf-8"))
    return [get_mutant_name(path, name) for name in made.mutant_names]


def drawn(path: Path, names: list[str], seed: int, share: float) -> list[str]:
    """The first of the names in the order that the seed gives."""
    order = random.Random(f"{seed} {path}").sample(names, len(names))
    return order[: ceil(len(order) * share)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.1, help="of the mutants of each module")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="PATH", help="modules whose path begins so")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    paths = [path for path in sorted(walk_mutatable_files()) if str(path).startswith(given.only)]
    every = {path: mutants(path) for path in paths}
    taken = {path: drawn(path, names, given.seed, given.share) for path, names in every.items()}
    names = [name for some in taken.values() for name in some]
    tools = Path(sys.executable).parent  # mypy is there, too
    subprocess.run(
        [tools / "mutmut", "run", "--max-children", str(given.workers), *names],
        env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"},
        check=True,
    )
    columns = ("all", "run", "tests", "types", "hangs", "unseen")
    print(f"{'module':40}", *(f"{column:>6}" for column in columns))
    unseen = []
    for path, some in taken.items():
        data = SourceFileMutationData(path=path)
        data.load()
        ends = {name: status_by_exit_code[data.exit_code_by_key[name]] for name in some}
        unseen += [f"{name}: {end}" for name, end in ends.items() if end not in FOUND]
        count = Counter(ends.values())
        found = [count[end] for end in FOUND]
        row = (len(every[path]), len(some), *found, len(some) - sum(found))
        print(f"{path!s:40}", *(f"{figure:6}" for figure in row))
    print(*unseen, "Look at one by: .venv/bin/mutmut show NAME", sep="\n")


if __name__ == "__main__":
    main()
