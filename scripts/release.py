"""Notes of a release, from CHANGELOG.md: `python scripts/release.py` prints them, or what is missing.

A candidate (0.1.0rc1) may lack a public home, so that it can be built and tried before there is one.

With `breaks TAG` it compares the public names with those of that release, and without TAG with the last one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import griffe
import yaml

PUBLIC = (
    "mcast",
    "mcast.aio",
    "mcast.api",
    "mcast.backends.sim",
    "mcast.capture",
    "mcast.cast",
    "mcast.collective",
    "mcast.testing.plugin",
)
"""The modules that docs/ tells programs to import; the others are how these are made."""


def version(root: Path) -> str:
    text = (root / "mcast" / "errors" / "install.py").read_text("utf-8")
    (found,) = re.findall(r'^VERSION = "(.*)"$', text, re.M)
    return found


def sections(root: Path) -> dict[str, str]:
    """Return the text of each section of the changelog, by version."""
    _, *parts = re.split(r"^## ", (root / "CHANGELOG.md").read_text("utf-8"), flags=re.M)
    return {re.split(r"[\]\s]", part.lstrip("["))[0]: part.partition("\n")[2].strip() for part in parts}


def dates(root: Path) -> dict[str, str]:
    """Return the date of each version in the changelog."""
    text = (root / "CHANGELOG.md").read_text("utf-8")
    return dict(re.findall(r"^## \[(.+?)\] - (\d{4}-\d\d-\d\d)$", text, re.M))


def lacking(root: Path) -> Iterator[str]:
    """Return the steps that are left before this version can be released."""
    number = version(root)
    is_release = re.fullmatch(r"\d+\.\d+\.\d+((?:a|b|rc)\d+)?", number)
    if not is_release:
        yield f"VERSION in mcast/errors/install.py is {number}, which is no release"
    if not sections(root).get(number):
        yield f"CHANGELOG.md has no section [{number}], or nothing stands in it"
    if sections(root).get("Unreleased"):
        yield "CHANGELOG.md still has something under [Unreleased]"
    cited = yaml.safe_load((root / "CITATION.cff").read_text("utf-8"))
    if cited["version"] != number:
        yield f"CITATION.cff cites {cited['version']}, and the version is {number}"
    if (date := dates(root).get(number)) and str(cited.get("date-released")) != date:
        yield f"CITATION.cff has another date than {date}, that of [{number}] in CHANGELOG.md"
    for file in ("pyproject.toml", "lab/pyproject.toml"):
        project = tomllib.loads((root / file).read_text("utf-8"))["project"]
        if "version" not in project.get("dynamic", ()) and project["version"] != number:
            yield f"{file} has version {project['version']}, and the version is {number}"
        if not project.get("urls") and not (is_release and is_release[1]):
            yield f"{file} has no [project.urls]: nobody could find the sources, or report a vulnerability"


def last_release(root: Path) -> str | None:
    done = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or None


def public(root: griffe.Object | griffe.Alias) -> Iterator[tuple[str, griffe.Object | griffe.Alias]]:
    for name in PUBLIC:
        parts = name.split(".")[1:]
        try:
            yield name, root[parts] if parts else root
        except KeyError:
            continue


def release_notes(root: Path) -> str:
    """Return the changelog's text on changes since the last release, above all on removals."""
    found = sections(root)
    parts = re.split(r"^### ", found.get("Unreleased", "") + "\n" + found.get(version(root), ""), flags=re.M)
    return "".join(part for part in parts if part.startswith(("Changed", "Deprecated", "Removed")))


def breaks(root: Path, tag: str) -> list[str]:
    """Return the names that programs of that release may miss, unless the changelog names them as code."""
    old = dict(public(griffe.load_git("mcast", ref=tag, repo=root, resolve_aliases=True)))
    here = griffe.load("mcast", search_paths=[root], try_relative_path=False, resolve_aliases=True)
    new = dict(public(here))
    said = release_notes(root)
    found = {f"{name}: the module was removed" for name in old.keys() - new.keys()}
    for name in old.keys() & new.keys():
        found |= {
            one.explain(griffe.ExplanationStyle.MARKDOWN).strip()
            for one in griffe.find_breaking_changes(old[name], new[name])
            if not re.search(rf"`[^`]*\b{one.obj.name}\b[^`]*`", said)
        }
    return sorted(found)


def main(arguments: list[str], root: Path) -> str:
    """Return the text to print; raise SystemExit with the faults."""
    if arguments[:1] == ["breaks"]:
        tag = arguments[1] if len(arguments) > 1 else last_release(root)
        if tag is None:
            return "There is no release yet, so that nothing can be broken."
        if found := breaks(root, tag):
            raise SystemExit(
                "\n".join([*found, f"Programs for {tag} break: name each in CHANGELOG.md, with the reason."])
            )
        return f"Programs for {tag} find all that they know, or CHANGELOG.md tells them."
    if found := list(lacking(root)):
        raise SystemExit("\n".join(found))
    return sections(root)[version(root)]


if __name__ == "__main__":
    print(main(sys.argv[1:], Path(__file__).parents[1]))
