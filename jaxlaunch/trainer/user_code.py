"""Loads the objects of users by name, `module:Name`, and finds their places in users' files."""

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
LIBRARIES = (
    sysconfig.get_path("stdlib"),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
)

# A frame of a traceback in the message of an error.
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


def load_object(path: str) -> Any:
    """Return the object with the name `module:Name`. Raises SpecError if it cannot be imported."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except SystemExit as error:
        raise SpecError(
            f"{path}: importing {module_name} ended the process, by {error!r} in "
            f"{error_place(error) or module_name}; "
            "move the statements of the script below `if __name__ == '__main__':`"
        ) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing in (module_name, module_name.partition(".")[0]):
            reason += ". `code: .` in job.yaml ships and imports the job's folder"
        raise SpecError(f"{path}: importing {module_name} failed: {reason}") from error
    loaded: Any = module
    for part in name.split("."):
        if not hasattr(loaded, part):
            public_names = sorted(
                key
                for key, value in vars(module).items()
                if getattr(value, "__module__", None) == module.__name__ and key[0] != "_"
            )
            defined = ", ".join(public_names) or "nothing"
            raise SpecError(f"{path}: {module_name} has no {name!r}. It defines {defined}.")
        loaded = getattr(loaded, part)
    return loaded


def is_linen(candidate: Any) -> bool:
    """Return whether an object is a flax.linen module or its class, without importing linen."""
    candidate_type = candidate if isinstance(candidate, type) else type(candidate)
    return any(base.__module__.startswith("flax.linen") for base in candidate_type.__mro__)


def is_haiku(candidate: Any) -> bool:
    """Return whether an object is a class of Haiku modules or a transformed function."""
    is_class = isinstance(candidate, type)
    candidate_type = candidate if is_class else type(candidate)
    if not any(base.__module__.startswith("haiku.") for base in candidate_type.__mro__):
        return False
    return is_class or candidate_type.__name__ in ("Transformed", "TransformedWithState")


def describe_kind(candidate: Any) -> str:
    """Return a phrase for an object: `the flax.linen module Net`, `a function`, `None`."""
    if candidate is None:
        return "None"
    is_class = isinstance(candidate, type)
    name: str = candidate.__name__ if is_class else type(candidate).__name__
    if is_haiku(candidate):
        return f"the Haiku module {name}" if is_class else "the transformed function of Haiku"
    if is_linen(candidate):
        return f"the flax.linen module {name}"
    if is_class:
        return f"the class {name}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def describe_type(value: Any) -> str:
    """Return a phrase for a value like `describe_kind`, with its length: `a tuple of 3`."""
    return describe_kind(value) + (f" of {len(value)}" if isinstance(value, tuple | list) else "")


def find_place(candidate: Any) -> str:
    """Return where a user's class, function or object is defined, as `stripes.py:12`, or ""."""
    is_definition = isinstance(candidate, type) or inspect.isroutine(candidate)
    definition = candidate if is_definition else type(candidate)
    try:
        file, line = inspect.getsourcefile(definition), inspect.getsourcelines(definition)[1]
    except (OSError, TypeError):
        return ""
    return "" if file is None or is_library(file) else f"{_relative_path(file)}:{line}"


def describe_function(function: Any) -> str:
    """Return the place and name of a function, such as `gan.py:31 step`, or only its name."""
    unwrapped = function
    while True:
        if isinstance(unwrapped, functools.partial):
            unwrapped = unwrapped.func
        # Decorators, including jax.jit, set this attribute.
        elif hasattr(unwrapped, "__wrapped__"):
            unwrapped = unwrapped.__wrapped__
        else:
            break
    name = str(getattr(unwrapped, "__name__", type(unwrapped).__name__))
    code = getattr(inspect.unwrap(getattr(unwrapped, "__func__", unwrapped)), "__code__", None)
    if code is None:
        return name
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} {name}"


def error_place(error: BaseException) -> str:
    """Return the last frame of an error in user code, such as `stripes.py:14 in loss`, or ""."""
    return describe_error(error)[1]


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return the message of an error in one line, and its place as `error_place` does.

    An error in a callback of a compiled step arrives as a JAX error whose message contains the
    traceback.
    """
    message = next(iter(str(error).splitlines()), "")
    stack = traceback.extract_tb(error.__traceback__)
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in stack]
    if callback_frames := _FRAME.findall(str(error)):
        frames, message = callback_frames, str(error).strip().splitlines()[-1]
    user_frames = [frame for frame in frames if not is_library(frame[0])]
    if not user_frames:
        return message, ""
    file, line, name = user_frames[-1]
    return message, f"{_relative_path(file)}:{line} in {name}"


@contextlib.contextmanager
def append_place(candidate: Any) -> Iterator[None]:
    """Append the place where `candidate` is defined to a TrainerError that the block raises."""
    try:
        yield
    except TrainerError as error:
        if location := find_place(candidate):
            error.args = (f"{error} ({location})",)
        raise


def is_library(file: str) -> bool:
    """Return whether a file belongs to the interpreter, an installed package, or this package."""
    path = os.path.abspath(file)
    if file.startswith("<") or "site-packages" in path or "dist-packages" in path:
        return True
    return any(path.startswith(root + os.sep) for root in LIBRARIES)


def _relative_path(file: str) -> str:
    return os.path.abspath(file).removeprefix(os.getcwd() + os.sep)
