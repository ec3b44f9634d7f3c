"""preprocessor_config.json of folders as transformers writes them, by its arithmetic on a pixel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import folder
from jaxlaunch.trainer.spec import ResNet, TrainSpec, ViT
from tests.trainer.references import config

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
PIXEL = (200.0, 100.0, 50.0)


def normalize_like_transformers(keys: dict[str, Any]) -> list[float]:
    """What its processors make of a pixel: times the factor, less the mean, over the deviation."""
    factor = keys.get("rescale_factor", 1 / 255) if keys.get("do_rescale", True) else 1.0
    means, stds = np.array(keys["image_mean"]), np.array(keys["image_std"])
    if not keys.get("do_normalize", True):
        means, stds = np.zeros(3), np.ones(3)
    return ((np.array(PIXEL) * factor - means) / stds).tolist()


@pytest.mark.parametrize(
    "keys",
    [
        {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 224}},
        {"feature_extractor_type": "ViTFeatureExtractor", "do_normalize": True, "size": 224},
        {"image_mean": [0.5], "image_std": [0.5], "rescale_factor": 0.00392156862745098},
        {"do_rescale": False},
        {"do_normalize": False},
    ],
)
def test_pixel_statistics_come_from_the_job_or_the_preprocessor(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    keys = IMAGENET | keys
    (tmp_path / "config.json").write_text(json.dumps(config("vit_tiny")))

    def resolve_model(**pixels: Any) -> ViT:
        model = {"kind": "vit", "init_from": str(tmp_path), **pixels}
        job = TrainSpec.model_validate({"task": "classify", "model": model})
        resolved = folder.resolve_spec(job).model
        assert isinstance(resolved, ViT)
        return resolved

    assert resolve_model().pixel_mean is None
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(keys))
    model = resolve_model()
    actual = (np.array(PIXEL) - np.array(model.pixel_mean)) / np.array(model.pixel_std)
    assert actual == pytest.approx(normalize_like_transformers(keys), rel=1e-6)
    assert resolve_model(pixel_mean=None, pixel_std=None).pixel_mean is None
    assert resolve_model(pixel_mean=[1.0] * 3, pixel_std=[2.0] * 3).pixel_mean == [1.0] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "it is not a block of keys"),
        ("{", "cannot be read"),
        ('{"image_mean": "a", "image_std": [1]}', "cannot be read"),
        ('{"image_mean": [0.5], "image_std": [0]}', "image_std must be above 0"),
    ],
)
def test_damaged_preprocessor_is_reported(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=f"x/y.json cannot be read: .*{message}|{message}"):
        folder.parse_pixel_statistics(text, "x/y.json")


def test_preprocessor_round_trips() -> None:
    model = ResNet(pixel_mean=[120.0, 110.0, 100.0], pixel_std=[60.0, 61.0, 62.0])
    output = folder.render_preprocessor(model, (224, 224), 0.875)
    assert output is not None and output["size"] == {"shortest_edge": 256}
    repeated = folder.parse_pixel_statistics(json.dumps(output), "")
    assert repeated["pixel_mean"] == pytest.approx(model.pixel_mean)
    assert repeated["pixel_std"] == pytest.approx(model.pixel_std)
    # transformers cannot crop to other proportions than a square's.
    wide = folder.render_preprocessor(model, (224, 320), 1.0)
    assert wide is not None and wide["do_resize"] is False
    assert wide.keys().isdisjoint({"size", "crop_size"})
    rounded = folder.render_preprocessor(model, (32, 32), 0.875)
    assert rounded is not None and rounded["size"] == {"shortest_edge": 36}
    grey = ResNet(channels=1, pixel_mean=[120.0], pixel_std=[60.0])
    keys = folder.render_preprocessor(grey, (28, 28), 1.0)
    assert keys is not None and keys["image_processor_type"] == "BitImageProcessorFast"
    assert folder.render_preprocessor(ResNet(), (224, 224), 1.0) is None
