"""Measures the house: `python -m tests.house` prints what docs/architecture.md records. Reads sources; imports none."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIDES = ("jaxlaunch", "launcher", "trainer")
LONG = 50  # lines of a function, its signature included, without its docstring

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Every source file of both packages, by its path from the root."""
    files = [path for side in SIDES for path in sorted((ROOT / side).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in files}


def folders() -> dict[str, int]:
    """How many source files each folder holds, packages' empty `__init__` aside."""
    found: dict[str, int] = {}
    for name in sources():
        folder, _, file = name.rpartition("/")
        found[folder] = found.get(folder, 0) + (file != "__init__.py")
    return found


def long_functions() -> list[str]:
    """Functions of more than LONG lines, as `file:name (lines)`."""
    return [f"{file}:{node.name} ({lines})" for file, node in functions() if (lines := _lines(node)) > LONG]


def undocumented_classes() -> list[str]:
    """Public classes without a docstring, as `file:name`."""
    return [
        f"{file}:{node.name}"
        for file, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and _is_public(node) and not ast.get_docstring(node)
    ]


def undocumented_functions() -> list[str]:
    """Functions and methods with a public name and no docstring, as `file:name`; those inside functions count too."""
    return [f"{file}:{node.name}" for file, node in functions() if _is_public(node) and not ast.get_docstring(node)]


def functions() -> Iterator[tuple[str, Function]]:
    """Every function of both packages, methods and inner ones included, beside its file."""
    for file, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield file, node


def _lines(node: Function) -> int:
    """Without the docstring, which is read when the code is not."""
    text = node.body[0] if ast.get_docstring(node) is not None else None
    said = 0 if text is None else (text.end_lineno or text.lineno) - text.lineno + 1
    return (node.end_lineno or node.lineno) - node.lineno + 1 - said


def _is_public(node: Function | ast.ClassDef) -> bool:
    return not node.name.startswith("_")


if __name__ == "__main__":
    held = {folder: count for folder, count in folders().items() if folder != "launcher/cli"}
    fullest = max(held, key=lambda folder: held[folder])
    print(f"folder with most source files, cli/ apart: {fullest} ({held[fullest]})")
    print(f"functions over {LONG} lines: {', '.join(long_functions()) or 0}")
    print(f"public classes without a docstring: {len(undocumented_classes())}")
    print(f"public functions without a docstring: {len(undocumented_functions())}")
