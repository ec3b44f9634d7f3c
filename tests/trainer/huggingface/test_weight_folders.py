"""Which files and tensors of a folder are the weights, against transformers."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import load
from jaxlaunch.trainer.huggingface.folder import read_model
from jaxlaunch.trainer.step.state import ModelArrays
from jaxlaunch.trainer.tasks.classify import Classify
from jaxlaunch.trainer.tasks.lm import NextToken
from tests import bucket_server
from tests.trainer.huggingface import weight_folders
from tests.trainer.huggingface.weight_folders import FOLDERS

# float32 on a CPU; the logits are up to 5.
TOLERANCE = 1e-5
RANDOM = jax.random.key(0)


class Images(Classify):
    def source(self, spec: Any, split: str) -> Any:
        shape = weight_folders.PIXELS_SHAPE[1:] + weight_folders.PIXELS_SHAPE[:1]
        return [{"image": np.zeros(shape, np.float32), "label": 0}]


def test_every_folder_is_read_as_transformers_reads_it_or_refused(tmp_path: Path) -> None:
    answers = json.loads(weight_folders.ANSWERS.read_text())["answers"]
    assert answers.keys() == FOLDERS.keys() and len(answers) > 100
    faults = []
    for number, (name, case) in enumerate(FOLDERS.items()):
        path, answer = tmp_path / str(number), answers[name]
        case.write(path)
        try:
            logits = read_logits(str(path))
        except SpecError as error:
            if case.refused is None or case.refused not in str(error):
                faults.append(f"{name}: {error}, expected: {case.refused}")
            continue
        if case.refused is not None:
            faults.append(f"{name}: read, and not refused with {case.refused}")
        elif case.is_more:
            assert "error" in answer, name
        elif "logits" not in answer:
            faults.append(f"{name}: read, and transformers says {answer}")
        elif (distance := np.abs(logits - answer["logits"]).max()) > TOLERANCE:
            faults.append(f"{name}: the logits differ by {distance:.1e}")
    assert not faults, "\n".join(faults)


IN_A_BUCKET = [
    "single beside an older index and its shards",
    "shards in a subfolder",
    "shards beside one that sorts last",
    "adapter inside the model",
    "shards without an index",
    "index with a missing shard",
    "index that is torn",
    "two shards with one tensor",
    "single with bytes after its end",
    "shard without its last byte",
    "every name after model.",
    "every name after module.",
    "tied with another head",
    "a dtype for each tensor",
    "fp8 without scales",
]


def test_folders_in_a_bucket_are_read_as_local_ones(tmp_path: Path) -> None:
    answers = json.loads(weight_folders.ANSWERS.read_text())["answers"]
    with bucket_server.serve_bucket() as bucket:
        for number, name in enumerate(IN_A_BUCKET):
            path = tmp_path / str(number)
            FOLDERS[name].write(path)
            for file in filter(Path.is_file, path.rglob("*")):
                key = f"weights/{number}/{file.relative_to(path)}"
                bucket.objects[key] = file.read_bytes()
            url = f"gs://weights/{number}"
            if FOLDERS[name].refused is None:
                logits = read_logits(url)
                np.testing.assert_allclose(logits, answers[name]["logits"], rtol=0, atol=TOLERANCE)
            else:
                with pytest.raises(SpecError, match=url):
                    read_logits(url)


def read_logits(folder: str) -> np.ndarray:
    """Return the logits of the last token, or of the image, with the weights of a folder."""
    model = read_model(folder)
    key = model.model_dump_json()
    arrays = abstract_model(key)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    targets = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
        for name, leaf in arrays.params.items()
    }
    params = load.load_parameters(model.model_copy(update={"init_from": folder}), targets)
    return np.asarray(forward(key)(params))


@cache
def abstract_model(key: str) -> ModelArrays:
    """Return the structure of a model, given as JSON."""
    keys = json.loads(key)
    train = spec.TrainSpec(task="tests:Folders", model=keys)
    task = Images() if keys["kind"] == "vit" else NextToken()
    return ModelArrays(nnx.eval_shape(lambda: task.model(train, nnx.Rngs(0))))


@cache
def forward(key: str) -> Any:
    """Return a compiled function from parameters to logits."""
    arrays = abstract_model(key)

    @jax.jit
    def compute(params: dict[str, jax.Array]) -> jax.Array:
        model = arrays.merge_model(params, {}, RANDOM)
        model.eval()
        if json.loads(key)["kind"] == "vit":
            logits: jax.Array = model(jnp.asarray(weight_folders.pixels().transpose(1, 2, 0))[None])
            return logits[0]
        tokens = jnp.asarray([weight_folders.TOKENS])
        logits = model(tokens)
        return logits[0, -1]

    return compute
