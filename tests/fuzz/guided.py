"""Fuzz one target, guided by coverage: `python -m tests.fuzz.guided TARGET SECONDS FOLDER`."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["mcast", "tomllib", "yaml"]):
    import yaml  # noqa: F401  (scenarios import it when they need it)

    from tests.fuzz.targets import HERE, MAX_INPUT, TARGETS

_SLOW, _MEGABYTES = 20, 2048
"""Maximum seconds and megabytes of an input; more is a failure as well."""


def main() -> None:
    """Run libFuzzer, which ends the process."""
    name, seconds, folder = sys.argv[1:]
    options = [
        f"-max_total_time={max(1, round(float(seconds)))}",
        f"-timeout={_SLOW}",
        f"-rss_limit_mb={_MEGABYTES}",
        f"-max_len={MAX_INPUT}",
        f"-artifact_prefix={folder}/",
    ]
    atheris.Setup([sys.argv[0], *options, f"{folder}/corpus", str(HERE / "corpus" / name)], TARGETS[name])
    atheris.Fuzz()


main()
