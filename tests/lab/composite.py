"""A composite action of GitHub as one shell script: its steps, with what GitHub's runner would put in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import yaml

BEGIN = r"""
set -eu
export GITHUB_ACTION_PATH={path} RUNNER_TEMP={temp} GITHUB_OUTPUT={temp}/output CI=true
mkdir -p "$RUNNER_TEMP"
{first}
"""
STEP = r"""
cat >"$RUNNER_TEMP/step" <<'end of the step'
{run}
end of the step
: >"$GITHUB_OUTPUT"
(
{exports}
bash --noprofile --norc -eo pipefail "$RUNNER_TEMP/step"
)
{outputs}
"""
RESTORE = r"""
cache=$RUNNER_TEMP/{key}.tar
if [ -e "$cache" ]; then hit=hit; tar -xf "$cache" -P; else hit=miss; fi
echo "cache $hit: {key}"
"""
"""Store and restore a folder in the way of actions/cache: by tar, in the format of POSIX."""
STORE = r"""
[ "$hit" = hit ] || tar --posix -cf "$cache" -P {path}
"""


def script(path: Path, inputs: Mapping[str, str], where: str, temp: str, first: str = "") -> str:
    """Return the script of the action at `path` with those inputs, for a machine with its folder at `where`.

    `temp` is the folder of a job's own files, where caches are stored, too; `first` is run before the steps.
    Expressions may name inputs, and outputs of earlier steps.
    """
    action = yaml.safe_load(path.read_text("utf-8"))
    if unknown := inputs.keys() - action["inputs"].keys():
        raise ValueError(f"no inputs of the action: {unknown}")
    values = {name: inputs.get(name, declared.get("default")) for name, declared in action["inputs"].items()}
    parts = [BEGIN.format(path=shlex.quote(where), temp=shlex.quote(temp), first=first)]
    after = ""
    for step in action["runs"]["steps"]:
        if "uses" in step:
            assert step["uses"].startswith("actions/cache@"), step["uses"]
            words = {name: expanded(text, values) for name, text in step["with"].items()}
            parts.append(RESTORE.format(**words))
            after = STORE.format(**words)
            continue
        assert step["shell"] == "bash"
        assert "${{" not in step["run"], "an input that is put into a script can be more than a word"
        env = {name: expanded(text, values) for name, text in step.get("env", {}).items()}
        exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in env.items())
        name = step.get("id")
        outputs = f'while IFS== read -r name value; do eval "{name}_$name=\\$value"; done <"$GITHUB_OUTPUT"'
        parts.append(STEP.format(run=step["run"], exports=exports, outputs=outputs if name else ""))
    return "".join([*parts, after])


def expanded(text: str, values: Mapping[str, str | None]) -> str:
    """Return `text` with its expressions replaced: inputs by their values, outputs by shell variables."""

    def value(found: re.Match[str]) -> str:
        words = found[1].split(".")
        if words[0] == "inputs":
            given = values[words[1]]
            assert given is not None, f"{words[1]} is required"
            return given
        assert (words[0], words[2]) == ("steps", "outputs"), found[0]
        return f"${{{words[1]}_{words[3]}}}"

    return re.sub(r"\$\{\{ *([\w.-]+) *\}\}", value, text)
