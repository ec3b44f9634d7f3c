import numpy as np
import pytest
from flax import nnx

from trainer.errors import SpecError
from trainer.spec import TrainSpec
from trainer.tasks.classify import Classify, standardized

NAME = "trainer.tasks.classify:Classify"


def test_the_model_has_the_shape_of_the_first_example() -> None:
    spec = TrainSpec(task=NAME, model={"kind": "mlp", "width": 8}, data={"source": "synthetic", "shape": [5, 4, 3]})
    task = Classify()
    model = nnx.eval_shape(lambda: task.model(spec, nnx.Rngs(0)))
    assert model.layers[0].kernel.shape == (60, 8)
    assert task.example(task.source(spec, "train")[0])["image"].dtype == np.uint8


def test_a_model_of_another_kind_is_an_error() -> None:
    spec = TrainSpec(task=NAME, model={"kind": "decoder"})
    with pytest.raises(SpecError, match="kind = decoder does not classify images; use mlp"):
        Classify().model(spec, nnx.Rngs(0))


def test_the_range_of_the_bytes_does_not_matter() -> None:
    image = np.random.default_rng(0).integers(0, 17, (3, 8, 8)).astype(np.uint8)
    np.testing.assert_allclose(standardized(image), standardized(image * 15), atol=1e-5)
    assert not standardized(np.full((1, 8, 8), 9, np.uint8)).any()
