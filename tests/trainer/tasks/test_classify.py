from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.data.examples import Examples, ReadSettings
from jaxlaunch.trainer.data.pipeline import Pipeline
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.models.classifiers import MLP
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.tasks.classify import Classify, standardize_images

NAME = "classify"


def test_model_has_shape_of_first_example() -> None:
    data = {"source": "synthetic", "shape": [5, 4, 3]}
    spec = TrainSpec(task=NAME, model={"kind": "mlp", "width": 8}, data=data)
    task = Classify()
    model = nnx.eval_shape(lambda: task.model(spec, nnx.Rngs(0)))
    assert model.layers[0].kernel.shape == (60, 8)  # type: ignore[attr-defined]
    assert task.example(task.source(spec, "train")[0])["image"].dtype == np.uint8


def test_shape_of_dataset_with_generator_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_drawn_images.py").write_text(
        "class Noisy:\n"
        "    def __len__(self):\n"
        "        return 4\n"
        "    def __getitem__(self, index, rng):\n"
        "        return {'image': rng.integers(0, 255, (6, 5, 3)).astype('uint8'), 'label': 1}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = {"source": "torch", "dataset": "their_drawn_images:Noisy"}
    for sure in ({}, {"deterministic": True}):
        spec = TrainSpec(task=NAME, model={"kind": "mlp", "width": 8}, data=data | sure)
        task = Classify()
        model = nnx.eval_shape(lambda: task.model(spec, nnx.Rngs(0)))  # noqa: B023 (called at once)
        assert model.layers[0].kernel.shape == (90, 8)  # type: ignore[attr-defined]
        settings = ReadSettings(deterministic=spec.data.deterministic)
        examples = Examples(task.source(spec, "train"), task.example, settings)
        assert examples.array_specs["image"].shape == (6, 5, 3)


def test_model_of_another_kind_is_refused() -> None:
    spec = TrainSpec(task=NAME, model={"kind": "decoder"})
    with pytest.raises(SpecError, match="kind = decoder does not classify images; use mlp"):
        Classify().model(spec, nnx.Rngs(0))


class Listed:
    """A source over a list of labels."""

    name = "listed"

    def __init__(self, labels: list[Any]) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": np.full((8, 8), index, np.uint8), "label": self.labels[index]}

    def fingerprint(self) -> str:
        return "listed"


def batch(labels: list[Any], task: Any = None, model: Any = None) -> dict[str, Any]:
    """Return the first batch of these labels, as a run would read it."""
    task = task or Classify()
    spec = TrainSpec(task=NAME, model=model or {"kind": "mlp", "classes": 10})
    count = len(labels)
    read = {"rows": range(count), "seed": 0, "shuffle": False, "prefetch": 0, "threads": 1}
    check = partial(task.check_batch, spec)
    return Pipeline(Listed(labels), task.example, batch=count, check=check, **read).read_batch(0)


@pytest.mark.parametrize(
    "label", [3, 3.0, [3], [[3]], np.array([3], np.int64), np.uint8(3), np.array([3.0], np.float16)]
)
def test_label_is_one_integer_of_any_shape(label: Any) -> None:
    result = batch([label, label])["label"]
    assert result.tolist() == [3, 3] and result.dtype == np.int32


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0, 9, 10], "example 2 has label 10, outside 0 to 9, the model's classes"),
        ([0, -1, 10], "example 1 has label -1, outside 0 to 9"),
        ([-100, 0], "example 0 has label -100, outside 0 to 9"),
        ([[0], [10]], "example 1 has label 10, outside 0 to 9"),
        ([3, 3.7], "example 1 has label 3.7, not a whole number"),
        ([float("nan")], "example 0 has label nan, not a whole number"),
        ([2**40], "example 0 has label 1099511627776, too large for the int32"),
        (["cat"], "example 0 has label of <U3; it is made of whole numbers"),
        ([np.eye(10)[4]], r"a label of shape \[10\], but a label is one whole .* its class is 4"),
        ([[1, 2]], r"example 0 has a label of shape \[2\], but a label is .* number, the class$"),
        ([[]], r"a label of shape \[0\]"),
    ],
)
def test_label_out_of_range_is_named_with_example(labels: list[Any], words: str) -> None:
    prefix = "^listed: .*" if words[0] == "a" else "^listed: "
    with pytest.raises(DataError, match=prefix + words):
        batch(labels)


@pytest.mark.parametrize(
    ("tokens", "length", "fault"),
    [
        ([[1, 9], [2, -1]], [2, 1], None),
        ([[1, 2], [2, 10]], [2, 2], (1, "token 10 at place 1, outside 0 to 9, the vocabulary")),
        ([[1, 2], [2, 3]], [2, 0], (1, "length 0, outside 1 to 2, its tokens")),
        ([[1, 2], [2, 3]], [3, 1], (0, "length 3, outside 1 to 2, its tokens")),
        ([[1, 2, 3, 4]], [1], (0, "4 tokens, and train.model.length = 3; cut the examples")),
        ([1, 2], [1, 1], (0, "tokens of shape [] and a length of []; a text has tokens [L] and")),
    ],
)
def test_tokens_of_texts_are_those_of_the_model(tokens: Any, length: Any, fault: Any) -> None:
    model = {"transformers": "f", "classes": 2, "vocab": 10, "length": 3}
    data = {"source": "torch", "dataset": "mine:Texts"}
    spec = TrainSpec(task=NAME, model=model, data=data)
    rows = {"tokens": np.array(tokens), "length": np.array(length)}
    rows["label"] = np.zeros(len(tokens), np.int32)
    found = Classify().check_batch(spec, rows)
    assert found == fault or (found[0] == fault[0] and found[1].startswith(fault[1]))


def trace_loss(task: Any, model: Any) -> None:
    """Trace the loss of `model`, so that the task knows its classes."""
    images, labels = jnp.zeros((2, 8, 8), jnp.uint8), jnp.zeros(2, jnp.int32)
    rows = {"image": images, "label": labels, "weight": jnp.ones(2)}
    nnx.eval_shape(lambda: task.loss(model(), rows, jax.random.key(0)).sum)


def test_classes_of_custom_model_are_its_logits() -> None:
    task, custom = Classify(), {"kind": "mine:Net"}
    assert batch([0, 7], task, custom)["label"].tolist() == [0, 7]  # not known yet
    trace_loss(task, lambda: lambda images: jnp.zeros((len(images), 4)))
    with pytest.raises(DataError, match="example 1 has label 7, outside 0 to 3"):
        batch([0, 7], task, custom)


def test_classes_of_custom_task_are_known_with_mixup() -> None:
    class Own(Classify):
        def model(self, spec: TrainSpec, rngs: nnx.Rngs) -> nnx.Module:
            config = specs.MLP(kind="mlp", width=8, classes=4)
            return MLP(config, (8, 8), rngs, ModelOptions(loss=specs.Loss(mixup=0.2)))

    task, custom = Own(), {"kind": "mine:Net"}
    trace_loss(task, lambda: task.model(None, nnx.Rngs(0)))
    with pytest.raises(DataError, match="example 1 has label 7, outside 0 to 3"):
        batch([0, 7], task, custom)


def test_labels_of_custom_loss_are_unchecked() -> None:
    class Shifted(Classify):
        def loss(self, model: Any, batch: dict[str, Any], rng: Any) -> Any:
            return super().loss(model, batch | {"label": batch["label"] - 1}, rng)

    assert batch([1, 10], Shifted())["label"].tolist() == [1, 10]


def test_images_are_standardized() -> None:
    image = np.random.default_rng(0).integers(0, 17, (3, 8, 8)).astype(np.uint8)
    np.testing.assert_allclose(standardize_images(image), standardize_images(image * 15), atol=1e-5)
    assert not standardize_images(np.full((1, 8, 8), 9, np.uint8)).any()
