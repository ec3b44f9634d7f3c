"""Our code never broadcasts by rank: a label [1] would be compared with every example."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.tasks import losses
from jaxlaunch.trainer.tasks.classify import Classify
from jaxlaunch.trainer.tasks.lm import NextToken
from tests.trainer import tiny
from tests.trainer.tiny import DECODER, GPT2, VIT

PARTS = {"smoothing": 0.1, "z": 1e-4}
LABELLED = {"image": np.zeros((16, 16, 16), np.uint8), "label": np.zeros(16, np.int32)}
PACKED = {
    "tokens": np.zeros((16, 17), np.int32),
    "mask": np.ones((16, 16), np.float32),
    "segments": np.zeros((16, 17), np.int32),
    "attention_mask": np.ones((16, 17), np.int32),
}
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "mlp": (Classify(), spec.MLP(layers=1, width=8), LABELLED, {"loss": PARTS}),
    "vit": (
        Classify(),
        VIT.model_copy(update={"dropout": 0.1, "drop_path": 0.1}),
        LABELLED,
        {"loss": {"mixup": 0.2}},
    ),
    "decoder": (NextToken(), DECODER, PACKED, {"loss": {**PARTS, "chunks": 2}, "remat": "full"}),
    "gpt2": (
        NextToken(),
        GPT2.model_copy(update={"dropout": 0.1}),
        PACKED,
        {"loss": PARTS, "accumulate": 2},
    ),
}


class Theirs(nnx.Module):
    """A model that broadcasts by rank, as flax's own layers do."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.layer(images.reshape(len(images), -1))


class Traced(Step):
    """A step that is traced and never compiled."""

    def traced(self, batch: dict[str, Any]) -> None:
        weighted = self._placement.abstract_batch(batch | {"weight": np.ones(16, np.float32)})
        with self.builder.trace_context():
            jax.eval_shape(self._update.dispatch_function(1), self.abstract, weighted)
            jax.eval_shape(self._evaluation_sums, self.abstract, weighted)


def trace(task: Any, model: Any, batch: dict[str, Any], **keys: Any) -> None:
    name = f"{type(task).__module__}:{type(task).__name__}"
    data = {"source": "synthetic", "shape": [16, 16]}
    train = spec.TrainSpec(task=name, batch=16, model=model, data=data, mesh={"dp": 2}, **keys)
    Traced(task, train, mesh.build_mesh(train.mesh, jax.devices()[:2]), 10).traced(batch)


@pytest.fixture
def promotions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How ranks are promoted wherever a loss is traced."""
    result: list[str] = []
    real = losses.cross_entropy

    def noted(*args: Any, **keys: Any) -> losses.Sums:
        result.append(jax.config.jax_numpy_rank_promotion)  # type: ignore[attr-defined]
        return real(*args, **keys)

    monkeypatch.setattr(losses, "cross_entropy", noted)
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_built_in_models_never_promote_ranks(
    case: str, precision: str, standard: None, promotions: list[str]
) -> None:
    task, model, batch, keys = CASES[case]
    trace(task, model, batch, precision=precision, optimizer={"ema": 0.9}, **keys)
    assert set(promotions) == {"raise"}
    assert jax.config.jax_numpy_rank_promotion == "allow"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("task", "model"),
    [(Classify(), {"kind": f"{__name__}:Theirs"}), (tiny.Digits(), {"kind": "mlp"})],
)
def test_user_code_may_broadcast(
    task: Any, model: Any, standard: None, promotions: list[str]
) -> None:
    batch = (
        LABELLED
        if type(task) is Classify
        else {**LABELLED, "image": np.zeros((16, 28, 28), np.uint8)}
    )
    trace(task, model, batch)
    assert set(promotions) == {"allow"}
