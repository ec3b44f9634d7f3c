"""Loads a user's object by its name, `module:Name`, and says where in the user's files something is."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from typing import Any

from jaxlaunch.trainer.errors import SpecError, TrainerError

# Files that are nobody's own code: the standard library, what pip installed, and this package.
LIBRARIES = (sysconfig.get_path("stdlib"), os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)  # of a traceback in a message


def load(path: str) -> Any:
    """The object that `path`, a `module:Name`, names. Raises SpecError when its module does not import or lacks it."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except SystemExit as error:
        raise SpecError(
            f"{path}: importing {module_name} ended the process, by {error!r} in {raised_at(error) or module_name}; "
            "what a script does belongs below `if __name__ == '__main__':`"
        ) from error
    except Exception as error:  # whatever a user's module raises while it is imported
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.partition(".")[0]):
            reason += ". `code: .` in job.yaml ships and imports the job's folder"
        raise SpecError(f"{path}: importing {module_name} failed: {reason}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
            public = ", ".join(sorted(key for key in own if not key.startswith("_"))) or "nothing"
            raise SpecError(f"{path}: {module_name} has no {name!r}. It defines {public}.")
        found = getattr(found, part)
    return found


def is_linen(found: Any) -> bool:
    """Whether `found` is a module of flax.linen, or a class of them; linen is not imported for that."""
    kind = found if isinstance(found, type) else type(found)
    return any(base.__module__.startswith("flax.linen") for base in kind.__mro__)


def is_haiku(found: Any) -> bool:
    """Whether `found` is a class of Haiku's modules, or a function that it transformed; Haiku is not imported."""
    made = found if isinstance(found, type) else type(found)
    if not any(base.__module__.startswith("haiku.") for base in made.__mro__):
        return False
    return isinstance(found, type) or made.__name__ in ("Transformed", "TransformedWithState")


def kind(found: Any) -> str:
    """What `found` is, in a sentence: `the flax.linen module Net`, `a function`, `None`, `a list`."""
    if found is None:
        return "None"
    name = getattr(found, "__name__", None) if isinstance(found, type) else type(found).__name__
    if is_haiku(found):
        return f"the Haiku module {name}" if isinstance(found, type) else "the transformed function of Haiku"
    if is_linen(found):
        return f"the flax.linen module {name}"
    if isinstance(found, type):
        return f"the class {name}"
    return f"{'an' if str(name)[0] in 'aeiouAEIOU' else 'a'} {name}"


def place(found: Any) -> str:
    """`stripes.py:12`, where a user's class, function or object is defined; "" for what is ours or has no file."""
    made = found if isinstance(found, type) or inspect.isroutine(found) else type(found)
    try:
        file, line = inspect.getsourcefile(made), inspect.getsourcelines(made)[1]
    except (OSError, TypeError):
        return ""
    return "" if file is None or is_library(file) else f"{_short(file)}:{line}"


def named(function: Any) -> str:
    """`gan.py:31 step`: where a function is defined; its name alone where it has no source, as a method of C's."""
    found = function
    while True:
        if isinstance(found, functools.partial):
            found = found.func
        elif hasattr(found, "__wrapped__"):  # of a decorator, jax.jit's too
            found = found.__wrapped__
        else:
            break
    name = str(getattr(found, "__name__", type(found).__name__))
    code = getattr(inspect.unwrap(getattr(found, "__func__", found)), "__code__", None)
    return name if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} {name}"


def raised_at(error: BaseException) -> str:
    """`stripes.py:14 in loss`, the last line of the user's own files that `error` came through; "" without one."""
    return told(error)[1]


def told(error: BaseException) -> tuple[str, str]:
    """What an exception says, in one line, and where the user's code raised it, as `raised_at` writes it.

    What a callback of a compiled step raises comes as JAX's error, whose message holds the traceback as text.
    """
    said = next(iter(str(error).splitlines()), "")
    frames = [(each.filename, each.lineno or 0, each.name) for each in traceback.extract_tb(error.__traceback__)]
    if within := [(file, int(line), name) for file, line, name in _FRAME.findall(str(error))]:
        frames, said = within, str(error).strip().splitlines()[-1]
    own = [frame for frame in frames if not is_library(frame[0])]
    if not own:
        return said, ""
    file, line, name = own[-1]
    return said, f"{_short(file)}:{line} in {name}"


@contextlib.contextmanager
def placed(found: Any) -> Iterator[None]:
    """Within it what a TrainerError says ends with the file that `found` is defined in."""
    try:
        yield
    except TrainerError as error:
        if where := place(found):
            error.args = (f"{error} ({where})",)
        raise


def is_library(file: str) -> bool:
    """Whether a file is nobody's own code: of the interpreter, of an installed package, or ours."""
    path = os.path.abspath(file)
    is_installed = "site-packages" in path or "dist-packages" in path
    return file.startswith("<") or is_installed or any(path.startswith(root + os.sep) for root in LIBRARIES)


def _short(file: str) -> str:
    path, here = os.path.abspath(file), os.getcwd() + os.sep
    return path.removeprefix(here)
