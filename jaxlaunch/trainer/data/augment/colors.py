"""Operations on the pixels of an image, as torchvision and Pillow have them: by name, each with a strength."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from jaxlaunch.trainer.spec.vision.augment import AugMix, Jitter, RandAugment

Picture = Image.Image
Operation = Callable[[Picture, float], Picture]


def brightness(image: Picture, factor: float) -> Picture:
    """Every pixel times the factor."""
    return ImageEnhance.Brightness(image).enhance(factor)


def contrast(image: Picture, factor: float) -> Picture:
    """The difference from the image's mean grey times the factor."""
    return ImageEnhance.Contrast(image).enhance(factor)


def saturation(image: Picture, factor: float) -> Picture:
    """The difference from the image in grey times the factor."""
    return ImageEnhance.Color(image).enhance(factor)


def hue(image: Picture, turn: float) -> Picture:
    """The colours turned on their circle by this share of it; grey stays."""
    if image.mode == "L":
        return image
    tone, *rest = image.convert("HSV").split()
    turned = Image.fromarray(np.asarray(tone) + np.uint8(int(turn * 255) % 256))
    return Image.merge("HSV", (turned, *rest)).convert("RGB")


def jittered(image: Picture, asked: Jitter, rng: np.random.Generator) -> Picture:
    """The operations that are asked for, in an order that is drawn, each by a factor that is drawn."""
    factors = {brightness: asked.brightness, contrast: asked.contrast, saturation: asked.saturation}
    each: list[tuple[Operation, float]] = [
        (operation, rng.uniform(max(0.0, 1.0 - most), 1.0 + most)) for operation, most in factors.items() if most
    ]
    if asked.hue:
        each.append((hue, rng.uniform(-asked.hue, asked.hue)))
    for at in rng.permutation(len(each)):
        operation, factor = each[at]
        image = operation(image, factor)
    return image


def affine(image: Picture, *matrix: float) -> Picture:
    """The image whose pixel (x, y) is that at (ax + by + c, dx + ey + f) of this one, the nearest; black outside."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


# Name -> the image by a strength, which is a slope, pixels, degrees, a factor less 1, bits or a threshold.
OPERATIONS: Mapping[str, Operation] = {
    "identity": lambda image, _: image,
    "shear_x": lambda image, slope: affine(image, 1.0, slope, 0.0, 0.0, 1.0, 0.0),
    "shear_y": lambda image, slope: affine(image, 1.0, 0.0, 0.0, slope, 1.0, 0.0),
    "translate_x": lambda image, pixels: affine(image, 1.0, 0.0, -int(pixels), 0.0, 1.0, 0.0),
    "translate_y": lambda image, pixels: affine(image, 1.0, 0.0, 0.0, 0.0, 1.0, -int(pixels)),
    "rotate": lambda image, degrees: image.rotate(degrees),
    "brightness": lambda image, more: brightness(image, 1.0 + more),
    "saturation": lambda image, more: saturation(image, 1.0 + more),
    "contrast": lambda image, more: contrast(image, 1.0 + more),
    "sharpness": lambda image, more: ImageEnhance.Sharpness(image).enhance(1.0 + more),
    "posterize": lambda image, bits: ImageOps.posterize(image, int(bits)),
    "solarize": lambda image, threshold: ImageOps.solarize(image, threshold),  # type: ignore[arg-type]
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
}
UNSIGNED = ("identity", "posterize", "solarize", "autocontrast", "equalize")
BINS, AUGMIX_BINS = 31, 10  # steps of a strength, as torchvision has them


def strength(name: str, step: int, bins: int, reach: tuple[float, float], bits: int) -> float:
    """Of an operation at a step of `bins`: `reach` is the farthest shift right and down, `bits` posterize's most."""
    share = step / (bins - 1)
    most = {"shear_x": 0.3, "shear_y": 0.3, "translate_x": reach[0], "translate_y": reach[1], "rotate": 30.0}
    match name:
        case "posterize":
            return bits - round(step / ((bins - 1) / 4))
        case "solarize":
            return 255.0 * (1.0 - share)
        case "identity" | "autocontrast" | "equalize":
            return 0.0
    return share * most.get(name, 0.9)


def _signed(name: str, by: float, rng: np.random.Generator) -> float:
    return by if name in UNSIGNED or rng.random() < 0.5 else -by


def rand_augmented(image: Picture, asked: RandAugment, rng: np.random.Generator) -> Picture:
    """`count` operations, drawn with replacement, the signs of their strengths drawn too."""
    reach = 150.0 / 331.0 * image.width, 150.0 / 331.0 * image.height
    for at in rng.integers(len(OPERATIONS), size=asked.count):
        name = list(OPERATIONS)[at]
        by = strength(name, asked.magnitude, BINS, reach, 8)
        image = OPERATIONS[name](image, _signed(name, by, rng))
    return image


def aug_mixed(image: Picture, asked: AugMix, rng: np.random.Generator) -> Picture:
    """The image and `width` chains of operations on it, each times its share, summed."""
    names = [name for name in OPERATIONS if name != "identity"]
    reach = image.width / 3.0, image.height / 3.0
    kept, changed = rng.dirichlet([asked.alpha] * 2)
    mixed = kept * np.asarray(image, np.float64)
    for share in rng.dirichlet([asked.alpha] * asked.width) * changed:
        chain = image
        for _ in range(asked.depth or int(rng.integers(1, 4))):
            name = names[rng.integers(len(names))]
            by = strength(name, int(rng.integers(asked.severity)), AUGMIX_BINS, reach, 4)
            chain = OPERATIONS[name](chain, _signed(name, by, rng))
        mixed += share * np.asarray(chain, np.float64)
    return Image.fromarray(np.clip(mixed, 0.0, 255.0).astype(np.uint8))
