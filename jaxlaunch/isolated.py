"""Run a module of jaxlaunch so that no file of the user shadows a module that it imports.

`python isolated.py MODULE ARGUMENTS` runs MODULE as `python -m` does, but the working folder and
the folders of PYTHONPATH come last on sys.path, after the standard library and all installed
packages. The interpreter itself must not see these folders either, because it imports modules
before any script runs: `make_environ` hides PYTHONPATH from it, and this script restores it.

The agent brings this file into images without jaxlaunch, so it needs only the standard library and
Python >= 3.10.
"""

from __future__ import annotations

import os
import sys

# Python has put the folder of this script on sys.path. No module may be imported from there: it
# contains other modules of jaxlaunch, or the files that the agent brings for programs.
if __name__ == "__main__":
    _script_folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
    sys.path[:] = [
        entry
        for entry in sys.path
        if entry and not os.path.join(os.path.abspath(entry), "").startswith(_script_folder)
    ]

# Used instead of typing.TYPE_CHECKING, because importing typing takes longer than the whole script.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

# The variable that passes the user's part of PYTHONPATH to this script.
USER_PATH = "JAXLAUNCH_BEHIND"
_PYTHONPATH = "PYTHONPATH"
# The two parts of PYTHONPATH at the start of this process, which it passes to the modules that it
# runs itself. The leading part contains the agent's site hook, and the other part is the user's.
_leading_path: str | None = None
_user_path: str | None = None


def build_command(
    module: str, *arguments: str, script: str = os.path.abspath(__file__)
) -> list[str]:
    """Return the command that runs a module of jaxlaunch; `script` is this file or a copy of it."""
    # Processes that the program spawns must not import from its folder either.
    safe_path_flags = ["-P"] if sys.version_info >= (3, 11) else []
    # In tracebacks the script has the same name wherever the copy is, because the keys of JAX's
    # compilation cache may contain the file names of a stack.
    bootstrap = (
        f"__file__ = {script!r}; exec(compile(open(__file__).read(), "
        "'<jaxlaunch.isolated>', 'exec'))"
    )
    return [sys.executable, *safe_path_flags, "-c", bootstrap, module, *arguments]


def inline_arguments(module: str) -> list[str]:
    """Return the Python arguments that run a module of jaxlaunch without a copy of this file.

    The folders of PYTHONPATH come last on sys.path, because an image may have jaxlaunch only there.
    """
    return [
        "-I",
        "-c",
        "import os, runpy, sys; "
        "sys.path += filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep)); "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)",
    ]


def make_environ(
    base: Mapping[str, str], leading_path: str | None = None, user_path: str | None = None
) -> dict[str, str]:
    """Return the variables for a command of `build_command`, with PYTHONPATH hidden from Python.

    Args:
        base: Environment variables to start from.
        leading_path: PYTHONPATH for the interpreter, which searches it before the standard library.
        user_path: The user's part of PYTHONPATH, by default the PYTHONPATH in `base`.
    """
    variables = {name: value for name, value in base.items() if name != _PYTHONPATH}
    variables[USER_PATH] = base.get(_PYTHONPATH, "") if user_path is None else user_path
    if leading_path:
        variables[_PYTHONPATH] = leading_path
    return variables


def inherited_environ(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a command of `build_command` that this process starts."""
    if _user_path is None:
        return make_environ(base)
    return make_environ(base, _leading_path, _user_path)


def user_folders() -> list[str]:
    """Return the folders with the user's modules: the working folder, then those of PYTHONPATH."""
    working_folder = [] if os.environ.get("PYTHONSAFEPATH") else [os.curdir]
    folders = [*working_folder, *_split_path(_user_path)]
    return list(dict.fromkeys(os.path.realpath(folder) for folder in folders))


def _split_path(path: str | None) -> list[str]:
    return [entry for entry in (path or "").split(os.pathsep) if entry]


def arrange_sys_path() -> None:
    """Restore PYTHONPATH, and append the user's folders to sys.path."""
    global _leading_path, _user_path
    _leading_path, _user_path = os.environ.get(_PYTHONPATH), os.environ.get(USER_PATH, "")
    if python_path := os.pathsep.join(filter(None, (_leading_path, _user_path))):
        os.environ[_PYTHONPATH] = python_path
    sys.path += [folder for folder in user_folders() if folder not in sys.path]


def run_sitecustomize() -> None:
    """Run a sitecustomize on the user's PYTHONPATH, and print its error if it fails."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", _split_path(_user_path))
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        print(f"Error in sitecustomize ({spec.origin}): {message}", file=sys.stderr)


def main(argv: list[str]) -> None:
    """Run a module of jaxlaunch, or a script of the agent, as the main program."""
    import runpy

    arrange_sys_path()
    run_sitecustomize()
    name, sys.argv = argv[0], argv
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
        return
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        # The error is from the imports of the program, because it turns its own errors into exit
        # codes.
        from jaxlaunch import contract, installation

        if (message := installation.missing_extra_message(error)) is None:
            raise
        contract.refuse(message, contract.BAD_SPEC)
        sys.exit(contract.BAD_SPEC)


def _import_installed() -> Any:
    """Import the installed copy of this module, so that tracebacks show its lines.

    It is searched for in the installed packages first, then on the user's PYTHONPATH.
    """
    try:
        from jaxlaunch import isolated
    except ImportError:
        sys.modules.pop("jaxlaunch", None)
        arrange_sys_path()
    try:
        from jaxlaunch import isolated
    except ImportError as error:
        hint = "install it there with its extra train"
        message = f"{sys.executable} has no jaxlaunch with its trainer ({error}): {hint}"
        raise ModuleNotFoundError(message) from None
    return isolated


if __name__ == "__main__":
    _import_installed().main(sys.argv[1:])
