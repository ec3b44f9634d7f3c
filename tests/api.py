"""Write the page of the Python API: `python -m tests.api > docs/api.md`."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any, ForwardRef

import jaxlaunch

_INTRODUCTION = """\
# Python API

`import jaxlaunch` provides the names on this page to your programs, tasks and models, and imports
nothing else until one of them is used. They are typed (`py.typed`). Any module below `jaxlaunch` is
private: it may change in any version ([upgrades](upgrades.md)). `report` needs the standard library
alone, jobs and `UserError` the package, the others the extra `[train]`. Shapes are in brackets: B
rows of a batch, L tokens, V classes or the vocabulary, N rows of any number. This page is
made from docstrings and signatures: `python -m tests.api` prints it.
"""
GROUPS = {
    "Jobs": ("Job", "job", "Handle", "attach", "JobFailedError", "WaitTimeoutError"),
    "In any program": (
        "report",
        "run",
        "load",
        "TextModel",
        "TaskModel",
        "Sample",
        "lm_eval_model",
    ),
    "A task of your own": (
        "Task",
        "Loss",
        "Batch",
        "Split",
        "TrainSpec",
        "Classify",
        "NextToken",
        "Preference",
    ),
    "Data": ("Source", "open_source", "write_records"),
    "Models of other libraries": ("Linen", "Haiku"),
    "Errors": ("TrainerError", "UserError"),
}
ALIASES = ("Batch", "Split")  # names for types: a line of code, and the string under it
# Classes that users make objects of; the others are given or inherited.
CALLED = ("Job", "Loss", "Sample", "Linen", "Haiku")
# Titles of names that differ from another only by their case, which anchors have not.
TITLES = {"job": "The decorator `job`"}
AS_TASK = ("Classify", "NextToken", "Preference")  # whose methods are those of Task
_EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def make_page() -> str:
    """Return the page: a table of all names, then each with its signature and docstring."""
    table = "| | |\n|---|---|\n" + "".join(
        f"| {group} | {_link_names(names)} |\n" for group, names in GROUPS.items()
    )
    sections = [part for names in GROUPS.values() for name in names for part in _make_section(name)]
    return "\n".join([_INTRODUCTION, table, *sections])


def find_examples() -> Iterator[tuple[str, str]]:
    """Yield the examples of all docstrings, with their names."""
    for names in GROUPS.values():
        for name in names:
            for number, example in enumerate(_EXAMPLE.findall(read_docstring(name))):
                yield f"{name}-{number}" if number else name, example


def read_docstring(name: str) -> str:
    """Return the docstring of a public name, or the string below a type alias."""
    return (
        _find_alias(name)[1] if name in ALIASES else inspect.getdoc(getattr(jaxlaunch, name)) or ""
    )


def _link_names(names: tuple[str, ...]) -> str:
    anchors = {name: TITLES.get(name, name).lower().replace(" ", "-") for name in names}
    return " · ".join(f"[{name}](#{anchor.replace('`', '')})" for name, anchor in anchors.items())


def _make_section(name: str) -> Iterator[str]:
    value_of_name = getattr(jaxlaunch, name)
    yield f"## {TITLES.get(name, f'`{name}`')}\n"
    if name in ALIASES:
        yield f"```python\n{_find_alias(name)[0]}\n```\n"
    elif inspect.isfunction(value_of_name) or name in CALLED:
        yield f"```python\n{_format_signature(name, value_of_name)}\n```\n"
    yield read_docstring(name) + "\n"
    if name == "TrainSpec":
        yield "Its fields are the keys of [train](job-yaml.md#train).\n"
    if inspect.isclass(value_of_name) and name not in (*ALIASES, *AS_TASK, "TrainSpec"):
        for member, value in vars(value_of_name).items():
            if not member.startswith("_") or (
                member in ("__len__", "__getitem__") and name == "Source"
            ):
                yield from _describe_member(name, member, value)


def _describe_member(name: str, member: str, value: Any) -> Iterator[str]:
    if isinstance(value, classmethod):
        value = value.__func__
    if isinstance(value, property):
        yield f"### `{name}.{member}`\n\n{inspect.getdoc(value)}\n"
    elif inspect.isfunction(value):
        signature = _format_signature(member, value)
        yield f"### `{name}.{member}`\n\n```python\n{signature}\n```\n\n{inspect.getdoc(value)}\n"


def _format_signature(name: str, value: Any) -> str:
    """Return a call as it is written, on one line if it fits."""
    is_made = inspect.isclass(value)
    signature = inspect.signature(
        value.__init__ if is_made and not issubclass(value, tuple) else value
    )
    parts, is_keyword = [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            is_keyword = True
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            parts, is_keyword = [*parts, "*"], True
        parts.append(_format_parameter(parameter))
    returned = signature.return_annotation
    end = (
        ""
        if returned in (signature.empty, "None") or is_made
        else f" -> {_format_annotation(returned)}"
    )
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= 88:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"


def _format_parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_format_annotation(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return text
    default = (
        parameter.default.__name__
        if inspect.isbuiltin(parameter.default)
        else repr(parameter.default)
    )
    return f"{text} = {_format_annotation(default)}"


def _format_annotation(annotation: Any) -> str:
    text = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else str(annotation)
    return re.sub(r"'(\w+)'", r'"\1"', text)


def _find_alias(name: str) -> tuple[str, str]:
    """Return the line that assigns a type alias, and the string below it."""
    module, _, attribute = jaxlaunch._LAZY_IMPORTS[name].partition(":")
    body = ast.parse(inspect.getsource(importlib.import_module(module))).body
    for assigned, below in zip(body, body[1:], strict=False):
        if isinstance(assigned, ast.Assign) and ast.unparse(assigned.targets[0]) == attribute:
            assert isinstance(below, ast.Expr), f"{name} has no docstring"
            assert isinstance(below.value, ast.Constant), f"{name} has no docstring"
            return _format_annotation(ast.unparse(assigned)), inspect.cleandoc(
                str(below.value.value)
            )
    raise LookupError(name)


if __name__ == "__main__":
    print(make_page(), end="")
