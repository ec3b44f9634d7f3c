"""Prepares the text of a job before it runs: `python -m jaxlaunch.trainer.prepare.text`.

It reads TRAIN_SPEC and prints one JSON object with the folder and a report of each corpus. Existing
files are verified by their digests. It exits with a code of the contract: SIGINT and SIGTERM end it
with 80, and the next run resumes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxlaunch import contract
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import folder
from jaxlaunch.trainer.sources.open import token_sizes
from jaxlaunch.trainer.spec import TASKS, Text, TrainSpec
from jaxlaunch.trainer.start.process import print_result, read_spec
from jaxlaunch.trainer.text import build, recipe, tokenizer


def main() -> int:
    """Prepare the data of TRAIN_SPEC, print a report as JSON, and return the exit code."""
    is_stopped = build.follow_parent()

    def prepare() -> dict[str, Any]:
        spec = folder.resolve_spec(read_spec(os.environ)[0])
        return {"prepared": prepare_text(spec, is_stopped)}

    return print_result(prepare)


def prepare_before_start(
    environ: Mapping[str, str], is_stopped: Callable[[], bool], announce: Callable[[], None]
) -> None:
    """Prepare the text of a run before its processes join, because a join would time out meanwhile.

    `announce` is called if there is something to prepare. The defaults of a user's task are known
    only after its import, so the text of such a task is prepared when it is opened. Raises the
    errors of `prepare_text`, and Stopped.
    """
    try:
        raw = json.loads(environ[contract.TRAIN_SPEC])
        spec = TrainSpec.model_validate(raw) if raw["task"] in TASKS else None
    except (KeyError, ValueError, TypeError):
        # `read_spec` reports the fault later.
        return
    if spec is None or not texts_to_prepare(spec):
        return
    announce()
    for _ in _prepare_each(folder.resolve_spec(spec), is_stopped):
        pass


def prepare_text(
    spec: TrainSpec, is_stopped: Callable[[], bool] = lambda: False
) -> list[dict[str, Any]]:
    """Prepare every corpus of a spec and return a report on each.

    Raises SpecError if there is nothing to prepare, and Stopped once `is_stopped`.
    """
    reports = list(_prepare_each(spec, is_stopped, verify=True))
    if not reports:
        raise SpecError(
            f"train.data.source = {spec.data.source}: there is nothing to prepare; only text "
            "with a tokenizer, a field or a packing is prepared"
        )
    return reports


def texts_to_prepare(spec: TrainSpec) -> list[Text]:
    """Return the blocks of text that need preparation."""
    return [text for text in spec.data.texts().values() if text.is_prepared]


def _prepare_each(
    spec: TrainSpec, is_stopped: Callable[[], bool], *, verify: bool = False
) -> Iterator[dict[str, Any]]:
    for data in texts_to_prepare(spec):
        for held_out in [False] if data.eval_path in (None, data.path) else [False, True]:
            yield _prepare_corpus(spec, data, held_out, is_stopped, verify)


def _prepare_corpus(
    spec: TrainSpec, data: Text, held_out: bool, is_stopped: Callable[[], bool], verify: bool
) -> dict[str, Any]:
    # This module imports array_record, which most runs do not need.
    from jaxlaunch.trainer.sources import text as sources

    length, vocab = token_sizes(spec)
    tokenizer.check_vocab(tokenizer.load_tokenizer(data.tokenizer), vocab)
    corpus_recipe = recipe.make_recipe(data, length, held_out=held_out, is_stopped=is_stopped)
    folder_path = sources.prepare_rows(data, corpus_recipe, verify=verify, is_stopped=is_stopped)
    index = build.read_index(folder_path)
    del index["files"]
    return {
        "folder": str(folder_path),
        "paths": len(corpus_recipe.paths),
        "first": corpus_recipe.paths[0],
        "packing": corpus_recipe.packing,
        **index,
        "notes": build.describe_notes(index),
    }


if __name__ == "__main__":
    sys.exit(main())
