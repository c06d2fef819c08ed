"""Recorded terminal sessions for README.md and the documentation; `make sessions` records them again.

Each command is run in a directory of its own; each line of its output is kept with the time of its coming.
The picture is an SVG that shows the lines at those times, once, and needs no other file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
SESSIONS = {"demo": ("mcast demo",)}
"""Name of a picture, `docs/assets/session-NAME.svg` -> the commands that it shows."""

COLUMNS = 80
LONGEST_PAUSE = 1.5
"""Seconds for which a picture may stand still: a busy machine takes longer than a reader waits."""
TYPING = 1.0
"""Seconds after a prompt until its output begins, at the least."""
MAX_LINES = 24
"""Of one command's output; what is between the first and the last lines is left out, and said so."""

FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif; }}
@keyframes appear {{ from {{ opacity: 0; }} to {{ opacity: 1; }} }}
.late {{ animation: appear 1ms both; }}
@media (prefers-reduced-motion: reduce) {{ .late {{ animation: none; }} }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


class Line(NamedTuple):
    at: float
    text: str
    prompt: bool = False


def recorded_lines(commands: tuple[str, ...]) -> Iterator[Line]:
    """The lines of a session, each with the seconds after which it stands there."""
    at = 0.0
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MCAST_")}
    environ |= {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        for command in commands:
            yield Line(at, f"$ {command}", True)
            at += TYPING
            taken = list(_run(command, folder, environ))
            for pause, text in _shortened(taken):
                at += min(pause, LONGEST_PAUSE)
                yield Line(at, text)
            at += TYPING


def _run(command: str, folder: str, environ: dict[str, str]) -> Iterator[tuple[float, str]]:
    """Each line of the output, and the seconds since the line before."""
    with subprocess.Popen(
        command,
        shell=True,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        last = time.monotonic()
        for line in process.stdout:
            now = time.monotonic()
            yield now - last, line.rstrip()
            last = now
    if process.returncode:
        raise SystemExit(f"{command}: status {process.returncode}")


def _shortened(lines: list[tuple[float, str]]) -> list[tuple[float, str]]:
    if len(lines) <= MAX_LINES:
        return lines
    half = MAX_LINES // 2
    left = len(lines) - 2 * half
    return [*lines[:half], (0.2, f"    … {left} lines more …"), *lines[-half:]]


def picture(name: str, lines: list[Line]) -> str:
    """The session as SVG."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    times = []
    for line in lines:
        text = Text(line.text, "bold green" if line.prompt else "")
        rows = text.wrap(console, COLUMNS) or [Text("")]
        times += [line.at] * len(rows)
        for row in rows:
            console.print(row)
    drawn = console.export_svg(
        title=" ".join(SESSIONS[name][0].split()[:2]), code_format=FORMAT, unique_id=name
    )

    def delayed(found: re.Match[str]) -> str:
        return f'<text class="{found[1]} late" style="animation-delay:{times[int(found[3])]:.2f}s"{found[2]}'

    return re.sub(r'<text class="([^"]*)"([^>]*-line-(\d+)\)")', delayed, drawn)


def main() -> None:
    for name, commands in SESSIONS.items():
        path = ROOT / "docs" / "assets" / f"session-{name}.svg"
        path.write_text(picture(name, list(recorded_lines(commands))), "utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
