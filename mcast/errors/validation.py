"""Plain sentences for pydantic's errors, which speak of types and tags to a user who wrote a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_WORDS = {
    "missing": "{where} is needed",
    "extra_forbidden": "unknown field {where}",
    "union_tag_invalid": "{where} unknown kind {tag!r}: choose one of {expected_tags}",
    "union_tag_not_found": "{where} needs a field {discriminator}",
    "greater_than": "{where} is {input}: give more than {gt}",
    "greater_than_equal": "{where} is {input}: give {ge} or more",
    "less_than": "{where} is {input}: give less than {lt}",
    "less_than_equal": "{where} is {input}: give {le} or less",
    "int_parsing": "{where} is {input}: give a whole number",
    "int_type": "{where} is {input}: give a whole number",
    "int_from_float": "{where} is {input}: give a whole number",
    "float_parsing": "{where} is {input}: give a number",
    "float_type": "{where} is {input}: give a number",
    "finite_number": "{where} is {input}: give a finite number",
    "bool_parsing": "{where} is {input}: give true or false",
    "bool_type": "{where} is {input}: give true or false",
    "string_type": "{where} is {input}: give text in quotes",
    "string_too_short": "{where} is {input}: give text of {min_length} or more characters",
    "string_too_long": "{where} is longer than {max_length} characters",
    "tuple_type": "{where} is {input}: give a list",
    "model_type": "{where} is {input}: give a table with its fields",
    "model_attributes_type": "{where} is {input}: give a table with its fields",
    "too_short": "{where} has too few entries: give {min_length} or more",
    "too_long": "{where} has too many entries: give at most {max_length}",
    "json_invalid": "the text is not JSON: {error}",
    "literal_error": "{where} is {input}: choose {expected}",
}
"""pydantic's name of an error -> what is said."""


_LONGEST = 200
"""The most characters of a value that are quoted, because a stranger may have written the value."""


def describe_validation_error(found: Mapping[str, Any]) -> str:
    """One of `ValidationError.errors()` as a sentence, with the place in the file first, if there is one."""
    where = _location(found["loc"])
    words = _WORDS.get(found["type"])
    if words is None:
        said = found["msg"].removeprefix("Value error, ")
        return f"{where}: {said}" if where else said
    where = (f"{where}:" if where else "") if found["type"] == "union_tag_invalid" else where or "the value"
    limits = {name: _plainly(value) for name, value in found.get("ctx", {}).items()}
    return words.format(**{**limits, "input": _quoted(found["input"]), "where": where}).strip()


def _location(steps: Sequence[str | int]) -> str:
    """The place that the steps lead to, in words and from the inside out: `entry 1 of nth of drop`."""
    words = [f"entry {step + 1}" if isinstance(step, int) else step for step in steps]
    return " of ".join(reversed(words))


def _plainly(limit: object) -> object:
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def _quoted(given: object) -> str:
    try:
        text = repr(given)
    except ValueError:  # a number of thousands of digits
        return "such a number"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
