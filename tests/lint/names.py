"""Names that say nothing, and private language in docstrings and comments."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.lint import words

ROOT = Path(__file__).parents[2]
FOLDERS = ("jaxlaunch", "tests", "benchmarks")
FILLERS = frozenset(
    "before both each found given kept known of one own said what where".split()  # noqa: SIM905
)
MAX_FILLERS = 0.005  # of all variables and parameters
MAX_SINGLE_WORDS = 0.35  # of all functions
# The names of fields, which code has to call by their names.
TERMS_OF_CODE = ("verdict", "generation", "charged", "budget")

Functions = (ast.FunctionDef, ast.AsyncFunctionDef)
Documented = (ast.Module, ast.ClassDef, *Functions)


def find_filler_names() -> Iterator[str]:
    """Yield the variables that are called by a filler word, if a folder has more than its share."""
    for folder in FOLDERS:
        variables = [
            (f"{path.relative_to(ROOT)}:{node.lineno}: {name}", name.strip("_"))
            for path, tree in _parse(folder)
            for node in ast.walk(tree)
            if isinstance(node, ast.arg | ast.Name) and (name := _variable_name(node)) is not None
        ]
        fillers = [place for place, name in variables if name in FILLERS]
        if len(fillers) > MAX_FILLERS * len(variables):
            yield from fillers


def find_single_word_functions() -> Iterator[str]:
    """Yield the folders in which too many functions have a name of a single word."""
    for folder in FOLDERS:
        names = [
            node.name
            for _, tree in _parse(folder)
            for node in ast.walk(tree)
            if isinstance(node, Functions) and not node.name.startswith("__")
        ]
        single = [name for name in names if "_" not in name.strip("_")]
        if len(single) > MAX_SINGLE_WORDS * len(names):
            yield f"{folder}: {len(single)} of {len(names)} functions have a single word for a name"


def find_private_language() -> Iterator[str]:
    """Yield forbidden words in docstrings and comments."""
    for folder in FOLDERS:
        for path, tree in _parse(folder):
            name = str(path.relative_to(ROOT))
            docstrings = [
                ast.get_docstring(node) or ""
                for node in ast.walk(tree)
                if isinstance(node, Documented)
            ]
            tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
            comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
            for text in (*docstrings, *comments):
                yield from (
                    fault
                    for fault in words.faults(name, text)
                    if not any(f"{term}" in fault.split("'")[1].lower() for term in TERMS_OF_CODE)
                )


def _parse(folder: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path != Path(words.__file__):
            yield path, ast.parse(path.read_text())


def _variable_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
