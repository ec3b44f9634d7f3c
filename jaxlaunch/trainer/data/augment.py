"""Resizes and augments images.

The transform of the training split draws a box, flips and operations from the random generator of
the example's position, so that a resumed run draws the same ones. The transform of the evaluation
split is deterministic. The operations on pixels are those of torchvision and Pillow, each with a
strength.

H height, W width, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance, ImageOps

from jaxlaunch.trainer.data.examples import UnusableExampleError
from jaxlaunch.trainer.data.source import DataSource, DerivedSource, Source, Split
from jaxlaunch.trainer.spec import ImageData
from jaxlaunch.trainer.spec.augment import Augment, AugMix, Jitter, RandAugment

Pixels = npt.NDArray[np.uint8]
# Height and width.
Size = tuple[int, int]
# Top, left, height and width.
Box = tuple[float, float, float, float]
PilImage = Image.Image
Operation = Callable[[PilImage, float], PilImage]

NO_AUGMENT = Augment()
# Number of times that a rectangle is drawn before the fallback is taken.
MAX_TRIES = 10
# Number of discrete strengths, as in torchvision.
RANDAUGMENT_BINS, AUGMIX_BINS = 31, 10


class ReadableImage(Protocol):
    """An image that may not be decoded yet, and whose parts can be read at a requested size."""

    size: Size

    def read_pixels(
        self,
        box: Box | None = None,
        size: Size | None = None,
        mirrored: bool = False,
        *,
        crops_first: bool = False,
    ) -> Pixels:
        """Return the part in `box`, or all of it, resized to `size` and mirrored: [H, W, C].

        At the border of the box, the filter also reads pixels outside of it, as if the whole image
        were resized and then cropped. With `crops_first` it does not.
        """
        ...


class Transform:
    """The transform of the images of a split to `size`; None keeps the size of each image.

    Attributes:
        needs_rng: Whether every call needs a random generator.
    """

    def __init__(self, augment: Augment | None, size: Size | None, split: Split) -> None:
        self._augment, self._size = augment or NO_AUGMENT, size
        recipe = self._augment.model_copy(
            update={"eval_crop": 1.0, "preset": None, "ratio": NO_AUGMENT.ratio}
        )
        self.needs_rng = split == "train" and recipe != NO_AUGMENT
        # Share of the limiting side that is read.
        self._center_share = self._augment.eval_crop if split == "eval" else 1.0

    def __call__(self, picture: ReadableImage, rng: np.random.Generator | None = None) -> Pixels:
        """Return the pixels [H, W, C], as a copy if they are modified."""
        size = self._size or picture.size
        if rng is None or not self.needs_rng:
            return _read_center(picture, size, self._center_share)
        image = self._crop_image(picture, size, rng)
        augment = self._augment
        if augment.flip_vertical and rng.random() < augment.flip_vertical:
            image = image[::-1]
        if augment.randaugment or augment.augmix or augment.jitter:
            pil_image = to_pil_image(image)
            if augment.randaugment is not None:
                pil_image = apply_randaugment(pil_image, augment.randaugment, rng)
            if augment.augmix is not None:
                pil_image = apply_augmix(pil_image, augment.augmix, rng)
            if augment.jitter is not None:
                pil_image = apply_jitter(pil_image, augment.jitter, rng)
            image = np.asarray(pil_image).reshape(image.shape)
        image = np.ascontiguousarray(image)
        if augment.erase and rng.random() < augment.erase:
            image = image.copy()
            hole = random_hole((image.shape[0], image.shape[1]), rng)
            image[hole] = np.round(image.mean((0, 1))).astype(np.uint8)
        return image

    def _crop_image(self, picture: ReadableImage, size: Size, rng: np.random.Generator) -> Pixels:
        if self._augment.crop is not None:
            box = random_box(picture.size, self._augment.crop, self._augment.ratio, rng)
            return picture.read_pixels(box, size, self._draw_flip(rng), crops_first=True)
        image = _read_center(picture, size)
        if max_shift := self._augment.shift:
            down, right = rng.integers(-max_shift, max_shift + 1, size=2).tolist()
            image = shift_image(image, down, right)
        return mirror_image(image) if self._draw_flip(rng) else image

    def _draw_flip(self, rng: np.random.Generator) -> bool:
        return bool(self._augment.flip and rng.random() < self._augment.flip)


def _read_center(picture: ReadableImage, size: Size, share: float = 1.0) -> Pixels:
    if share == 1.0 and size == picture.size:
        return picture.read_pixels()
    return picture.read_pixels(center_box(picture.size, size, share), size)


def to_pil_image(image: Pixels) -> PilImage:
    """Convert an array [H, W, C] of one channel or three to a Pillow image."""
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


class ArrayImage:
    """An image in memory, uint8 [H, W, C] with one channel or three."""

    def __init__(self, image: Any) -> None:
        array = np.asarray(image)
        array = array[..., None] if array.ndim == 2 else array
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] not in (1, 3):
            raise UnusableExampleError(
                f"an image is {array.dtype}{list(array.shape)}; data.augment and data.size need "
                "uint8 [H, W, C] with 1 or 3 channels"
            )
        self._image: Pixels = array
        self.size: Size = (array.shape[0], array.shape[1])

    def read_pixels(
        self,
        box: Box | None = None,
        size: Size | None = None,
        mirrored: bool = False,
        *,
        crops_first: bool = False,
    ) -> Pixels:
        """Return the part in `box`, or all of it, resized to `size` (bilinear), and mirrored."""
        top, left, height, width = (0, 0, *self.size) if box is None else box
        if size is None or (top, left, height, width) == (0, 0, *size):
            return mirror_image(self._image) if mirrored else self._image
        picture = to_pil_image(self._image)
        edges = (left, top, left + width, top + height)
        resized = resize_box(picture, edges, size, crops_first=crops_first)
        if mirrored:
            resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(resized).reshape(*size, self._image.shape[-1])


class AugmentedSource(DerivedSource):
    """A source whose examples contain an `image`, to which a transform is applied."""

    def __init__(self, source: Source, transform: Transform) -> None:
        super().__init__(source)
        self._transform = transform
        self.may_draw = self.takes_rng = transform.needs_rng

    def __getitem__(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        raw = self._source[index]
        if "image" not in raw:
            raise UnusableExampleError(
                f"no image, which data.augment and data.size need; it has {', '.join(sorted(raw))}"
            )
        image = self._transform(ArrayImage(raw["image"]), rng)
        return {**raw, "image": image if np.ndim(raw["image"]) == 3 else image[..., 0]}


def transform_images(source: DataSource, data: ImageData, split: Split) -> DataSource:
    """Return the source with the size and the augmentation of its data block, if it sets any."""
    if not data.changes_images:
        return source
    return AugmentedSource(source, Transform(data.augment, data.shape, split))


# --- boxes and positions --------------------------------------------------------------------------


def random_box(
    image_size: Size, area: Sequence[float], ratio: Sequence[float], rng: np.random.Generator
) -> Box:
    """Draw a box with a share of the area from `area` and a width / height from `ratio`.

    If no drawn box fits, return the largest centered box whose ratio is allowed (Szegedy et al.
    2015, as in torchvision).
    """
    image_height, image_width = image_size
    if box := _draw_box(image_size, (image_height + 1, image_width + 1), area, ratio, rng):
        return box
    aspect = min(max(image_width / image_height, ratio[0]), ratio[1])
    height = min(image_height, max(1, round(image_width / aspect)))
    width = min(image_width, max(1, round(image_height * aspect)))
    return (image_height - height) // 2, (image_width - width) // 2, height, width


def random_hole(
    image_size: Size,
    rng: np.random.Generator,
    area: Sequence[float] = (0.02, 0.33),
    ratio: Sequence[float] = (0.3, 3.3),
) -> tuple[slice, slice]:
    """Draw the rows and columns to erase, or empty slices if no hole fits (Zhong et al. 2020)."""
    if box := _draw_box(image_size, image_size, area, ratio, rng, min_side=0):
        top, left, height, width = box
        return slice(top, top + height), slice(left, left + width)
    return slice(0), slice(0)


def _draw_box(
    image_size: Size,
    limit: Size,
    area: Sequence[float],
    ratio: Sequence[float],
    rng: np.random.Generator,
    min_side: int = 1,
) -> tuple[int, int, int, int] | None:
    """Draw the top, left, height and width of a box below `limit`. Return None if none fits."""
    for _ in range(MAX_TRIES):
        pixels = image_size[0] * image_size[1] * rng.uniform(area[0], area[1])
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        height, width = round(math.sqrt(pixels / aspect)), round(math.sqrt(pixels * aspect))
        if min_side <= height < limit[0] and min_side <= width < limit[1]:
            top = int(rng.integers(image_size[0] - height + 1))
            return top, int(rng.integers(image_size[1] - width + 1)), height, width
    return None


def center_box(image_size: Size, size: Size, share: float = 1.0) -> Box:
    """Return the centered box with the proportions of `size` and `share` of the limiting side.

    These are the pixels that transformers' image processors read, which resize to `size` / `share`
    and then crop: they round the size of the resized image and the corner of the crop down to whole
    pixels. torchvision's CenterCrop reads the same, or begins one pixel later where half a pixel is
    left over.
    """
    limiting_axis = 0 if image_size[0] * size[1] <= image_size[1] * size[0] else 1
    # A quotient such as 223.99999 is a rounded whole number.
    resized_side = math.floor(size[limiting_axis] / share + 1e-6)
    starts, lengths = [], []
    for side, target in zip(image_size, size, strict=True):
        resized = resized_side * side // image_size[limiting_axis]
        starts.append((resized - target) // 2 * side / resized)
        lengths.append(target * side / resized)
    return starts[0], starts[1], lengths[0], lengths[1]


def resize_box(
    image: PilImage,
    edges: tuple[float, float, float, float],
    size: Size,
    *,
    crops_first: bool,
) -> PilImage:
    """Resize (bilinear) the part of an image within `edges`: left, top, right and bottom.

    The filter also reads pixels around the edges, unless `crops_first`, which torchvision's
    resized_crop does.
    """
    if crops_first:
        # Edges of a JPEG that is decoded at a reduced scale may be between pixels.
        left, top = math.floor(edges[0]), math.floor(edges[1])
        image = image.crop((left, top, math.ceil(edges[2]), math.ceil(edges[3])))
        edges = (edges[0] - left, edges[1] - top, edges[2] - left, edges[3] - top)
    return image.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=edges)


def shift_image(image: Pixels, down: int, right: int) -> Pixels:
    """Shift the image by a number of pixels, which may be negative, and fill with zeros.

    The result is a crop of the image padded with zeros.
    """
    height, width = image.shape[:2]
    shifted = np.zeros_like(image)
    rows = slice(max(down, 0), height + min(down, 0))
    columns = slice(max(right, 0), width + min(right, 0))
    shifted[rows, columns] = image[
        max(-down, 0) : height - max(down, 0), max(-right, 0) : width - max(right, 0)
    ]
    return shifted


def mirror_image(image: Pixels) -> Pixels:
    """Return a mirrored copy of an image [H, W, C]."""
    # NumPy is fastest if it copies one channel at a time.
    mirrored = np.empty_like(image)
    for channel in range(image.shape[-1]):
        mirrored[..., channel] = image[:, ::-1, channel]
    return mirrored


# --- operations on pixels -------------------------------------------------------------------------


def shift_hue(image: PilImage, turn: float) -> PilImage:
    """Rotate the hue by a share of the color circle; grey images are unchanged."""
    if image.mode == "L":
        return image
    hue_channel, *other_channels = image.convert("HSV").split()
    rotated_hue = Image.fromarray(np.asarray(hue_channel) + np.uint8(int(turn * 255) % 256))
    return Image.merge("HSV", (rotated_hue, *other_channels)).convert("RGB")


def transform_affine(image: PilImage, *matrix: float) -> PilImage:
    """Map output pixel (x, y) to input pixel (ax + by + c, dx + ey + f), black outside."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


def posterize_image(image: PilImage, bits: int) -> PilImage:
    """Keep the upper bits of each channel; 0 bits, which Pillow rejects, give a black image."""
    return ImageOps.posterize(image, bits) if bits else image.point(lambda _: 0)


# Operations by name, and their strength: a slope, a number of pixels, degrees, a factor minus 1, a
# number of bits, or a threshold.
OPERATIONS: Mapping[str, Operation] = {
    "identity": lambda image, _: image,
    "shear_x": lambda image, slope: transform_affine(image, 1.0, slope, 0.0, 0.0, 1.0, 0.0),
    "shear_y": lambda image, slope: transform_affine(image, 1.0, 0.0, 0.0, slope, 1.0, 0.0),
    "translate_x": lambda image, pixels: transform_affine(image, 1, 0, -int(pixels), 0, 1, 0),
    "translate_y": lambda image, pixels: transform_affine(image, 1, 0, 0, 0, 1, -int(pixels)),
    "rotate": lambda image, degrees: image.rotate(degrees),
    "brightness": lambda image, change: ImageEnhance.Brightness(image).enhance(1.0 + change),
    "saturation": lambda image, change: ImageEnhance.Color(image).enhance(1.0 + change),
    "contrast": lambda image, change: ImageEnhance.Contrast(image).enhance(1.0 + change),
    "sharpness": lambda image, change: ImageEnhance.Sharpness(image).enhance(1.0 + change),
    "posterize": lambda image, bits: posterize_image(image, int(bits)),
    "solarize": lambda image, threshold: ImageOps.solarize(image, threshold),  # type: ignore[arg-type]
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
}
# Operations of color jitter by their keys.
ENHANCERS = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}
# Operations whose strength has no random sign.
UNSIGNED_OPERATIONS = ("identity", "posterize", "solarize", "autocontrast", "equalize")


def apply_jitter(image: PilImage, jitter: Jitter, rng: np.random.Generator) -> PilImage:
    """Apply the configured operations in a random order, each with a random factor."""
    factors = [
        (name, rng.uniform(max(0.0, 1.0 - strength), 1.0 + strength))
        for name in ENHANCERS
        if (strength := getattr(jitter, name))
    ]
    if jitter.hue:
        factors.append(("hue", rng.uniform(-jitter.hue, jitter.hue)))
    for index in rng.permutation(len(factors)):
        name, factor = factors[index]
        if name == "hue":
            image = shift_hue(image, factor)
        else:
            image = ENHANCERS[name](image).enhance(factor)
    return image


def operation_strength(
    name: str, step: int, bins: int, max_translation: tuple[float, float], max_bits: int
) -> float:
    """Return the strength of an operation at a step of `bins`.

    `max_translation` is the largest translation to the right and down in pixels, `max_bits` the
    largest number of bits of posterize.
    """
    share = step / (bins - 1)
    max_strengths = {
        "shear_x": 0.3,
        "shear_y": 0.3,
        "translate_x": max_translation[0],
        "translate_y": max_translation[1],
        "rotate": 30.0,
    }
    match name:
        case "posterize":
            return max_bits - round(step / ((bins - 1) / 4))
        case "solarize":
            return 255.0 * (1.0 - share)
        case "identity" | "autocontrast" | "equalize":
            return 0.0
    return share * max_strengths.get(name, 0.9)


def _apply_operation(
    image: PilImage, name: str, strength: float, rng: np.random.Generator
) -> PilImage:
    is_negative = name not in UNSIGNED_OPERATIONS and rng.random() >= 0.5
    return OPERATIONS[name](image, -strength if is_negative else strength)


def apply_randaugment(image: PilImage, options: RandAugment, rng: np.random.Generator) -> PilImage:
    """Apply `count` operations, drawn with replacement, with random signs of their strengths."""
    max_translation = 150.0 / 331.0 * image.width, 150.0 / 331.0 * image.height
    for index in rng.integers(len(OPERATIONS), size=options.count):
        name, step = list(OPERATIONS)[index], options.magnitude
        strength = operation_strength(name, step, RANDAUGMENT_BINS, max_translation, 8)
        image = _apply_operation(image, name, strength, rng)
    return image


def apply_augmix(image: PilImage, options: AugMix, rng: np.random.Generator) -> PilImage:
    """Return a weighted sum of the image and `width` chains of operations on it."""
    names = [name for name in OPERATIONS if name != "identity"]
    max_translation = image.width / 3.0, image.height / 3.0
    image_share, chain_share = rng.dirichlet([options.alpha] * 2)
    mixed = image_share * np.asarray(image, np.float64)
    for share in rng.dirichlet([options.alpha] * options.width) * chain_share:
        chain = image
        for _ in range(options.depth or int(rng.integers(1, 4))):
            name, step = names[rng.integers(len(names))], int(rng.integers(options.severity))
            strength = operation_strength(name, step, AUGMIX_BINS, max_translation, 4)
            chain = _apply_operation(chain, name, strength, rng)
        mixed += share * np.asarray(chain, np.float64)
    return Image.fromarray(np.clip(mixed, 0.0, 255.0).astype(np.uint8))
