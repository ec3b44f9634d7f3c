import numpy as np
from flax import nnx

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.models.classifiers import MLP
from jaxlaunch.trainer.step.state import ModelArrays

IMAGES = np.random.default_rng(0).normal(size=(5, 4, 3)).astype(np.float32)


def test_logits_equal_a_numpy_reference() -> None:
    model = MLP(spec.MLP(layers=3, width=16, classes=7), (4, 3), nnx.Rngs(0))
    arrays, _ = ModelArrays(model).split_model(model)
    params = {name: np.array(value) for name, value in arrays.items()}
    x = IMAGES.reshape(5, 12)
    for number in range(3):
        x = np.maximum(x @ params[f"layers.{number}.kernel"] + params[f"layers.{number}.bias"], 0)
    expected = x @ params["head.kernel"] + params["head.bias"]
    np.testing.assert_allclose(model(IMAGES), expected, atol=1e-5)


def test_axes_alternate_between_columns_and_rows() -> None:
    config = spec.MLP(layers=2, width=16)
    axes = ModelArrays(nnx.eval_shape(lambda: MLP(config, (4, 3), nnx.Rngs(0)))).axes
    assert axes["layers.0.kernel"] == ("embed", "hidden")
    assert axes["layers.1.kernel"] == ("hidden", "embed")
    assert axes["head.kernel"] == ("embed", "classes") and axes["layers.0.bias"] == ("hidden",)
