"""Predicts for files of images or of rows: `python -m jaxlaunch.trainer.evaluation.predict FOLDER FILES...`.

FOLDER holds checkpoints, or is an export of a model of images or of a table. Neither the data nor, for a task of ours,
the job of the training is needed: how a file becomes what the model reads is beside the weights. With TRAIN_SPEC the
task may be a user's. Prints one JSON object; exits with a code of the contract.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from jaxlaunch import contract, programs
from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.checkpoint import reader, saved_files, stored_model
from jaxlaunch.trainer.data.augment import Transform
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.evaluation import readable, table_file, trained
from jaxlaunch.trainer.evaluation.readable import Part
from jaxlaunch.trainer.evaluation.trained import TaskModel
from jaxlaunch.trainer.huggingface import folder as folders
from jaxlaunch.trainer.huggingface import save
from jaxlaunch.trainer.spec import CLASSIFY, TrainSpec
from jaxlaunch.trainer.spec.vision.augment import Augment
from jaxlaunch.trainer.start.process import print_result
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.tasks.classify import Classify

SHOWN = 20  # rows of the result where no file is written
CHUNK = 256  # examples at a time, at most
Row = dict[str, Any]


def main() -> int:
    """Predicts as the arguments say and prints what was found as JSON; returns the exit code."""
    asked = programs.read(programs.Predict, "jaxlaunch.trainer.evaluation.predict", __doc__)
    return print_result(lambda: predicted(asked))


def predicted(asked: programs.Predict) -> dict[str, Any]:
    """Writes the table, or returns its first rows; and how many there are. Raises a TrainerError."""
    if asked.output is not None:
        table_file.check(asked.output)
    if remote.is_remote(asked.folder):
        remote.check("the folder of weights", asked.folder)
    described = saved_files.read_inputs(asked.folder)
    if described is None:
        raise SpecError(
            f"{asked.folder} does not say how files become what its model reads ({saved_files.INPUTS}): trainings of "
            "images and tables of this version write it; from Python, jaxlaunch.load predicts for arrays"
        )
    notes: list[str] = []
    skipped: list[str] = []

    def broken(what: str) -> None:
        if not asked.skip_broken:
            raise DataError(f"{what}; fix or remove it, or leave such out with --skip-broken")
        skipped.append(what)

    names = readable.listed(asked.files, described["kind"], broken)
    model = _loaded(asked, described, notes.append)
    parts = _parts(described, names, min(model.spec.batch, CHUNK), broken)
    rows = (row for part in parts for row in _rows(part, model.predict(dict(part.arrays)), described, asked.top))
    count, shown = table_file.write(asked.output, rows, SHOWN)
    return {
        "step": model.step,
        "examples": count,
        "rows": shown,
        "skipped": len(skipped),
        "notes": [*notes, *(f"left out: {what}" for what in skipped[:SHOWN])],
    }


def _parts(described: Mapping[str, Any], names: list[str], size: int, broken: Callable[[str], None]) -> Iterator[Part]:
    """The examples of the files, up to `size` at a time."""
    if described["kind"] == "table":
        return readable.of_tables(names, described, size, broken)
    shape = described["shape"]
    augment = Augment(eval_crop=described["eval_crop"])
    transform = Transform(augment, (shape[0], shape[1]), "eval")
    return readable.of_images(names, transform, shape, size, broken)


def _rows(part: Part, found: Any, described: Mapping[str, Any], top: int) -> Iterator[Row]:
    """A row of the table for each example: where it is from, then what the model says of it."""
    said_BV = np.asarray(found, np.float64)
    match described["target"]:
        case "regression":
            names = described.get("label") or [f"value_{number}" for number in range(1, said_BV.shape[1] + 1)]
            for place, said_V in zip(part.places, said_BV, strict=True):
                yield place | dict(zip(names, said_V.tolist(), strict=True))
        case "multi_label":
            names = described.get("label") or list(map(str, range(said_BV.shape[1])))
            chances_BV = 0.5 * (1.0 + np.tanh(0.5 * said_BV))  # the sigmoid, which does not overflow
            for place, chance_V in zip(part.places, chances_BV, strict=True):
                yield place | dict(zip(names, chance_V.tolist(), strict=True))
        case _:
            chances_BV = np.exp(said_BV - said_BV.max(-1, keepdims=True))
            chances_BV /= chances_BV.sum(-1, keepdims=True)
            for place, chance_V in zip(part.places, chances_BV, strict=True):
                yield place | _likeliest(chance_V, described.get("classes", ()), top)


def _likeliest(chance_V: np.ndarray[Any, Any], classes: list[str], top: int) -> Row:
    """The labels of the largest probabilities; of equal ones the first."""
    row: Row = {}
    for rank, label in enumerate(np.argsort(-chance_V, kind="stable")[:top].tolist(), 1):
        ending = "" if rank == 1 else f"_{rank}"
        row[f"label{ending}"] = classes[label] if label < len(classes) else str(label)
        row[f"probability{ending}"] = float(chance_V[label])
    return row


# --- the model --------------------------------------------------------------------------------------------------------


def _loaded(asked: programs.Predict, described: Mapping[str, Any], note: Callable[[str], None]) -> TaskModel:
    if (train := os.environ.get(contract.TRAIN_SPEC)) is not None:
        return trained.load(asked.folder, train, step=asked.step, ema=asked.ema, note=note)
    if (epath.Path(asked.folder) / "config.json").exists():
        if asked.step is not None or asked.ema:
            raise SpecError(f"{asked.folder} is an export, which holds neither steps nor a moving average")
        return _exported(asked.folder, described)
    found = reader.find(asked.folder, asked.step, note)
    train_block = _block(described, stored_model.model(found), found.meta.get("precision", "fp32"))
    return trained.load(asked.folder, train_block.model_dump_json(exclude_unset=True), step=found.step, ema=asked.ema)


def _block(described: Mapping[str, Any], model: specs.Model | specs.Published, precision: Any) -> TrainSpec:
    """What a model of the built-in task was trained as, as far as a prediction asks."""
    loss = {"target": described["target"]}
    keys = {"task": CLASSIFY, "model": model.model_dump(), "precision": precision, "loss": loss, "batch": CHUNK}
    return TrainSpec.model_validate(keys | {"optimizer": {"name": "sgd"}})  # it has no state


def _exported(folder: str, described: Mapping[str, Any]) -> TaskModel:
    """The model of a folder that `launcher export` wrote. Raises SpecError."""
    mlp = save.read_mlp_model(folder)
    config = mlp or folders.read_model(folder).model_copy(update={"init_from": folder})
    spec, task = _block(described, config, "fp32"), Classify()
    task.use_inputs(described)
    compiled = Step(task, spec, trained.mesh_for(spec, None), 1)
    state = compiled.init()
    params = (
        state.params if mlp is None else save.load_mlp(folder, compiled.builder.to_tree(compiled.abstract)["params"])
    )
    return TaskModel(spec, task, compiled, None, params, state.rest)


if __name__ == "__main__":
    sys.exit(main())
