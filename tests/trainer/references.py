"""The cases of tests/fixtures as a job meets them: a Hugging Face folder, a block and batches."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.huggingface import config_json
from jaxlaunch.trainer.huggingface.folder import resolve_spec
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.step.state import ModelArrays
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.tasks.classify import Classify
from jaxlaunch.trainer.tasks.lm import NextToken
from tests import needs

FIXTURES = Path(__file__).parents[1] / "fixtures"
LENGTH = 47  # targets of a row of 48 tokens

SIZES: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4}
TOKENS: dict[str, Any] = {**SIZES, "vocab": 97, "length": LENGTH}
LLAMA: dict[str, Any] = {**TOKENS, "kind": "decoder", "kv_heads": 2, "hidden": 160}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 32}
VIT: dict[str, Any] = {**SIZES, "kind": "vit", "hidden": 128, "image": [32, 32], "patch": 8}
# The fixtures' config.json leaves out the classes, and their images are what the model reads.
VIT |= {"classes": 10, "pixel_mean": [0.0] * 3, "pixel_std": [1.0] * 3}
GPT2: dict[str, Any] = {**TOKENS, "kind": "gpt2", "positions": 64}
FROM_FOLDER: dict[str, Any] = {"length": LENGTH}  # the folder alone says the rest
MODELS: dict[str, dict[str, Any]] = {
    "llama_tiny": LLAMA,
    "llama_tiny_padded": LLAMA,
    "llama_tiny_leftpad": LLAMA,
    "llama3_tiny": {**LLAMA, "rope_scaling": SCALING, "tied": True},
    "gpt2_tiny": GPT2,
    **dict.fromkeys(("qwen2_tiny", "qwen2_tiny_leftpad", "qwen3_tiny"), FROM_FOLDER),
    **dict.fromkeys(("mistral_tiny", "gemma2_tiny", "gemma3_tiny", "olmo2_tiny"), FROM_FOLDER),
    **dict.fromkeys(("mixtral_tiny", "mixtral_tiny_aux", "qwen3_moe_tiny"), FROM_FOLDER),
    "vit_tiny": VIT,
    "vit_tiny_rect": {**VIT, "image": [32, 48]},
    "vit_tiny_patch16": {**VIT, "patch": 16},
}


class Images(Classify):
    """Images of the size that the model reads."""

    def source(self, spec: Any, split: str) -> Any:
        shape = (*spec.model.image, spec.model.channels)
        return [{"image": np.zeros(shape, np.float32), "label": 0}]


@functools.cache
def tensors(case: str, file: str) -> dict[str, np.ndarray]:
    return load_file(needs.arrays(FIXTURES / case / f"{file}.safetensors"))


def config(case: str) -> dict[str, Any]:
    """The case's config.json, as transformers writes it."""
    fixture = json.loads((FIXTURES / case / "config.json").read_text())
    keys: dict[str, Any] = fixture["hf_config"]
    return keys


def folder(case: str, target: Path) -> Path:
    """Write the case as a Hugging Face folder; weights over another case's are a second file."""
    described = json.loads((FIXTURES / case / "config.json").read_text())
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(described["hf_config"]))
    cases = [name for name in (described["weights_from"], case) if name]
    files = {name: FIXTURES / name / "weights.safetensors" for name in cases}
    places: dict[str, str] = {}
    needs.arrays(files[cases[0]])
    # The newest first: of the weights below, the file gets those that are not replaced.
    for name, path in reversed([item for item in files.items() if item[1].exists()]):
        file = target / f"{name}.safetensors"
        if places:
            below = load_file(path).items()
            save_file({key: array for key, array in below if key not in places}, file)
        else:
            file.symlink_to(path)
        places |= dict.fromkeys(load_file(file), file.name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return target


def step(
    case: str, init_from: Path | None, devices: int = 1, *, model: Any = None, **keys: Any
) -> Step:
    """A step of the case's model that starts from the folder, compiled for nothing yet."""
    train = train_spec(case, init_from, model=model, **keys)
    return Step(task(case), train, mesh.build_mesh(train.mesh, jax.devices()[:devices]), 30)


def task(case: str) -> Any:
    return Images() if MODELS[case].get("kind") == "vit" else NextToken()


def train_spec(
    case: str, init_from: Path | None, *, model: Any = None, **keys: Any
) -> spec.TrainSpec:
    """Return a spec with plain SGD at rate 1, whose momentum after one step is the gradient."""
    sgd = {"name": "sgd", "lr": 1.0, "momentum": 0.9, "clip": None, "schedule": "constant"}
    model = {**MODELS[case], **(model or {}), "init_from": str(init_from) if init_from else None}
    if "kind" not in model and init_from is None:
        model |= config_json.parse_model(config(case)).model_dump(exclude={"init_from", *model})
    size = len(tensors(case, "io")["labels"])
    keys = {"mesh": {"dp": 1}, "optimizer": sgd, "batch": size, **keys}
    return resolve_spec(spec.TrainSpec(task="tests:Reference", model=model, **keys))


def batch(case: str) -> dict[str, np.ndarray]:
    """Return the batch of the task; a target weighs nothing where the label is -100."""
    inputs = tensors(case, "io")
    rows = {"weight": np.ones(len(inputs["labels"]), np.float32)}
    if "pixel_values" in inputs:
        images = inputs["pixel_values"].transpose(0, 2, 3, 1)
        return {"image": images, "label": inputs["labels"], **rows}
    seen = {"attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
    mask, tokens = (inputs["labels"][:, 1:] != -100).astype(np.float32), inputs["input_ids"]
    if case.endswith("_aux"):  # theirs routes the last token too, which predicts nothing
        mask, tokens = (np.pad(array, ((0, 0), (0, 1))) for array in (mask, tokens))
        seen = {"attention_mask": np.ones(tokens.shape, np.int32)}
    return {"tokens": tokens, "mask": mask, **seen, **rows}


def logits(case: str, params: dict[str, Any], model: dict[str, Any] | None = None) -> np.ndarray:
    """What the model says to the whole input, all 48 tokens of it."""
    inputs, train = tensors(case, "io"), train_spec(case, None, model=model)
    arrays = ModelArrays(nnx.eval_shape(lambda: task(case).model(train, nnx.Rngs(0))))
    output = arrays.merge_model(params, {}, jax.random.key(0))
    output.eval()  # as the reference was
    if "pixel_values" in inputs:
        return np.asarray(output(inputs["pixel_values"].transpose(0, 2, 3, 1)))
    return np.asarray(output(inputs["input_ids"], inputs.get("attention_mask")))


def limit(case: str) -> float:
    """Return how far logits may be from the reference's."""
    return 5e-6 if case.startswith("vit") else 1e-5
