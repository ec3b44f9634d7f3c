"""Decodes an image file to upright uint8 pixels in RGB or grey, at the smallest sufficient scale.

H height, W width, C channels.
"""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from jaxlaunch.trainer.data.augment import resize_box

# Formats that Pillow may open. Its other readers run programs (EPS), or read fonts and movies.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png"),
    *(".webp", ".gif", ".bmp", ".tif", ".tiff"),
)
# Pillow's threshold for a warning of a decompression bomb: 256 MiB of RGB.
MAX_PIXELS = 89_478_485
# Maximum size of an image file.
MAX_FILE_BYTES = 1 << 30
# A JPEG can be decoded at 1/2, 1/4 and 1/8.
MAX_REDUCTION = 8
# EXIF tag of the orientation.
ORIENTATION = 0x0112
# Tags of TIFF. A photometric interpretation of 0 means that white is 0.
_WIDTH, _HEIGHT, _BITS, _PHOTOMETRIC = 256, 257, 258, 262
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
_MODES = {1: "L", 3: "RGB"}

# Pillow warns about oddities in files that it can read.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

Pixels = npt.NDArray[np.uint8]
# Top, left, height and width, in pixels of the upright image.
Box = tuple[float, float, float, float]
# Height and width.
Size = tuple[int, int]


class BrokenImageError(Exception):
    """Raised for an image that cannot be decoded. The message continues the name of the file."""


class Picture:
    """An encoded image, whose pixels can be decoded once. Raises BrokenImageError."""

    def __init__(self, data: bytes, channels: int = 3) -> None:
        if not data:
            raise BrokenImageError("is empty")
        self._mode, self._data = _MODES[channels], data
        try:
            self._image: Any = Image.open(io.BytesIO(data), formats=FORMATS)
            self._orientation = _read_orientation(self._image)
            width, height = self._image.size
            if isinstance(self._image, TiffImageFile):
                # `size` of a rotated TIFF may already be that of the upright image.
                width, height = (self._image.tag_v2[tag] for tag in (_WIDTH, _HEIGHT))
        except UnidentifiedImageError:
            raise BrokenImageError("is not an image of JPEG, PNG, WebP, GIF, BMP or TIFF") from None
        except Image.DecompressionBombError:
            raise BrokenImageError(f"has more than {MAX_PIXELS:,} pixels") from None
        except MemoryError:
            raise
        except Exception as error:
            # Pillow's readers raise arbitrary exceptions for a damaged header.
            raise BrokenImageError(f"is damaged: {error or type(error).__name__}") from None
        if width * height > MAX_PIXELS:
            raise BrokenImageError(f"has {width} × {height} pixels, more than {MAX_PIXELS:,}")
        self.size: Size = (width, height) if self._orientation in _SIDEWAYS else (height, width)
        if self._image.format == "TIFF":
            # Pillow rotates a TIFF while it decodes it.
            self._orientation = 1

    @property
    def format_and_mode(self) -> tuple[str, str]:
        """The format and mode of the file, as named by Pillow."""
        return str(self._image.format), self._image.mode

    def read_pixels(
        self,
        box: Box | None = None,
        size: Size | None = None,
        mirrored: bool = False,
        *,
        crops_first: bool = False,
    ) -> Pixels:
        """Return the part in `box`, or all of it, resized to `size` and mirrored: uint8 [H, W, C].

        A JPEG with at least twice the resolution of `size` is decoded at 1/2, 1/4 or 1/8, and the
        rows below the box are not decoded. Resizing is bilinear with antialiasing, as for PIL
        images in torchvision; `crops_first` is that of `resize_box`. May be called only once.
        Raises BrokenImageError.
        """
        height, width = self.size
        top, left, box_height, box_width = box or (0, 0, height, width)
        try:
            if size is not None and self._image.format in ("JPEG", "MPO"):
                factor_y, factor_x = box_height / size[0], box_width / size[1]
                bottom, margin = top + box_height, max(1.0, factor_y)
                self._decode_reduced(min(factor_y, factor_x), bottom, margin)
            image = _convert_mode(self._image, self._mode)
            if (transposition := _TRANSPOSITIONS.get(self._orientation)) is not None:
                image = image.transpose(transposition)
            # Both scales are 1 unless the image was decoded at a reduced scale.
            scale_y, scale_x = image.height / height, image.width / width
            upper_left = left * scale_x, top * scale_y
            edges = (*upper_left, (left + box_width) * scale_x, (top + box_height) * scale_y)
            if size is not None:
                image = resize_box(image, edges, size, crops_first=crops_first)
            elif box is not None:
                image = image.crop(tuple(round(edge) for edge in edges))  # type: ignore[arg-type]
            if mirrored:
                # Pillow's flip takes a tenth of the time of a copy by NumPy.
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            pixels: Pixels = np.asarray(image)
        except (MemoryError, BrokenImageError):
            raise
        except Exception as error:
            # Pillow's readers raise arbitrary exceptions for damaged data.
            problem = error or type(error).__name__
            raise BrokenImageError(f"is truncated or damaged: {problem}") from None
        return pixels[..., None] if pixels.ndim == 2 else pixels

    def _decode_reduced(self, factor: float, bottom: float, margin: float) -> None:
        """Decode a JPEG at a reduced scale and, if it is stored upright, only the necessary rows.

        These are the rows above `bottom`, and `margin` more for the support of the filter.
        """
        self._set_scale(factor)
        # The data is in memory, so Pillow can decode it in one piece.
        self._image.decodermaxblock = len(self._data)
        scale = self._image.height / self.size[0]
        stop = math.ceil((bottom + margin + 1) * scale) + 1
        if self._orientation not in _TRANSPOSITIONS and not self._decode_rows(stop):
            self._image = Image.open(io.BytesIO(self._data), formats=FORMATS)
            self._set_scale(factor)

    def _decode_rows(self, stop: int) -> bool:
        """Decode the rows above `stop`, and return whether all of them are known to be intact.

        Pillow raises the same error for a partial decode as for damaged data. It writes the rows in
        order into a black image, so all rows are intact if the last one is not black.
        """
        image = self._image
        if stop < image.height and len(image.tile) == 1:
            codec, _, offset, args = image.tile[0]
            image.tile = [(codec, (0, 0, image.width, stop), offset, args)]
            try:
                image.load()
            except OSError:
                last_row = image.crop((0, stop - 1, image.width, stop))
                return not image.tile and last_row.getbbox() is not None
        return True

    def _set_scale(self, factor: float) -> None:
        """Select the smallest scale of a JPEG for a reduction by up to `factor`."""
        divisor = min(MAX_REDUCTION, 2 ** int(math.log2(max(factor, 1.0))))
        if divisor > 1:
            width, height = self._image.size
            self._image.draft(self._mode, (width // divisor, height // divisor))


def _read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, or 1 (upright) if the EXIF block cannot be read."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:
        # The pixels of a file with a damaged EXIF block are still valid.
        return 1


def _convert_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert the first frame to RGB or grey, dropping transparency as torchvision does."""
    if image.mode.startswith("I"):
        # Keep the upper 8 of the 16 bits of a pixel, or of as many as the tags of a TIFF have.
        values: npt.NDArray[Any] = np.asarray(image)
        if values.size and (values.min() < 0 or values.max() > 0xFFFF):
            bounds = f"from {values.min()} to {values.max()}"
            raise BrokenImageError(f"has pixels {bounds}, more than 16 bits hold")
        tags = getattr(image, "tag_v2", {})
        bits = min(16, int(tags.get(_BITS, (16,))[0]))
        grey = (values >> (bits - 8)).astype(np.uint8)
        image = Image.fromarray(255 - grey if tags.get(_PHOTOMETRIC) == 0 else grey)
    if image.mode == "F":
        hint = "save it with 8 or 16 bits"
        raise BrokenImageError(f"has floating-point pixels, whose range is unknown; {hint}")
    if image.mode in ("P", "PA"):
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)
