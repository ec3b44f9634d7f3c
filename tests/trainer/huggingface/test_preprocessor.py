"""preprocessor_config.json of folders as transformers writes them, by its arithmetic on a pixel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import folder
from jaxlaunch.trainer.spec import ResNet, TrainSpec, ViT

FIXTURE = Path(__file__).parents[2] / "fixtures" / "vit_tiny"
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
PIXEL = (200.0, 100.0, 50.0)


def of_transformers(given: dict[str, Any]) -> list[float]:
    """What its processors make of a pixel: times the factor, less the mean, over the deviation."""
    factor = given.get("rescale_factor", 1 / 255) if given.get("do_rescale", True) else 1.0
    means = [given["image_mean"][at % len(given["image_mean"])] for at in range(3)]
    stds = [given["image_std"][at % len(given["image_std"])] for at in range(3)]
    if not given.get("do_normalize", True):
        means, stds = [0.0] * 3, [1.0] * 3
    return [
        (each * factor - mean) / std for each, mean, std in zip(PIXEL, means, stds, strict=True)
    ]


@pytest.mark.parametrize(
    "given",
    [
        {
            "image_processor_type": "ConvNextImageProcessor",
            "size": {"shortest_edge": 224},
            **IMAGENET,
        },
        {
            "feature_extractor_type": "ViTFeatureExtractor",
            "do_normalize": True,
            "size": 224,
            **IMAGENET,
        },
        {
            **IMAGENET,
            "image_mean": [0.5],
            "image_std": [0.5],
            "rescale_factor": 0.00392156862745098,
        },
        {**IMAGENET, "do_rescale": False},
        {**IMAGENET, "do_normalize": False},
    ],
)
def test_a_folder_s_pixels_are_those_of_its_preprocessor_unless_the_job_says_others(
    given: dict[str, Any], tmp_path: Path
) -> None:
    home = tmp_path / "vit"
    home.mkdir()
    (home / "config.json").write_text(
        json.dumps(json.loads((FIXTURE / "config.json").read_text())["hf_config"])
    )
    model: dict[str, Any] = {"kind": "vit", "init_from": str(home)}
    before = folder.read_model(str(home))
    assert isinstance(before, ViT) and before.pixel_mean is None
    (home / "preprocessor_config.json").write_text(json.dumps(given))
    found = folder.resolve_spec(
        TrainSpec.model_validate({"task": "classify", "model": model})
    ).model
    assert isinstance(found, ViT) and found.pixel_mean and found.pixel_std
    ours = [
        (each - m) / s for each, m, s in zip(PIXEL, found.pixel_mean, found.pixel_std, strict=True)
    ]
    assert ours == pytest.approx(of_transformers(given), rel=1e-6)
    for own in (
        {"pixel_mean": None, "pixel_std": None},
        {"pixel_mean": [1.0] * 3, "pixel_std": [2.0] * 3},
    ):
        kept = folder.resolve_spec(
            TrainSpec.model_validate({"task": "classify", "model": model | own})
        ).model
        assert isinstance(kept, ViT) and kept.pixel_mean == own["pixel_mean"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "it is not a block of keys"),
        ("{", "cannot be read"),
        ('{"image_mean": "a", "image_std": [1]}', "cannot be read"),
        ('{"image_mean": [0.5], "image_std": [0]}', "image_std must be above 0"),
    ],
)
def test_a_damaged_one_is_a_sentence(text: str, says: str) -> None:
    with pytest.raises(
        SpecError, match=f"x/preprocessor_config.json cannot be read: .*{says}|{says}"
    ):
        folder.parse_pixel_statistics(text, "x/preprocessor_config.json")


def test_what_is_written_is_read_again_and_what_cannot_be_written_is_not() -> None:
    model = ResNet(pixel_mean=[120.0, 110.0, 100.0], pixel_std=[60.0, 61.0, 62.0])
    said = folder.render_preprocessor(model, (224, 224), 0.875)
    assert said is not None and said["size"] == {"shortest_edge": 256}
    again = folder.parse_pixel_statistics(json.dumps(said), "")
    assert again["pixel_mean"] == pytest.approx(model.pixel_mean) and again[
        "pixel_std"
    ] == pytest.approx(model.pixel_std)
    wide = folder.render_preprocessor(model, (224, 320), 1.0)
    assert (
        wide is not None
        and wide["size"] == {"height": 224, "width": 320}
        and "crop_size" not in wide
    )
    assert folder.render_preprocessor(ResNet(), (224, 224), 1.0) is None
