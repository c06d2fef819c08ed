"""A griffe extension: what the reference shows, and static analysis alone does not see.

Lines of a docstring in two columns, which are written to be read in an editor, become a definition list:

    errno    why it failed
    context  the object given to the join

Signatures are those that `help` shows, with the values of constants: of named tuples and pydantic models, of
functions that take the fields of an options class (`accepts_options`), and of methods made of functions
(`_one_call`). The members of an enumeration without docstrings of their own are listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

from griffe import (
    AliasResolutionError,
    Attribute,
    Class,
    Docstring,
    Expr,
    ExprCall,
    ExprKeyword,
    ExprName,
    Extension,
    Function,
    Module,
    NameResolutionError,
    Object,
    Parameter,
    ParameterKind,
    Parameters,
)

COLUMNS = re.compile(r"(?: {2}(?=\S)|(?!\s|[-*#>|]|\d+\. ))(\S+(?: \S+){0,5}?) {2,}(\S.*)")
"""A term of a few words, indented by two spaces or not, two spaces or more, and what it means."""

TERM = re.compile(r"(?: {2})?([^\s#>|].*)")
"""A term whose meaning begins on the next line, far to the right."""

_RIGHT = " " * 10


def defined(text: str) -> str:
    """The text with each line of two columns, and the lines indented under it, as a definition."""
    out: list[str] = []
    fenced = inside = False
    lines = iter([*text.splitlines(), ""])
    line = next(lines)
    for following in lines:
        fenced ^= line.startswith("```")
        found = None if fenced else COLUMNS.fullmatch(line)
        if not found and not fenced and following.startswith(_RIGHT) and (alone := TERM.fullmatch(line)):
            following = f"{alone[1]}  {following.strip()}"
        elif found:
            out += [] if inside or not out or not out[-1] else [""]
            out += [f"`{found[1]}`", f":   {found[2]}", ""]
        elif inside and line.startswith("  "):
            out[-1:] = [f"    {line.strip()}", ""]
        else:
            out.append(line)
        inside = bool(found) or (inside and line.startswith("  "))
        line = following
    return "\n".join(out)


class Reference(Extension):
    """Completes docstrings and signatures."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = defined(obj.docstring.value)

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        for one in [*classes(pkg)]:
            bases = {str(base) for parent in (one, *one.mro()) for base in parent.bases}
            if "NamedTuple" in bases:
                construct(one, [*fields(one)], ParameterKind.positional_or_keyword)
            elif "BaseModel" in bases:
                every = {field.name: field for parent in (*one.mro()[::-1], one) for field in fields(parent)}
                construct(one, [*every.values()], ParameterKind.keyword_only)
            elif any(base.endswith(("Enum", "Flag")) for base in bases):
                list_members(one)
            for member in [*one.members.values()]:
                if isinstance(member, Function):
                    take_options(member)
                elif isinstance(member, Attribute):
                    forward(member)
        for function in [*functions(pkg)]:
            show_constants(function)


def classes(inside: Object) -> Iterator[Class]:
    """Every class of a package or a class."""
    for member in inside.members.values():
        if isinstance(member, Class):
            yield member
        if isinstance(member, Module | Class):
            yield from classes(member)


def functions(inside: Object) -> Iterator[Function]:
    """Every function of a package or a class."""
    for member in inside.members.values():
        if isinstance(member, Function):
            yield member
        if isinstance(member, Module | Class):
            yield from functions(member)


def show_constants(function: Function) -> None:
    """Replace the name of a constant that is a default by its value, a number or a text, as it is written."""
    for parameter in function.parameters:
        if isinstance(parameter.default, ExprName) and parameter.default.name.isupper():
            name = parameter.default.name
            value = getattr(import_module(function.module.path), name, None)
            if type(value) in (int, float, str):
                parameter.default = repr(value)
                with suppress(NameResolutionError, KeyError, AliasResolutionError):
                    written = str(function.modules_collection[function.resolve(name)].value)
                    if re.fullmatch(r"[\d. <_]+|0x[0-9A-F]+", written):
                        parameter.default = written


def fields(one: Class) -> Iterator[Attribute]:
    """The annotated attributes of a class, except class variables."""
    for member in one.members.values():
        if (
            isinstance(member, Attribute)
            and member.annotation
            and "ClassVar" not in str(member.annotation)
            and "property" not in member.labels
            and not member.name.startswith(("_", "model_config"))
        ):
            yield member


def default(field: Attribute) -> str | Expr | None:
    """The default of a field, also where it is an argument of pydantic's `Field`."""
    value = field.value
    if isinstance(value, ExprCall) and str(value.function) == "Field":
        given = [one for one in value.arguments if isinstance(one, ExprKeyword) and one.name == "default"]
        return given[0].value if given else None
    return value


def construct(one: Class, taken: list[Attribute], kind: ParameterKind) -> None:
    """Give a class the constructor that Python makes for it."""
    if "__init__" in one.members:
        return
    made = [Parameter("self", kind=ParameterKind.positional_or_keyword)]
    made += [Parameter(f.name, annotation=f.annotation, kind=kind, default=default(f)) for f in taken]
    one.set_member("__init__", Function("__init__", parameters=Parameters(*made)))


def list_members(one: Class) -> None:
    """Add the members of an enumeration that have no docstring to the docstring of the class."""
    about = one.docstring.value if one.docstring else ""
    names = [
        f"`{member.name}` ({member.value})"
        for member in one.members.values()
        if isinstance(member, Attribute)
        and not member.docstring
        and not member.name.startswith("_")
        and member.annotation is None
        and not re.search(rf"\b{member.name}\b", about)
    ]
    if names:
        one.docstring = Docstring(f"{about}\n\nMembers: {', '.join(names)}.", parent=one)


def take_options(method: Function) -> None:
    """Replace the parameter for the options by those of the options class."""
    for decorator in method.decorators:
        found = re.fullmatch(r"accepts_options\((\w+)\)", str(decorator.value))
        if found:
            options = method.resolve(found[1])
            receiver, *_ = method.parameters
            _, *taken = method.modules_collection[options].parameters
            method.parameters = Parameters(receiver, *taken)


def forward(attribute: Attribute) -> None:
    """Replace an attribute made of a function by a method with its docstring and its later parameters."""
    found = re.fullmatch(r"_one_call\(([\w.]+)\)", str(attribute.value))
    if found and isinstance(attribute.parent, Class):
        module, _, name = found[1].partition(".")
        there = attribute.modules_collection[f"{attribute.parent.resolve(module)}.{name}"]
        _, *taken = there.parameters
        receiver = Parameter("self", kind=ParameterKind.positional_or_keyword)
        made = Function(name, parameters=Parameters(receiver, *taken), returns=there.returns)
        made.docstring = there.docstring
        attribute.parent.set_member(name, made)
