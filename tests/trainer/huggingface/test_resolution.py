"""A ViT for images of another size than its folder's."""

from pathlib import Path

import numpy as np
import pytest

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface.folder import resolve_spec
from tests.trainer import references
from tests.trainer.references import folder, step, tensors

CASE = "vit_tiny"


@pytest.mark.parametrize(("name", "image"), [("wide", [24, 72]), ("large", [64, 48])])
def test_interpolated_positions_equal_transformers(
    name: str, image: list[int], tmp_path: Path
) -> None:
    trained = step(CASE, folder(CASE, tmp_path / "hf"), model={"image": image})
    inputs = tensors(f"{CASE}_interpolated", "io")
    state = trained.init_state()
    with trained.builder.trace_context():
        model = trained.loss.evaluation_model(state.params, state.buffers)
        actual = model(inputs[f"{name}.pixel_values"].transpose(0, 2, 3, 1))
    expected = inputs[f"{name}.logits"]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=references.limit(CASE))


def test_indivisible_image_size_is_rejected(tmp_path: Path) -> None:
    block = {"kind": "vit", "init_from": str(folder(CASE, tmp_path / "hf")), "image": [36, 36]}
    train = spec.TrainSpec.model_validate({"task": "classify", "model": block})
    with pytest.raises(
        SpecError, match=r"image = \[36, 36\] is not a height and a width that are multiples"
    ):
        resolve_spec(train)
