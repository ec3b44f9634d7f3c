"""Loading of users' objects by their names, `module:Name`, and finding their places in users' files."""

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

# Folders of files that are not user code: the standard library and this package.
LIBRARIES = (sysconfig.get_path("stdlib"), os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# A frame of a traceback in the message of an error.
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


def load(path: str) -> Any:
    """Return the object with the name `module:Name`. Raises SpecError if it cannot be imported."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except SystemExit as error:
        raise SpecError(
            f"{path}: importing {module_name} ended the process, by {error!r} in {raised_at(error) or module_name}; "
            "what a script does belongs below `if __name__ == '__main__':`"
        ) from error
    except Exception as error:
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
    """Return whether an object is a flax.linen module or a class of them, without importing linen."""
    kind = found if isinstance(found, type) else type(found)
    return any(base.__module__.startswith("flax.linen") for base in kind.__mro__)


def is_haiku(found: Any) -> bool:
    """Return whether an object is a class of Haiku modules or a transformed function, without importing Haiku."""
    made = found if isinstance(found, type) else type(found)
    if not any(base.__module__.startswith("haiku.") for base in made.__mro__):
        return False
    return isinstance(found, type) or made.__name__ in ("Transformed", "TransformedWithState")


def kind(found: Any) -> str:
    """Return a phrase for an object: `the flax.linen module Net`, `a function`, `None`, `a list`."""
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
    """Return where a user's class, function or object is defined, such as `stripes.py:12`, or ""."""
    made = found if isinstance(found, type) or inspect.isroutine(found) else type(found)
    try:
        file, line = inspect.getsourcefile(made), inspect.getsourcelines(made)[1]
    except (OSError, TypeError):
        return ""
    return "" if file is None or is_library(file) else f"{_short(file)}:{line}"


def named(function: Any) -> str:
    """Return place and name of a function, such as `gan.py:31 step`, or only its name if it has no source."""
    found = function
    while True:
        if isinstance(found, functools.partial):
            found = found.func
        # Decorators, including jax.jit, set this attribute.
        elif hasattr(found, "__wrapped__"):
            found = found.__wrapped__
        else:
            break
    name = str(getattr(found, "__name__", type(found).__name__))
    code = getattr(inspect.unwrap(getattr(found, "__func__", found)), "__code__", None)
    return name if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} {name}"


def raised_at(error: BaseException) -> str:
    """Return the last frame of an error in user code, such as `stripes.py:14 in loss`, or ""."""
    return told(error)[1]


def told(error: BaseException) -> tuple[str, str]:
    """Return the message of an error in one line, and its place as `raised_at` does.

    An error in a callback of a compiled step arrives as a JAX error whose message contains the traceback.
    """
    said = next(iter(str(error).splitlines()), "")
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    if within := [(file, int(line), name) for file, line, name in _FRAME.findall(str(error))]:
        frames, said = within, str(error).strip().splitlines()[-1]
    own = [frame for frame in frames if not is_library(frame[0])]
    if not own:
        return said, ""
    file, line, name = own[-1]
    return said, f"{_short(file)}:{line} in {name}"


@contextlib.contextmanager
def placed(found: Any) -> Iterator[None]:
    """Append the place where `found` is defined to the message of a TrainerError in the block."""
    try:
        yield
    except TrainerError as error:
        if where := place(found):
            error.args = (f"{error} ({where})",)
        raise


def is_library(file: str) -> bool:
    """Return whether a file is not user code: of the interpreter, an installed package, or this package."""
    path = os.path.abspath(file)
    is_installed = "site-packages" in path or "dist-packages" in path
    return file.startswith("<") or is_installed or any(path.startswith(root + os.sep) for root in LIBRARIES)


def _short(file: str) -> str:
    path, here = os.path.abspath(file), os.getcwd() + os.sep
    return path.removeprefix(here)
