"""The output matrix of a language model, apart from the base model before it.

A causal model of transformers calls its base model, and computes logits of its result: with one
matrix, and in some families with a scale or a cap. Both parts are the module's own code. For the
first, the call ends with the result of the base model. For the second, the module is called with a
base model that returns given features.

B batch, L length, D model, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class _BaseOutput(tuple[Any, ...]):
    """The result of a base model that has features [B, L, D] and nothing else."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> Any:
        """The features."""
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def find_head(module: Any) -> str | None:
    """Return the name of the matrix that maps the features of the base model to logits.

    Returns None if logits need other weights as well, such as a bias, an adapter, or a layer before
    the matrix.
    """
    import torch

    head, base = module.get_output_embeddings(), _find_base(module)
    if type(head) is not torch.nn.Linear or head.bias is not None or base is module:
        return None
    base_parameters = {id(parameter) for parameter in base.parameters()}
    for parameter in module.parameters():
        if id(parameter) not in base_parameters and parameter is not head.weight:
            return None
    # Of tied parameters, named_parameters() has the first.
    names: dict[int, str] = {id(parameter): name for name, parameter in module.named_parameters()}
    return names[id(head.weight)]


def _find_base(module: Any) -> Any:
    """Return the base model that a causal model calls."""
    # OPT and others call a part of theirs.
    return getattr(module.base_model, "decoder", module.base_model)


class _ReadError(Exception):
    """Ends the call of a module after its base model, whose features it has."""


def read_features(module: Any, call_module: Callable[[], Any]) -> Any:
    """Return the features of the base model in a call of the module, which ends there.

    Logits that nobody uses would count as operations and as memory of a traced program.
    """

    def stop_call(base: Any, arguments: Any, output: Any) -> None:
        raise _ReadError(output[0])

    hook = _find_base(module).register_forward_hook(stop_call)
    try:
        call_module()
    except _ReadError as error:
        return error.args[0]
    finally:
        hook.remove()
    raise AssertionError(f"{type(module).__name__} does not call its base model")


@contextlib.contextmanager
def replace_features(module: Any, features_BLD: Any) -> Iterator[None]:
    """Have the base model return these features in this context, whatever its inputs are."""
    base = _find_base(module)
    base.forward = lambda *_, **__: _BaseOutput((features_BLD,))
    try:
        yield
    finally:
        del base.forward
