"""Run every check and print what is wrong: `python -m tests.lint`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

from tests.lint import code, documents, names, release, schema


def find_problems(module: ModuleType) -> Iterator[str]:
    """Yield what the checks of a module find, each with the name of its check."""
    for name, check in vars(module).items():
        if name.startswith("find_"):
            yield from (f"{module.__name__}.{name}: {problem}" for problem in check())


if __name__ == "__main__":
    problems = [
        problem
        for module in (documents, code, names, schema, release)
        for problem in find_problems(module)
    ]
    print(*problems, sep="\n")
    sys.exit(1 if problems else 0)
