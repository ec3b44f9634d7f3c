import numpy as np
from flax import nnx

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.models.classifiers import MLP
from jaxlaunch.trainer.step.state import ModelArrays

IMAGES = np.random.default_rng(0).normal(size=(5, 4, 3)).astype(np.float32)


def test_logits_are_relus_of_products() -> None:
    model = MLP(spec.MLP(layers=3, width=16, classes=7), (4, 3), nnx.Rngs(0))
    params = {
        name: np.array(value) for name, value in ModelArrays(model).split_model(model)[0].items()
    }
    x = IMAGES.reshape(5, 12)
    for number in range(3):
        x = np.maximum(x @ params[f"layers.{number}.kernel"] + params[f"layers.{number}.bias"], 0)
    np.testing.assert_allclose(
        model(IMAGES), x @ params["head.kernel"] + params["head.bias"], atol=1e-5
    )


def test_axes_alternate_so_that_mp_splits_columns_then_rows() -> None:
    axes = ModelArrays(
        nnx.eval_shape(lambda: MLP(spec.MLP(layers=2, width=16), (4, 3), nnx.Rngs(0)))
    ).axes
    assert axes["layers.0.kernel"] == ("embed", "hidden") and axes["layers.1.kernel"] == (
        "hidden",
        "embed",
    )
    assert axes["head.kernel"] == ("embed", "classes") and axes["layers.0.bias"] == ("hidden",)
