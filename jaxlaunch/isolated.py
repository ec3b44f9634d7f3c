"""Starts a program of ours so that no file of the user's takes the place of one that it imports.

`python isolated.py MODULE ARGUMENTS` runs MODULE as `python -m` does, but the working folder and the folders of
PYTHONPATH come last on sys.path, behind the standard library and everything that is installed. The interpreter itself
must not see them either, since it imports before any script runs: `environ` hides PYTHONPATH from it, and this script
brings it back.

Standard library only, Python >= 3.10: the agent brings this file into images that hold nothing else of ours.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # the folder of this script holds other files, or what the agent brings for programs
    _here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry and not os.path.abspath(entry).startswith(_here)]

TYPE_CHECKING = False  # typing's, which takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

BEHIND = "JAXLAUNCH_BEHIND"  # who starts a program of ours -> this script: the user's part of PYTHONPATH
_SEARCHED = "PYTHONPATH"
# As this process was started with them: what it starts is isolated in the same way.
_before: str | None = None  # the part of PYTHONPATH that comes first, which the agent's site hook is in
_behind: str | None = None  # the user's part


def command(module: str, *arguments: str, script: str = os.path.abspath(__file__)) -> list[str]:
    """Return the command that runs a module of ours with `environ`; `script` is where this file is, or a copy."""
    safe = ["-P"] if sys.version_info >= (3, 11) else []  # what the program spawns does not import from its folder
    # Executed under one name, wherever the copy is: JAX's compilation cache may have the files of a stack in its keys.
    start = f"__file__ = {script!r}; exec(compile(open(__file__).read(), '<jaxlaunch.isolated>', 'exec'))"
    return [sys.executable, *safe, "-c", start, module, *arguments]


def inline(module: str) -> list[str]:
    """Return the arguments of a Python that run a module of ours which imports nothing of the user's, on its own.

    The module is found where the image has it, also by its PYTHONPATH.
    """
    return [
        "-I",
        "-c",
        "import os, runpy, sys; "
        "sys.path += filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep)); "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)",
    ]


def environ(base: Mapping[str, str], before: str | None = None, behind: str | None = None) -> dict[str, str]:
    """Return the variables `base` for a `command`: its own PYTHONPATH is hidden, or `behind` where that is given.

    `before` is what the interpreter does search before the standard library.
    """
    hidden = base.get(_SEARCHED, "") if behind is None else behind
    variables = {name: value for name, value in base.items() if name != _SEARCHED}
    return variables | {BEHIND: hidden} | ({_SEARCHED: before} if before else {})


def inherited(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables `base` for a `command` that a program of ours starts."""
    return environ(base) if _behind is None else environ(base, _before, _behind)


def folders() -> list[str]:
    """Return the folders of the user's own modules as they are searched: the working folder, and PYTHONPATH's."""
    working = [] if os.environ.get("PYTHONSAFEPATH") else [os.curdir]
    return list(dict.fromkeys(os.path.realpath(folder) for folder in [*working, *_entries(_behind)]))


def _entries(path: str | None) -> list[str]:
    return [entry for entry in (path or "").split(os.pathsep) if entry]


def arrange() -> None:
    """Put the user's folders last on sys.path, and PYTHONPATH back as it would be without this script."""
    global _before, _behind
    _before, _behind = os.environ.get(_SEARCHED), os.environ.get(BEHIND, "")
    if whole := os.pathsep.join(filter(None, (_before, _behind))):
        os.environ[_SEARCHED] = whole
    sys.path += [folder for folder in folders() if folder not in sys.path]


def run_sitecustomize() -> None:
    """Run the sitecustomize on the user's PYTHONPATH, as the interpreter would have, and prints its error."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", _entries(_behind))
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        print(f"Error in sitecustomize ({spec.origin}): {type(error).__name__}: {error}", file=sys.stderr)


def main(argv: list[str]) -> None:
    """Run a module, or a file of the agent's, as the program."""
    import runpy

    arrange()
    run_sitecustomize()
    name, sys.argv = argv[0], argv
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
        return
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:  # while the program imports: its own errors become exit codes
        from jaxlaunch import contract, installation

        if (why := installation.lacking(error)) is None:
            raise
        contract.refuse(why, contract.BAD_SPEC)
        sys.exit(contract.BAD_SPEC)


def _installed() -> Any:
    """Return this module as it is installed: a traceback has its lines as ours, those of a copy might be the user's.

    It is where nothing of the user's is, else on their PYTHONPATH.
    """
    try:
        from jaxlaunch import isolated
    except ImportError:
        sys.modules.pop("jaxlaunch", None)
        arrange()
    try:
        from jaxlaunch import isolated
    except ImportError as error:
        why = f"{sys.executable} has no jaxlaunch with its trainer ({error}): install it there with its extra train"
        raise ModuleNotFoundError(why) from None
    return isolated


if __name__ == "__main__":
    _installed().main(sys.argv[1:])
