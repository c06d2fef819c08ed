"""README.md, CONTRIBUTING.md, lab/README.md, docs/: the site builds; what a page shows runs, and prints that.

The fences of a page are run in order, in one directory. By the first word of the fence:

  python            in this process, with a namespace of its own
  sh                by bash, the project's commands first on the PATH
  toml, yaml, json  parsed
  text              what the block before it prints, if its title begins with "prints"

A title that is a file name has the block written to that file; a python file is run
by a sh block after it. `title="prints, figures vary"` compares all but the numbers. A block with
`title="not run by the tests: WHY"` is never run; WHY is a key of NOT_RUN, which says what such a block may
hold.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from html import unescape
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from markdown_it import MarkdownIt

from mcast import backend_names
from mcast.cli import SUMMARIES, load
from scripts import tables

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "lab/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
SECONDS = 900
"""The longest that one block may take, against hangs: the lab is emulated, maybe on a busy machine."""

pytestmark = pytest.mark.timeout(2 * SECONDS)

NOT_RUN = {
    "it needs an RDMA host": "mcast rdma ip bridge cat ls echo modprobe ulimit sminfo saquery docker srun "
    "mpirun sudo python",
    "it needs other hosts, and mail": "mcast jq mail exit",
    "it fetches packages": "make mkdir cd . pip podman python3 sudo venv/bin/pip MCAST_RDMA=1",
    "it takes minutes": "make mcast rdma-lab pre-commit .venv/bin/pytest dpkg /sbin/depmod mkdir cp",
    "it needs a running guest": "rdma-lab",
    "it is a prompt": "mcast",
    "it needs PyTorch": "torchrun",
}
"""Why a block may stay unrun -> the commands that such a block may name.

What needs PyTorch is run by tests/collective/torch/test_ranks.py.
"""

RUN_BY = ("", "it needs PyTorch")
"""Reasons of the blocks that are run, here or by `make test-torch`."""

LONG = "run by make test-all"
"""The title of a block that takes too long for `make test`."""


class Fence(NamedTuple):
    page: Path
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def not_run(self) -> str:
        """Why it is not run, or ""."""
        return (
            self.title.removeprefix("not run by the tests: ")
            if self.title.startswith("not run by the tests")
            else ""
        )


def fences(page: Path) -> list[Fence]:
    found = []
    for token in MarkdownIt().parse(page.read_text("utf-8")):
        if token.type == "fence":
            assert token.map is not None
            language, *rest = shlex.split(token.info) or [""]
            title = next((word[6:] for word in rest if word.startswith("title=")), "")
            found.append(Fence(page, token.map[0] + 1, language, title, token.content))
    return found


def with_output(found: list[Fence]) -> Iterator[tuple[Fence, Fence | None]]:
    """Each block with the block that shows its output, if there is one."""
    after: list[Fence | None] = [*found[1:], None][: len(found)]
    for fence, following in zip(found, after, strict=True):
        if not fence.title.startswith("prints"):
            shown = following is not None and following.title.startswith("prints")
            yield fence, following if shown else None


# --- running ---------------------------------------------------------------


def run_python(fence: Fence) -> str:
    out = StringIO()
    code = compile("\n" * fence.line + fence.text, str(fence), "exec", dont_inherit=True)
    with redirect_stdout(out):
        exec(code, {"__name__": "__main__"})
    return out.getvalue()


def run_shell(fence: Fence) -> str:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["timeout", str(SECONDS), "bash", "-eu", "-c", fence.text],  # with all that it has started
        env=kept | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{fence}: status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def parse(load: Callable[[str], object]) -> Callable[[Fence], str]:
    def parsed(fence: Fence) -> str:
        load(fence.text)
        return ""

    return parsed


RUN: dict[str, Callable[[Fence], str]] = {
    "python": run_python,
    "sh": run_shell,
    "toml": parse(tomllib.loads),
    "yaml": parse(yaml.safe_load),
    "json": parse(json.loads),
    "text": lambda fence: "",
}


def is_file_name(title: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+\.\w+", title))


def comparable(text: str, figures: bool) -> list[str]:
    lines = [line.rstrip() for line in text.strip().splitlines()]
    if figures:
        lines = [re.sub(r" +", " ", re.sub(r"[\d.,]*\d", "#", line)) for line in lines]
        lines = [re.sub(r"# [kMG]B/s", "# B/s", line) for line in lines]  # a slow machine has smaller units
        lines = [re.sub(r"(# passed in #s) \(#:#:#\)", r"\1", line) for line in lines]  # a slow pytest
    return lines


def check(fence: Fence, output: Fence | None) -> None:
    """Run one block, and compare what it prints with what the page shows."""
    if is_file_name(fence.title):
        Path(fence.title).write_text(fence.text, "utf-8")
    if fence.language == "python" and is_file_name(fence.title):
        compile(fence.text, str(fence), "exec")
        printed = ""
    else:
        printed = RUN[fence.language](fence)
    if output:
        figures = output.title == "prints, figures vary"
        assert comparable(printed, figures) == comparable(output.text, figures), (
            f"{output}: prints\n{printed}"
        )
    elif said := re.findall(r"print\(.*\)  # (.*)$", fence.text, re.M):
        assert printed.splitlines() == said, f"{fence}: prints\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_pages_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: bool, request: pytest.FixtureRequest
) -> None:
    """The examples of a page run, and print what the page shows."""
    if any(re.search(r"\budp\b", fence.text) for fence in fences(page) if not fence.not_run):
        request.getfixturevalue("own_network")
    # CONTRIBUTING.md, docs/dev/ and the reports speak of the clone, other pages of a directory of one's own.
    in_the_clone = page.name == "CONTRIBUTING.md" or page.parent.name in ("dev", "upstream")
    monkeypatch.chdir(ROOT if in_the_clone else tmp_path)
    for fence, output in with_output(fences(page)):
        if not fence.not_run and (long or fence.title != LONG):
            check(fence, output)


def test_every_block_has_a_language_that_is_checked() -> None:
    unknown = [
        f"{fence} {fence.language!r}" for page in PAGES for fence in fences(page) if fence.language not in RUN
    ]
    assert unknown == []


def test_only_blocks_with_a_reason_stay_unrun() -> None:
    unrun = [fence for page in PAGES for fence in fences(page) if fence.not_run]
    for fence in unrun:
        assert fence.language == "sh", fence
        assert fence.not_run in NOT_RUN, f"{fence}: {fence.not_run!r} is no reason"
        subprocess.run(["bash", "-n", "-c", fence.text], check=True)
        allowed = set(NOT_RUN[fence.not_run].split())
        assert commands(fence.text) <= allowed, f"{fence}: {commands(fence.text) - allowed}"


def commands(script: str) -> set[str]:
    """The first word of each line that begins a command."""
    joined = re.sub(r"\\\n", " ", script)
    lines = (line.partition("#")[0].strip() for line in joined.splitlines())
    return {line.split()[0] for line in lines if line}


def test_every_python_file_of_a_page_is_run() -> None:
    """Every python file of a page is run by a later block."""
    for page in PAGES:
        found = fences(page)
        for number, fence in enumerate(found):
            if fence.language == "python" and is_file_name(fence.title):
                later = (one.text for one in found[number:] if one.language == "sh" and one.not_run in RUN_BY)
                assert any(fence.title in text or "pytest" in text for text in later), fence


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("```python\nprint(1)\n```\n```text title=prints\n2\n```", "['1'] == ['2']"),
        ("```python\nprint(1)  # 2\n```", "['1'] == ['2']"),
        ("```sh\nfalse\n```", "status 1"),
        ('```sh\necho a 1\n```\n```text title="prints, figures vary"\nb 2\n```', "['a #'] == ['b #']"),
        (
            '```sh\necho 9 kB/s a\n```\n```text title="prints, figures vary"\n2 MB/s\n```',
            "['# B/s a'] == ['# B/s']",
        ),
    ],
)
def test_a_block_that_lies_is_found(
    page: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(page)
    ((fence, output),) = with_output(fences(tmp_path / "page.md"))
    with pytest.raises(AssertionError, match=re.escape(complaint)):
        check(fence, output)


# --- the site --------------------------------------------------------------


def build(root: Path, where: Path) -> subprocess.CompletedProcess[str]:
    # Without --quiet, which would hide warnings from --strict as well.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(where)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=SECONDS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it; any warning, of a broken link or anchor too, is an error."""
    where = tmp_path_factory.mktemp("site")
    done = build(ROOT, where)
    assert done.returncode == 0, done.stdout + done.stderr
    return where


def test_broken_link_fails_the_build(tmp_path: Path) -> None:
    """A broken link or a page out of reach fails the build."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    config |= {"hooks": [], "plugins": [], "extra_css": [], "nav": [{"Home": "index.md"}]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "index.md"
    page.write_text("# Fine\n\n[x](#fine)\n")
    assert build(tmp_path, tmp_path / "site").returncode == 0
    mistakes = ("nowhere.md", "#nowhere", "/nowhere.html")
    page.write_text(" ".join(f"[x]({link})" for link in mistakes))
    (tmp_path / "docs" / "second.md").write_text("# Not in nav\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    said = [line for line in (done.stdout + done.stderr).splitlines() if "INFO" not in line]
    assert [word for word in (*mistakes, "- second.md") if not any(word in line for line in said)] == []


class Fetched(HTMLParser):
    """Files that a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in {"script", "img", "iframe", "source"} or (
            tag == "link" and given.get("rel") != "canonical"
        ):
            self.found += [given[key] or "" for key in ("src", "href") if key in given]


def test_a_page_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        reader = Fetched()
        reader.feed(page.read_text("utf-8"))
        assert reader.found, page
        assert [url for url in reader.found if re.match(r"(\w+:)?//", url)] == [], page
    imported = [
        path for path in site.rglob("*.css") if re.search(r"url\(['\"]?(https?:)?//", path.read_text("utf-8"))
    ]
    assert imported == []


def test_the_search_needs_no_server(site: Path) -> None:
    """A page that was opened as a file cannot fetch the index, and may start no worker."""
    assert (site / "search" / "search_index.js").read_text("utf-8").startswith("var __index = {")
    for page in ("index.html", "facts/sa.html"):
        assert '/iframe-worker.js"' in (site / page).read_text("utf-8")


def test_an_id_leads_to_its_row(site: Path) -> None:
    links = [
        (page, anchor)
        for name, up in (
            ("errors.html", ""),
            *((f"reference/{name}.html", "../") for name in ("api", "errors")),
        )
        for page, anchor in re.findall(
            rf'href="{re.escape(up)}(facts/\w+\.html)#([\w-]+)"', (site / name).read_text("utf-8")
        )
    ]
    assert {"SA-PKEY-1", "K-JOIN-20", "DT-7", "JEX-15"} <= {anchor for _, anchor in links}
    for page, anchor in set(links):
        assert f'id="{anchor}"' in (site / page).read_text("utf-8")


def test_nothing_that_should_be_generated_is_left_out(site: Path) -> None:
    """Each name of the reference has its place, with a signature that is the code's."""
    found = 0
    for page in (ROOT / "docs/reference").glob("*.md"):
        shown = (site / "reference" / f"{page.stem}.html").read_text("utf-8")
        # A module's own text stands under the heading of the page.
        names = re.findall(
            r"^::: (\S+)$(?!\n    options:\n      show_root_heading: false)", page.read_text("utf-8"), re.M
        )
        assert [name for name in names if f'id="{name}"' not in shown] == []
        found += len(names)
    assert found > 200
    shown = unescape(re.sub("<[^>]*>", "", (site / "reference/sim.html").read_text("utf-8")))
    for part in (
        "partitions: Mapping[int, Iterable[int]] | None = None",
        "max_mlid: int = 65534",
        "set_link(port: Port, up: bool)",
    ):
        assert part in shown


# --- the workflow to copy ---------------------------------------------------


@pytest.fixture(scope="module")
def steps() -> list[str]:
    """Return the commands of the workflow's steps, in order; that of the lab's action is the last."""
    workflow = yaml.safe_load((ROOT / "docs" / "assets" / "mcast-lab.yml").read_text("utf-8"))
    assert workflow[True] == ["push", "pull_request"]  # YAML's word for the key `on`
    jobs = workflow["jobs"].values()
    assert all(job["timeout-minutes"] <= 20 and job["runs-on"] for job in jobs)
    found = [step for job in jobs for step in job["steps"]]
    return [step["run"] for step in found if "run" in step] + [found[-1]["with"]["run"]]


def test_the_workflow_installs_known_packages(steps: list[str]) -> None:
    (line,) = re.findall(
        r"apt-get install -y --no-install-recommends(.*?)\n", " ".join(steps).replace("\\\n", "")
    )
    rows = [row.split() for row in (ROOT / "packages.txt").read_text("utf-8").splitlines()]
    known = {row[1] for row in rows if row and row[0] in ("demo", "test")}
    assert set(line.split()) - {"ca-certificates"} <= known


def test_the_workflows_commands_run(
    steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that fetch nothing, with the tests of the page on testing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "tests" / "simulated").mkdir(parents=True)
    for fence in fences(ROOT / "docs" / "testing.md"):
        if fence.title in ("collector.py", "test_collector.py"):
            (tmp_path / "tests" / "simulated" / fence.title).write_text(fence.text)
    for step in steps:
        subprocess.run(["bash", "-n", "-c", step], check=True)
    *others, lab = (step for step in steps if "install" not in step)
    for step in others:
        run_shell(Fence(ROOT, 0, "sh", "", step))
    assert len(others) == 1
    assert lab == ".venv/bin/python -m pytest tests/real"


# --- what pages name -------------------------------------------------------


def test_demo_ends_as_in_the_tutorial() -> None:
    """The demo ends as the tutorial and its recording say."""
    run = [sys.executable, "-m", "mcast", "demo"]
    lines = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[-1] in (ROOT / "docs/tutorial.md").read_text("utf-8")
    picture = (ROOT / "docs/assets/session-demo.svg").read_text("utf-8")
    recorded = " ".join(unescape(re.sub("<[^>]*>", "", picture)).split())
    stable = [line for line in lines if "/s" not in line]  # rates differ, and so do the spaces before them
    assert [line for line in stable if " ".join(line.split()) not in recorded] == []


def test_tables_are_as_made_from_the_code() -> None:
    """`make generated` renews them."""
    texts = {page: page.read_text("utf-8") for page in tables.pages()}
    assert sum(len(tables.TABLE.findall(text)) for text in texts.values()) == sum(
        text.count("<!-- table: ") for text in texts.values()
    )
    stale = [page.name for page, text in texts.items() if text != tables.renewed(text)]
    assert stale == [], "run make generated"


def test_readme_picture_is_as_drawn() -> None:
    """`make sessions` draws it."""
    from scripts.pictures import OVERVIEW, overview

    assert OVERVIEW.read_text("utf-8") == overview()


def test_readme_fits_two_screens() -> None:
    """Somebody who decides reads no more than 120 lines."""
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_each_command_has_its_help_and_an_example() -> None:
    text = (ROOT / "docs" / "commands.md").read_text("utf-8")
    sections = dict(re.findall(r"^##+ mcast ([^\n]+)\n(.*?)(?=^##|\Z)", text, re.M | re.S))
    names = [
        [name, *(f"{name} {below}" for below in getattr(load(name), "commands", ()))] for name in SUMMARIES
    ]
    last = {name for one in names for name in one if len(one) == 1 or " " in name}
    commands = [name for one in names for name in one]
    assert [name for name in last if "```" not in sections[name] and "](" not in sections[name]] == []
    assert sorted(sections) == sorted(commands)
    assert [name for name in commands if f"<!-- include: help_of {name} -->" not in sections[name]] == []


def test_what_a_title_tells_the_tests_is_not_shown(site: Path) -> None:
    words = ("not run by the tests", "run by make test-all", "figures vary", "<!-- include", "<!-- table")
    texts = {page.relative_to(site): page.read_text("utf-8") for page in site.rglob("*.html")}
    assert [(page, word) for page, text in texts.items() for word in words if word in text] == []


def test_a_command_in_a_table_is_shown_as_it_is_typed(site: Path) -> None:
    for page, command in (
        ("commands", "mcast info | head -n 1"),
        ("errors", "ibv_devinfo -v | grep max_qp_wr"),
    ):
        assert f"<code>{command}</code>" in (site / f"{page}.html").read_text("utf-8")


def test_wide_picture_is_scrolled(site: Path) -> None:
    """A picture is scrolled where a page is narrower."""
    texts = [page.read_text("utf-8") for page in site.rglob("*.html")]
    assert sum(text.count('<div class="picture"><svg') for text in texts) > 5
    assert [
        found for text in texts for found in re.findall(r'(?<!"picture">)<svg [^>]*role="img".{40}', text)
    ] == []


def test_pictures_fit_a_narrow_page(site: Path) -> None:
    """On a screen of 400 pixels, of which a picture gets 368, text is at least 11 pixels high."""
    for page, count in (("how-it-works", 4), ("objects-how", 1)):
        pictures = re.findall(
            r'<svg viewBox="0 0 (\d+) .*?</svg>', (site / f"{page}.html").read_text("utf-8"), re.S
        )
        assert pictures == ["360"] * count
    text = (site / "how-it-works.html").read_text("utf-8")
    sizes = {float(size) for size in re.findall(r'font-size="([\d.]+)"', text)}
    assert min(sizes) * 368 / 360 >= 11


def test_names_of_the_pictures_exist() -> None:
    """Names such as `Endpoint.join`, on the page with the pictures and in them, are public."""
    import mcast
    import mcast.api
    from scripts.pictures import SEQUENCES, STAGES

    page = (ROOT / "docs/how-it-works.md").read_text("utf-8")
    words = [signal.words for signal in SEQUENCES["join"].signals] + [stage[1] for stage in STAGES]
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", page))
    named |= {(found[1], found[2]) for word in words if (found := re.fullmatch(r"([A-Z]\w+)\.(\w+)", word))}
    assert {("Endpoint", "join"), ("CmId", "join_multicast_ex"), ("Membership", "send")} <= named
    kinds = {kind: getattr(mcast, kind, None) or getattr(mcast.api, kind, None) for kind, _ in named}
    assert [pair for pair in named if pair[1] not in names_of(kinds[pair[0]])] == []


def names_of(kind: Any) -> set[str]:
    """Attributes of a class, and the fields of a pydantic model."""
    return {*dir(kind), *getattr(kind, "model_fields", ()), *getattr(kind, "__annotations__", ())}


def test_each_message_of_a_transfer_is_explained() -> None:
    """The page has a row for each kind of packet, and the picture names no other kind."""
    from mcast.cast.protocol import packets
    from scripts.pictures import SEQUENCES

    kinds = {
        name.upper()
        for name, kind in vars(packets).items()
        if isinstance(kind, type) and getattr(kind, "_fields", ("",))[0] == "session"
    }
    page = (ROOT / "docs/objects-how.md").read_text("utf-8")
    assert set(re.findall(r"^\| ([A-Z]+) \|", page, re.M)) == kinds
    drawn = {signal.words.split(":")[0].split(",")[0] for signal in SEQUENCES["transfer"].signals}
    assert {word for word in drawn if word.isupper()} - kinds == set()


def test_each_make_target_named_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {
        name
        for page in PAGES
        for name in re.findall(r"(?:^|`)make ([a-z][\w-]*)", page.read_text("utf-8"), re.M)
    }
    assert {"demo", "test"} <= named <= targets


def test_provider_table_names_every_backend() -> None:
    """The provider table names every built in backend."""
    table = (ROOT / "docs/providers.md").read_text("utf-8").partition("\n## ")[0]
    named = set(re.findall(r"`([\w-]+)`", table))
    assert set(backend_names()) >= {"sim", "sim-roce", "sim-ib", "rdma"} <= named


def test_each_path_named_exists() -> None:
    """Of this repository, in the pages that are maps of it: `mcast/api.py`, `tests/sim/`."""
    maps = [ROOT / "CONTRIBUTING.md", ROOT / "docs/proof.md", *(ROOT / "docs/dev").iterdir()]
    text = "".join(page.read_text("utf-8") for page in maps)
    paths = set(re.findall(r"(?<![\w/-])((?:mcast|lab|tests|scripts|docs|benchmarks)/[\w./-]*\w/?)", text))
    assert len(paths) > 20
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []
