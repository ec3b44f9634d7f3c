"""Each operation equals torchvision's, which runs in an environment of its own."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxlaunch.trainer.data import augment
from jaxlaunch.trainer.data.augment import ArrayImage, Transform
from jaxlaunch.trainer.spec.augment import Augment
from tests import environments, needs

pytestmark = pytest.mark.extended

PROGRAM = Path(__file__).with_name("torchvision_says.py")
SHAPE = 60, 80
SPACES = {
    "rand": (augment.RANDAUGMENT_BINS, 9, 150 / 331, 8),
    "mix": (augment.AUGMIX_BINS, 2, 1 / 3, 4),
    "strong": (augment.AUGMIX_BINS, 9, 1 / 3, 4),
}


def make_picture() -> np.ndarray:
    """Smooth colours with an edge and some noise: the range of each channel is not all of it."""
    y, x = np.mgrid[: SHAPE[0], : SHAPE[1]]
    channels = [30 + 2 * y, 60 + x, 200 - y - x // 2]
    image = np.stack(channels, -1) + 40 * ((x > 35) & (y > 20))[..., None]
    return np.clip(image + np.random.default_rng(0).integers(-9, 10, (*SHAPE, 3)), 0, 255).astype(
        np.uint8
    )


@pytest.fixture(scope="module")
def torchvision_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    folder, site = tmp_path_factory.mktemp("torchvision"), needs.packages("torchvision")
    needs.packages("torch")
    options = {"image": make_picture(), "box": (7, 11, 30, 44), "size": (24, 32), "short": 28}
    np.savez(folder / "given.npz", **options)  # type: ignore[arg-type]
    environments.run_program(
        "torch", str(PROGRAM), str(site), str(folder / "given.npz"), str(folder / "made.npz")
    )
    return dict(np.load(folder / "made.npz"))


def test_operations_equal_torchvision(torchvision_results: dict[str, np.ndarray]) -> None:
    compared = set()
    for key, expected in torchvision_results.items():
        space, _, rest = key.partition("/")
        if space not in SPACES:
            continue
        name, sign = rest.split("/")
        bins, step, share, bits = SPACES[space]
        by = augment.operation_strength(
            name, step, bins, (share * SHAPE[1], share * SHAPE[0]), bits
        )
        result = augment.OPERATIONS[name](
            Image.fromarray(make_picture()), -by if sign == "-" else by
        )
        apart = np.abs(np.asarray(result).astype(int) - expected)
        # Pillow rounds its grey and its smoothed image to bytes before it blends with them.
        assert apart.max() <= (2 if name in ("saturation", "contrast", "sharpness") else 1), (
            key,
            apart.max(),
        )
        assert (apart > 1).mean() < 0.01, key
        compared.add(name)
        assert name in augment.UNSIGNED_OPERATIONS or f"{space}/{name}/-" in torchvision_results, (
            key
        )
    assert compared == augment.OPERATIONS.keys() - {"identity"}


def test_hue_and_crops_equal_torchvision(torchvision_results: dict[str, np.ndarray]) -> None:
    for key in (key for key in torchvision_results if key.startswith("hue/")):
        result = np.asarray(augment.shift_hue(Image.fromarray(make_picture()), float(key[4:])))
        assert np.abs(result.astype(int) - torchvision_results[key]).mean() < 2.0, (
            key
        )  # Pillow's circle has 256 steps
    image = ArrayImage(make_picture())
    cropped = image.read_pixels((7, 11, 30, 44), (24, 32), crops_first=True).astype(int)
    assert np.abs(cropped - torchvision_results["resized_crop"]).max() <= 1
    observed = Transform(Augment(eval_crop=24 / 28), (24, 32), "eval")(image).astype(int)
    assert np.abs(observed - torchvision_results["center_crop"]).max() <= 2
    assert augment.center_box(SHAPE, (24, 32)) == (0.0, 0.0, 60.0, 80.0)
