"""Exports a checkpoint as a folder: `python -m jaxlaunch.trainer.export [FOLDER] --to DIR`.

The result is a folder for Hugging Face, or for the MLP of a table a folder in this project's own
format (huggingface/save).

This is a separate process on the CPU: it uses no accelerator, and needs neither the data nor the
code of the training, because a checkpoint records its model. FOLDER contains the checkpoints; the
default is the checkpoint folder of TRAIN_SPEC. It prints one JSON object and exits with a code of
the contract.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from jaxlaunch import programs
from jaxlaunch.trainer.adapters import peft
from jaxlaunch.trainer.adapters.frozen_base import merge_stored
from jaxlaunch.trainer.adapters.lora import REFERENCE_PREFIX
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.checkpoint import reader, saved_files
from jaxlaunch.trainer.checkpoint.reader import StoredStep
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import config_json, save
from jaxlaunch.trainer.huggingface import folder as folders
from jaxlaunch.trainer.huggingface.families import FAMILIES
from jaxlaunch.trainer.huggingface.save import Parameter
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.spec import (
    MLP,
    ImageModel,
    Lora,
    PublishedModel,
    ResNet,
    TransformersModel,
    ViT,
)
from jaxlaunch.trainer.start.process import print_result, read_spec
from jaxlaunch.trainer.text.turn_ends import read_turn_ends
from jaxlaunch.trainer.torch_models import export as torch_export


def main() -> int:
    """Export as the arguments specify, print a report as JSON, and return the exit code."""
    arguments = programs.read_options(programs.Export, "jaxlaunch.trainer.export", __doc__)
    jax.config.update("jax_platforms", "cpu")

    def run_export() -> dict[str, Any]:
        options = dataclasses.asdict(arguments)
        folder = options.pop("folder")
        if folder is None:
            folder = RunContext.from_environ().checkpoint_path(read_spec(os.environ)[0])
        if remote.is_remote(folder):
            remote.check_url("the folder of checkpoints", folder)
        return export(folder, **options)

    return print_result(run_export)


def export(
    folder: str,
    to: str,
    *,
    step: int | Literal["best"] | None = None,
    ema: bool = False,
    merged: bool = False,
    base: str | None = None,
) -> dict[str, Any]:
    """Write a step of a checkpoint folder to the folder `to` and return a report.

    Adapters are written as a peft folder, unless they are `merged` into their base model. The base
    model is read from `base`, or else from its location in the training.

    Raises CheckpointError if no step is usable, SpecError if Hugging Face has no such model or
    `to` exists.
    """
    if base is not None and not merged:
        raise SpecError(f"--base {base} needs --merged: only merged weights contain the base")
    # The target is checked before a checkpoint of many gigabytes is verified.
    save.check_target(to)
    notes: list[str] = []
    stored_step = reader.find_step(folder, step, notes.append)
    extra_files, inputs = saved_files.read_saved_tokenizer(folder), saved_files.read_inputs(folder)
    if inputs is not None:
        extra_files[saved_files.INPUTS_FILE] = saved_files.encode_inputs(inputs)
    extra_files = folders.complete_tokenizer_config(extra_files)
    model = reader.recorded_model(stored_step)
    params: Mapping[str, Parameter] = reader.evaluated_parameters(stored_step, ema)
    if isinstance(model, MLP) and inputs is not None:
        files = save.save_mlp(to, model, params, extra_files)
        return _summarize_export(stored_step, "MLP", params, files, notes)
    _check_published(model)
    lora = reader.recorded_lora(stored_step)
    if (lora is None or merged) and isinstance(model, ResNet | TransformersModel):
        buffers = reader.evaluated_buffers(stored_step, ema)
        # A frozen reference is not a part of the model.
        names = [name for name in buffers if not name.startswith(REFERENCE_PREFIX)]
        params = {**params, **{name: buffers[name] for name in names}}
    _check_merged(merged, stored_step, lora)
    checkpoint = f"step {stored_step.step} of {folder}"
    turn_ends = _find_turn_ends(checkpoint, extra_files, notes.append)
    if lora is not None and not merged:
        # Without this file, peft would use that of the base model, which may not name the tokens
        # that end a turn.
        generation = folders.render_generation_config(model.init_from, extra_files, turn_ends)
        extra_files[folders.GENERATION_FILE] = save.encode_json(generation)
    if lora is not None and merged:
        model = model if base is None else model.model_copy(update={"init_from": base})
        recorded = stored_step.meta.get("base")
        params, lora = merge_stored(model, lora, recorded, params, checkpoint), None
    if isinstance(model, TransformersModel):
        architecture, files = torch_export.save_model(
            to, model, lora, params, extra_files, turn_ends, (inputs or {}).get("classes", ())
        )
        return _summarize_export(stored_step, architecture, params, files, notes)
    architecture = FAMILIES[config_json.find_family(model)].architecture
    classes = (inputs or {}).get("classes", ())
    if lora is not None:
        files = peft.write_adapters(to, model, lora, params, extra_files)
        architecture = f"adapters of {architecture}"
        return _summarize_export(stored_step, architecture, params, files, notes)
    if isinstance(model, ImageModel):
        extra_files |= _render_preprocessor(model, inputs or {}, notes.append)
    files = save.save_model(
        to, model, params, extra_files=extra_files, classes=classes, turn_ends=turn_ends
    )
    return _summarize_export(stored_step, architecture, params, files, notes)


def _check_published(model: Any) -> None:
    """Raise SpecError for a model of the user's own."""
    if not isinstance(model, PublishedModel):
        kinds = ", ".join(sorted({family.kind for family in FAMILIES.values()}))
        raise SpecError(
            f"train.model.kind = {model.kind} cannot be exported, because Hugging Face has no "
            f"equivalent; {kinds} can"
        )


def _check_merged(merged: bool, step: StoredStep, lora: Lora | None) -> None:
    """Raise SpecError if `merged` is set for a step without adapters."""
    if merged and lora is None:
        raise SpecError(
            f"step {step.step} holds a whole model, no adapters to be merged; leave --merged out"
        )


def _summarize_export(
    stored_step: StoredStep,
    architecture: str,
    params: Mapping[str, Parameter],
    files: list[str],
    notes: list[str],
) -> dict[str, Any]:
    return {
        "step": stored_step.step,
        "architecture": architecture,
        "parameters": sum(math.prod(parameter.shape) for parameter in params.values()),
        "dtype": next(iter(params.values())).dtype.name,
        "files": files,
        "notes": notes,
    }


def _find_turn_ends(
    checkpoint: str, files: Mapping[str, bytes], note: Callable[[str], None]
) -> tuple[int, ...]:
    try:
        return read_turn_ends(f"the tokenizer of {checkpoint}", files)
    except SpecError as error:
        note(f"{folders.GENERATION_FILE} does not name the token that ends a turn: {error}")
        return ()


def _render_preprocessor(
    model: ImageModel, inputs: Mapping[str, Any], note: Callable[[str], None]
) -> dict[str, bytes]:
    size = inputs.get("shape", model.image if isinstance(model, ViT) else None)
    config = folders.render_preprocessor(model, size, inputs.get("eval_crop", 1.0))
    if config is None:
        note(
            f"no {folders.PREPROCESSOR_FILE} is written: this model standardizes each image by "
            "itself, which transformers does not do; set train.model.pixel_mean and pixel_std "
            "before a training whose export transformers is to feed"
        )
        return {}
    if size is not None and not config["do_resize"]:
        note(
            f"{folders.PREPROCESSOR_FILE} only normalizes: transformers has no crop to the "
            f"proportions of {size[0]} × {size[1]}; crop and resize images before"
        )
    return {folders.PREPROCESSOR_FILE: save.encode_json(config)}


if __name__ == "__main__":
    sys.exit(main())
