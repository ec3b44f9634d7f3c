from pathlib import Path

import numpy as np
import pydantic
import pytest
from PIL import Image

from jaxlaunch.trainer.data import augment
from jaxlaunch.trainer.data.augment import ArrayImage, Transform
from jaxlaunch.trainer.spec.augment import PRESETS, Augment, AugMix, Jitter

FIXTURE = Path(__file__).parents[3] / "fixtures" / "crops" / "crops.npz"

IMAGE = np.random.default_rng(0).integers(0, 256, (20, 28, 3), np.uint8)


def make_rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def transform_image(
    seed: int = 0, split: str = "train", size: tuple[int, int] | None = None, **keys: object
) -> np.ndarray:
    built = Transform(Augment.model_validate(keys), size, split)  # type: ignore[arg-type]
    return built(ArrayImage(IMAGE), make_rng(seed) if built.needs_rng else None)


def test_crop_is_the_first_drawn_box_that_fits() -> None:
    for seed in range(50):
        top, remaining, high, wide = augment.random_box(
            (20, 28), (0.08, 1.0), (3 / 4, 4 / 3), make_rng(seed)
        )
        draw = make_rng(seed)
        for _ in range(10):
            area = 560 * draw.uniform(0.08, 1.0)
            shape = np.exp(draw.uniform(np.log(3 / 4), np.log(4 / 3)))
            size = round(float(np.sqrt(area / shape))), round(float(np.sqrt(area * shape)))
            if size[0] <= 20 and size[1] <= 28:
                assert (high, wide) == size
                assert (top, remaining) == (draw.integers(21 - high), draw.integers(29 - wide))
                break
    assert augment.random_box((4, 100), (1.0, 1.0), (3 / 4, 4 / 3), make_rng()) == (
        0,
        47,
        4,
        5,
    )  # nothing fits


def begins_later(image_size: tuple[int, int], side: int, share: float) -> bool:
    """Whether torchvision's crop begins a pixel after that of transformers, which is ours."""
    short = int(side / share)
    long = short * max(image_size) // min(image_size)
    return any(int(left / 2) != round(left / 2) for left in (short - side, long - side))


def test_crops_equal_torchvision_to_the_border() -> None:
    compared = []
    with np.load(FIXTURE) as expected:
        for key in expected.files:
            number, name = key.split("/")
            picture, pixels = ArrayImage(expected[f"{number}/image"]), expected[key].astype(int)
            box = tuple(expected[f"{number}/box"].tolist())
            if name == "random":
                result = picture.read_pixels(box, pixels.shape[:2], crops_first=True)
                np.testing.assert_array_equal(result, pixels, err_msg=key)
            elif name not in ("image", "box"):
                if begins_later(picture.size, pixels.shape[0], float(name)):
                    continue
                evaluation = Transform(Augment(eval_crop=float(name)), pixels.shape[:2], "eval")
                # Pillow rounds to bytes after each direction, of which torchvision takes the other
                # one first where the crop is far smaller than the image.
                assert np.abs(evaluation(picture) - pixels).max() <= 2, key
            compared.append(name)
    assert {"random", "1.0", "0.875", "0.8"} <= set(compared)


def test_augmented_crops_equal_torchvision() -> None:
    image = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    transform_crops = Transform(Augment(crop=[0.1, 0.6]), (16, 16), "train")
    box = augment.random_box((30, 40), [0.1, 0.6], [3 / 4, 4 / 3], make_rng(3))
    top, left, height, width = map(int, box)
    cropped = Image.fromarray(image[top : top + height, left : left + width])
    expected = np.asarray(cropped.resize((16, 16), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(transform_crops(ArrayImage(image), make_rng(3)), expected)


def test_shift_equals_a_padded_crop() -> None:
    border = np.pad(IMAGE, ((4, 4), (4, 4), (0, 0)))
    for down, right in ((0, 0), (4, -4), (-3, 2), (1, 4)):
        expected = border[4 - down : 24 - down, 4 - right : 32 - right]
        np.testing.assert_array_equal(augment.shift_image(IMAGE, down, right), expected)
    draw = make_rng(3)
    down, right = draw.integers(-4, 5, size=2)
    np.testing.assert_array_equal(
        transform_image(3, shift=4), augment.shift_image(IMAGE, int(down), int(right))
    )


def test_flips_and_erasing() -> None:
    np.testing.assert_array_equal(transform_image(flip=1.0), IMAGE[:, ::-1])
    np.testing.assert_array_equal(transform_image(flip_vertical=1.0), IMAGE[::-1])
    actual = {transform_image(seed, flip=0.5).tobytes() for seed in range(9)}
    assert actual == {IMAGE.tobytes(), IMAGE[:, ::-1].tobytes()}
    erased = transform_image(erase=1.0)
    rows, columns = np.nonzero((erased != IMAGE).any(-1))
    inside = np.zeros((20, 28), bool)
    inside[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] = True
    assert (erased[inside] == np.round(IMAGE.mean((0, 1)))).all()
    np.testing.assert_array_equal(erased[~inside], IMAGE[~inside])
    assert 0.02 * 560 * 0.7 < inside.sum() < 0.33 * 560 * 1.3


def test_jitter_uses_random_factors_in_random_order() -> None:
    grey = IMAGE.astype(float) @ (0.299, 0.587, 0.114)
    for seed in range(4):
        draw = make_rng(seed)
        bright, contrast = draw.uniform(0.6, 1.4), draw.uniform(0.5, 1.5)
        order = draw.permutation(2)
        expected = IMAGE.astype(float)
        for at in order:
            mean = np.round((expected @ (0.299, 0.587, 0.114)).mean())
            expected = expected * bright if at == 0 else mean + (expected - mean) * contrast
            expected = np.clip(expected, 0, 255)
        asked = Jitter(brightness=0.4, contrast=0.5)
        result = np.asarray(
            augment.apply_jitter(Image.fromarray(IMAGE), asked, make_rng(seed)), float
        )
        assert np.abs(result - expected).max() <= 2.5, seed
    pale = np.asarray(augment.OPERATIONS["saturation"](Image.fromarray(IMAGE), -1.0), float)
    assert np.abs(pale - grey[..., None]).max() <= 1.0


def test_augmix_is_a_weighted_sum_of_chains() -> None:
    asked = AugMix(severity=3, width=2, depth=1)
    result = np.asarray(augment.apply_augmix(Image.fromarray(IMAGE), asked, make_rng(1)), float)
    draw, names = make_rng(1), [name for name in augment.OPERATIONS if name != "identity"]
    stored, changed = draw.dirichlet([1.0, 1.0])
    expected = stored * IMAGE
    for share in draw.dirichlet([1.0, 1.0]) * changed:
        name = names[draw.integers(len(names))]
        by = augment.operation_strength(name, int(draw.integers(3)), 10, (28 / 3, 20 / 3), 4)
        by = by if name in augment.UNSIGNED_OPERATIONS or draw.random() < 0.5 else -by
        expected = expected + share * np.asarray(
            augment.OPERATIONS[name](Image.fromarray(IMAGE), by), float
        )
    assert np.abs(result - expected).max() <= 1.0


@pytest.mark.parametrize("severity", [9, 10])
def test_strongest_augmix_runs_every_operation(severity: int) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8))
    options = AugMix(severity=severity, width=10, depth=10)
    for seed in range(8):
        mixed = augment.apply_augmix(image, options, np.random.default_rng(seed))
        assert mixed.size == image.size
    strength = augment.operation_strength("posterize", severity - 1, 10, (0.0, 0.0), 4)
    # torchvision 0.29 makes a tensor black; Pillow refuses 0 bits.
    assert strength == 0 and not np.asarray(augment.OPERATIONS["posterize"](image, strength)).any()


@pytest.mark.parametrize("preset", PRESETS)
def test_recipe_depends_on_its_generator_alone(preset: str) -> None:
    once, repeated, second = (
        transform_image(seed, size=(16, 16), preset=preset) for seed in (0, 0, 1)
    )
    assert once.shape == (16, 16, 3) and once.dtype == np.uint8
    np.testing.assert_array_equal(once, repeated)
    assert (once != second).any()
    held_out = Transform(Augment.model_validate({"preset": preset}), (16, 16), "eval")
    assert not held_out.needs_rng
    np.testing.assert_array_equal(
        held_out(ArrayImage(IMAGE)), transform_image(7, "eval", (16, 16), preset=preset)
    )


def test_grey_images_stay_grey() -> None:
    built = Transform(
        Augment.model_validate(
            {"preset": "imagenet-vit", "jitter": {"hue": 0.1, "saturation": 0.4}}
        ),
        (16, 16),
        "train",
    )
    assert built(ArrayImage(IMAGE[..., 0]), make_rng()).shape == (16, 16, 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"crop": [0.9, 0.1]}, "the first number is larger than the second"),
        ({"preset": "cifar", "crop": [0.5, 1.0]}, "crop and shift = 4 are both set"),
        ({"preset": "imagenet"}, "preset"),
    ],
)
def test_invalid_blocks_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        Augment.model_validate(keys)
