"""Prepares the text of a job before it runs: `python -m trainer.text.prepare`.

TRAIN_SPEC in, one JSON object on stdout: what was prepared, where, and a report on it. What is there already is
verified to the byte. Exits with a code of the contract.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from trainer.data.sources import packed
from trainer.errors import SpecError
from trainer.huggingface import folder
from trainer.process import print_result, read_spec
from trainer.spec import Mixture, Text, TrainSpec
from trainer.text import build, recipe, tokenizer


def main() -> int:
    """Prepares the data of TRAIN_SPEC and prints a report as JSON; returns the exit code."""
    return print_result(lambda: {"prepared": prepare(folder.resolved(read_spec(os.environ)[0]))})


def prepare(spec: TrainSpec) -> list[dict[str, Any]]:
    """Prepares every corpus of a spec; a report on each. Raises SpecError where nothing is to be prepared."""
    found = [_one(spec, data, held_out) for data in texts(spec) for held_out in _sides(data)]
    if not found:
        raise SpecError(
            f"train.data.source = {spec.data.source}: there is nothing to prepare; text with a tokenizer, a field or a "
            "packing is prepared"
        )
    return found


def texts(spec: TrainSpec) -> list[Text]:
    """The blocks of text that are prepared."""
    found = spec.data.texts().values() if isinstance(spec.data, Mixture) else [spec.data]
    return [each for each in found if isinstance(each, Text) and each.is_prepared]


def _sides(data: Text) -> list[bool]:
    return [False] if data.eval_path is None else [False, True]


def _one(spec: TrainSpec, data: Text, held_out: bool) -> dict[str, Any]:
    length, vocab = getattr(spec.model, "length", None), getattr(spec.model, "vocab", None)
    if not isinstance(length, int):
        raise SpecError("data.source = text needs train.model.length, the tokens of an example")
    if isinstance(vocab, int):
        tokenizer.fits(tokenizer.load(data.tokenizer), vocab)
    made = recipe.of(data, length, held_out=held_out)
    place = packed.prepared(data, made, whole=True)
    index = build.read(place)
    del index["files"]
    return {"folder": str(place), "paths": len(made.paths), "first": made.paths[0], "packing": made.packing, **index}


if __name__ == "__main__":
    sys.exit(main())
