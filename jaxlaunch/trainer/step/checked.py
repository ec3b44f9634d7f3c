"""What a user's task or model does not keep of its interface, in a sentence with the place in the user's files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.errors import SpecError, TrainerError, first_line


@contextlib.contextmanager
def told(name: str, task: Any, batch: Mapping[str, Any], model: Any = None) -> Iterator[None]:
    """Within it what the loss of `task` raises while it is traced is a SpecError: what, where, and of which batch.

    So is a call that the loss, or `model`, the user's class of it, does not take. Any other exception that came through
    no file of the user's is our bug and stays as it is.
    """
    try:
        with user_code.placed(type(task).loss):
            yield
    except TrainerError:
        raise
    except Exception as error:
        where = user_code.raised_at(error)
        if not where and isinstance(error, TypeError) and (called := _called(error, task, model)):
            takes = "a loss is called with (model, batch, rng), a model as its task's loss calls it"
            raise SpecError(f"{name}: {first_line(error)} ({called}); {takes}") from error
        if not where:
            raise
        holds = ", ".join(f"{key} {described(value)}" for key, value in batch.items())
        raise SpecError(f"{name}: loss raised {first_line(error)} ({where}); its batch holds {holds}") from error


def _called(error: TypeError, task: Any, model: Any) -> str:
    """Where the user defines what does not take the call that `error` is about; "" where it is about neither."""
    told = str(error)
    if f"{type(task).__name__}.loss()" in told:
        return user_code.place(type(task).loss)
    is_of_model = model is not None and model.__name__ in told
    return user_code.place(model) if is_of_model else ""


def kept(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raises SpecError where a step leaves a model other arrays, beside its parameters, than it had."""
    for key in sorted({*before, *after}):
        then, now = (described(arrays[key]) if key in arrays else "not there" for arrays in (before, after))
        if then != now:
            raise SpecError(
                f"{name}: the model's {key} is {then} before a step and {now} after it; make it in the model's "
                "__init__, and keep its shape and dtype"
            )


def described(array: Any) -> str:
    """`float32[8, 4]`."""
    return f"{array.dtype}{list(array.shape)}"
