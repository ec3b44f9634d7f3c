"""The modules of a user's own whose names something else has too: `random.py`, `types.py`, `utils/`.

In a process of ours the user's folders come last on sys.path, so such a name is the library's for everyone. Here an
import in a file of the user's gets the user's own module, as it would in a program of theirs, and no library ever does:
the module is imported as part of a private package, whose path is the user's folders.

A library that our process and the user's code hand objects of to each other (jax, numpy) stays one for both.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxlaunch import old_names

PACKAGE = "_of_the_user"
# Of which two copies in one process would not fit together.
SHARED = frozenset(
    """jaxlaunch jax jaxlib flax optax orbax chex haiku numpy ml_dtypes tensorstore grain array_record etils absl
    tensorflow tensorflow_datasets torch transformers tokenizers datasets pyarrow safetensors pydantic sitecustomize
    usercustomize""".split()
)
_INSTALLED = ("site-packages", "dist-packages")
_OURS = os.path.dirname(os.path.abspath(__file__))
_own: frozenset[str] = frozenset()  # top-level names of the user's that something else has too
_folders: tuple[str, ...] = ()
_import, _import_module = builtins.__import__, importlib.import_module


class Installed(importlib.abc.MetaPathFinder):
    """Finds what is installed where the user has a module of that name too.

    That their folders are last on sys.path is not enough: a package without __init__.py (orbax) gives way to any that
    has one, and what is installed to be edited is found by a finder behind that of sys.path.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = list(folders)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of what is installed; None where the user has no such top-level module, or alone has one."""
        own = None if path is not None else importlib.machinery.PathFinder.find_spec(name, self._folders)
        if own is None or own.loader is None:
            return None
        installed = [entry for entry in sys.path if entry not in self._folders]
        found = importlib.machinery.PathFinder.find_spec(name, installed)
        later = sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder) + 1 :]
        rest = (finder.find_spec(name, None) for finder in later if not isinstance(finder, old_names.Top))
        return found or next((spec for spec in rest if spec is not None), None)


def install(folders: Sequence[str]) -> None:
    """Has the files in `folders` import their own modules, and everything else what is installed."""
    global _own, _folders
    _folders = tuple(folder for folder in folders if not _is_of_packages(folder))
    finder = Installed(folders)
    sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder), finder)
    _own = frozenset(_colliding(_folders, finder))
    if _own:
        package = types.ModuleType(PACKAGE, "The user's modules whose names something else has too.")
        package.__path__ = list(_folders)
        sys.modules[PACKAGE] = package
        builtins.__import__ = _import_for
        importlib.import_module = _import_module_for
    old_names.install()


def import_module(name: str) -> types.ModuleType:
    """The module that the user calls `name`."""
    return _import_module(f"{PACKAGE}.{name}" if name.partition(".")[0] in _own else name)


def _import_for(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> types.ModuleType:
    """builtins.__import__, by which every import statement imports."""
    top = name.partition(".")[0]
    if level or top not in _own or not _is_users((globals or sys._getframe(1).f_globals).get("__file__")):
        return _import(name, globals, locals, fromlist or (), level)
    found = _import(f"{PACKAGE}.{name}", globals, locals, fromlist or (), 0)
    return found if fromlist else sys.modules[f"{PACKAGE}.{top}"]


def _import_module_for(name: str, package: str | None = None) -> types.ModuleType:
    """importlib.import_module."""
    if name.partition(".")[0] in _own and _is_users(sys._getframe(1).f_globals.get("__file__")):
        return _import_module(f"{PACKAGE}.{name}")
    return _import_module(name, package)


def _is_users(file: object) -> bool:
    """Whether a file is the user's own: a virtual environment in their folder is not, nor is this package."""
    if not isinstance(file, str):
        return False
    path = os.path.abspath(file)
    if path.startswith(_OURS + os.sep) or any(f"{os.sep}{name}{os.sep}" in path for name in _INSTALLED):
        return False
    if path.startswith(sysconfig.get_path("stdlib") + os.sep):
        return False
    return any(path.startswith(os.path.join(folder, "")) for folder in _folders)


def _is_of_packages(folder: str) -> bool:
    """Whether a folder holds installed packages, which import each other, and is nobody's own."""
    try:
        names = os.listdir(folder)
    except OSError:
        return True
    return any(name.endswith(".dist-info") for name in names)


def _colliding(folders: Sequence[str], finder: Installed) -> Iterator[str]:
    """The names of modules in `folders` that are installed too, and that a program could have of its own."""
    for name in sorted(set(_names(folders)) - SHARED):
        own = importlib.machinery.PathFinder.find_spec(name, list(folders))
        installed = None if _is_always_the_interpreters(name) else finder.find_spec(name)
        if own is not None and installed is not None and not _is_same(installed.origin, own.origin):
            yield name


def _names(folders: Iterable[str]) -> Iterator[str]:
    """The top-level modules and packages of `folders`."""
    for folder in folders:
        for entry in os.scandir(folder):
            stem, _, ending = entry.name.partition(".")
            is_file = f".{ending}" in importlib.machinery.all_suffixes()
            if stem.isidentifier() and (is_file or os.path.isfile(os.path.join(entry.path, "__init__.py"))):
                yield stem


def _is_always_the_interpreters(name: str) -> bool:
    """Whether no file can take the name in any Python: what is compiled in, and what it imports to start."""
    finders = (importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter)
    return name == "encodings" or any(finder.find_spec(name) is not None for finder in finders)


def _is_same(one: str | None, other: str | None) -> bool:
    try:
        return one is not None and other is not None and os.path.samefile(one, other)
    except OSError:
        return False
