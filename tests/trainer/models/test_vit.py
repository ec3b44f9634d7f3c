from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.models.classifiers import ViT
from jaxlaunch.trainer.tasks.classify import Classify
from tests.trainer.tiny import Digits, run

CONFIG = spec.ViT(layers=2, width=32, heads=4, image=[28, 28], channels=1, patch=7)
IMAGES = np.random.default_rng(0).normal(size=(3, 28, 28)).astype(np.float32)


class Patches(Digits):
    """The bright halves, for a ViT."""

    model = Classify.model

    def source(self, spec: spec.TrainSpec, split: str) -> Any:
        return [{"image": np.zeros((28, 28), np.uint8), "label": 0}]


def changed(**keys: Any) -> spec.ViT:
    return CONFIG.model_copy(update=keys)


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_logits_depend_on_every_patch(pool: str) -> None:
    model = ViT(changed(pool=pool), nnx.Rngs(0))
    initial = np.asarray(model(IMAGES))
    for y, x in ((0, 0), (27, 27), (0, 27)):
        image = IMAGES.copy()
        image[0, y, x] += 1.0
        after = np.asarray(model(image))
        assert (after[0] != initial[0]).all()
        np.testing.assert_array_equal(after[1:], initial[1:])


def test_logits_depend_on_the_order_of_patches() -> None:
    model = ViT(CONFIG, nnx.Rngs(0))
    swapped = np.concatenate([IMAGES[:, 14:], IMAGES[:, :14]], axis=1)
    assert not np.allclose(model(IMAGES), model(swapped))


def test_mean_pooling_has_no_class_token() -> None:
    models = {pool: ViT(changed(pool=pool), nnx.Rngs(0)) for pool in ("cls", "mean")}
    tokens = {pool: model.positions.shape[0] for pool, model in models.items()}
    assert tokens == {"cls": 17, "mean": 16}


def test_single_channel_axis_may_be_omitted() -> None:
    model = ViT(CONFIG, nnx.Rngs(0))
    np.testing.assert_array_equal(model(IMAGES), model(IMAGES[..., None]))


def test_images_of_another_shape_are_rejected() -> None:
    train = spec.TrainSpec(task="tests:Patches", model=changed(image=[32, 32], patch=8))
    with pytest.raises(
        SpecError, match=r"image = \[32, 32\] and channels = 1, .* of shape \[28, 28\]"
    ):
        Patches().model(train, nnx.Rngs(0))


def test_pixels_are_normalized_by_the_model() -> None:
    pixels = {"pixel_mean": [128.0], "pixel_std": [64.0]}
    losses, _ = run(Patches(), 3, model=changed(**pixels))
    assert np.isfinite(losses).all() and (losses != run(Patches(), 3, model=CONFIG)[0]).any()
