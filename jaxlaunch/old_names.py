"""The names of version 0.1 for one version more: `trainer.X` is jaxlaunch.trainer.X, where no other `trainer` is found.

Remove with version 0.3.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

OLD = ("trainer", "launcher")


class Below(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is below an old name, hands out the module of the new name, and says that name once.

    It comes before the other finders: they would import the module a second time.
    """

    def __init__(self) -> None:
        self._has_said = False
        self._specs: dict[str, Any] = {}  # of the modules, by their old names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of an old name; None for any other, and below a `trainer` of the user's."""
        top, _, rest = name.partition(".")
        if top not in OLD or not rest or sys.modules.get(top) is not sys.modules.get(f"jaxlaunch.{top}"):
            return None
        return self.spec(name)

    def spec(self, name: str) -> importlib.machinery.ModuleSpec | None:
        """The spec by which this loads an old name; None where the new one has no such module."""
        is_ours = importlib.util.find_spec(f"jaxlaunch.{name}") is not None
        return importlib.machinery.ModuleSpec(name, self) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The module of the new name."""
        name = spec.name
        if "." in name and not self._has_said:
            self._has_said = True
            print(f"{name} is jaxlaunch.{name} now: the old name goes with version 0.3", file=sys.stderr, flush=True)
        module = importlib.import_module(f"jaxlaunch.{name}")
        self._specs[name] = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Gives the module its own spec back, which the import has replaced."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


class Top(importlib.abc.MetaPathFinder):
    """Finds `trainer` and `launcher` themselves, after every other finder: the user's own come first."""

    def __init__(self, below: Below) -> None:
        self._below = below

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of an old top-level name; None for any other."""
        return self._below.spec(name) if name in OLD else None


def install() -> None:
    """Finds old names from now on."""
    if not any(isinstance(finder, Below) for finder in sys.meta_path):
        below = Below()
        sys.meta_path[:] = [below, *sys.meta_path, Top(below)]
