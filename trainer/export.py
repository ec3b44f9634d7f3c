"""A checkpoint as a Hugging Face folder: `python -m trainer.export [FOLDER] --to DIR`.

A process of its own, on the host alone: no accelerator is touched, and neither the data nor the code of the training is
needed, for a checkpoint says what model it holds. FOLDER holds the checkpoints; without it, TRAIN_SPEC says where they
lie. Prints one JSON object; leaves with a code of the contract.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import pydantic

from trainer import huggingface, publish
from trainer.__main__ import read
from trainer.answer import answer
from trainer.architectures import Model
from trainer.checkpoint import kept
from trainer.checkpoint.kept import Kept, Stored
from trainer.errors import CheckpointError, SpecError
from trainer.spec import Published
from trainer.train import Place


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.export", description=__doc__)
    parser.add_argument("folder", nargs="?", help="of checkpoints, or its URL; default that of TRAIN_SPEC")
    parser.add_argument("--to", required=True, help="the folder to write")
    parser.add_argument("--step", type=int, help="which; default the newest")
    parser.add_argument("--ema", action="store_true", help="the moving average in place of the weights")
    asked = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")

    def find() -> dict[str, Any]:
        folder = asked.folder or Place.from_environ().checkpoints(read(os.environ)[0])
        return export(folder, asked.to, step=asked.step, ema=asked.ema)

    return answer(find)


def export(folder: str, to: str, *, step: int | None = None, ema: bool = False) -> dict[str, Any]:
    """Writes a step of the folder to `to`; says what was written.

    Raises CheckpointError where no step is usable, SpecError where the model has no form in Hugging Face's words.
    """
    publish.target(to)  # before a checkpoint of many gigabytes is verified
    notes: list[str] = []
    found = kept.find(folder, step, notes.append)
    model, params = _model(found), _parameters(found, ema)
    files = publish.save(to, model, params)
    return {
        "step": found.step,
        "architecture": huggingface.family(model).architecture,
        "parameters": sum(math.prod(each.shape) for each in params.values()),
        "dtype": next(iter(params.values())).dtype.name,
        "files": files,
        "notes": notes,
    }


def _model(found: Kept) -> Published:
    if "model" not in found.meta:
        raise CheckpointError(f"step {found.step} does not say what model it holds; a step saved from now on will")
    model: Any = pydantic.TypeAdapter(Model).validate_python(found.meta["model"])
    if not isinstance(model, Published):
        raise SpecError(f"train.model.kind = {model.kind} has no Hugging Face form; decoder, gpt2 and vit have one")
    return model


def _parameters(found: Kept, ema: bool) -> Mapping[str, Stored]:
    params = found.part("ema" if ema else "params")
    if not params:
        raise SpecError(f"step {found.step} holds no moving average: the training had no train.optimizer.ema")
    return params


if __name__ == "__main__":
    sys.exit(main())
