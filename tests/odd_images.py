"""Read thousands of odd images: `python -m tests.odd_images --seed 1 --count 2600` (30 s).

Small images of twenty kinds (JPEG, PNG, WebP, GIF, BMP and TIFF: grey, palettes, alpha, CMYK, 16
bits, animations, orientations) as they are, cut, with bits flipped, bytes put in, taken out,
repeated or zeroed, other sizes in the header, and other content. What is wrong: an exception that
is not Broken, a message of several lines, an undamaged image that is refused or has other pixels,
and one that takes more than two seconds of the processor. The suite has a chosen few.
"""

from __future__ import annotations

import argparse
import io
import random
import resource
import struct
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
from PIL import Image

from jaxlaunch.trainer.data.augment import Transform
from jaxlaunch.trainer.sources.images.picture import BrokenImageError, Picture

SIDES = ((1, 1), (5, 7), (16, 16), (40, 23), (64, 96), (1, 300), (120, 90))
HARD = (0, 1, 7, 20_000, 65_535, 2**31 - 1)  # sides of an image that has none of them
ALIEN = (
    b"",
    b"no image\n",
    b"\xff\xd8\xff",
    b"GIF89a",
    b"BM",
    b"II*\x00",
    b"%PDF-1.4",
    b"<svg></svg>",
    bytes(10_000),
)
WAYS = (
    "as it is",
    "cut",
    "flipped",
    "flipped",
    "header",
    "longer",
    "shorter",
    "zeroed",
    "repeated",
    "sizes",
    "alien",
    "tail",
)
MOST_S = 2.0
SEEN = (32, 32)


def encode_image(image: Image.Image, form: str, **keys: Any) -> bytes:
    """Return the bytes of a file."""
    file = io.BytesIO()
    image.save(file, form, **keys)
    return file.getvalue()


def make_image(
    draw: random.Random, rng: np.random.Generator
) -> tuple[str, bytes, np.ndarray | None]:
    """Return a kind, a file of it, and its pixels if the kind keeps them."""
    size = draw.choice(SIDES)
    exact = rng.integers(0, 256, (*size, 3), np.uint8)
    image, deep = Image.fromarray(exact), Image.fromarray(rng.integers(0, 65_536, size, np.uint16))
    exif = Image.Exif()
    exif[0x0112] = draw.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 77))
    turned, few = [image.rotate(90)], image.quantize(draw.randrange(2, 200))
    four = Image.fromarray(rng.integers(0, 256, (*size, 4), np.uint8))
    kinds: dict[str, tuple[Image.Image, str, dict[str, Any]]] = {
        "jpeg": (image, "JPEG", {"quality": draw.randrange(10, 96)}),
        "grey jpeg": (image.convert("L"), "JPEG", {}),
        "CMYK jpeg": (image.convert("CMYK"), "JPEG", {}),
        "progressive jpeg": (image, "JPEG", {"progressive": True, "exif": exif}),
        "png": (image, "PNG", {}),
        "palette png": (few, "PNG", {"transparency": 0}),
        "deep png": (deep, "PNG", {}),
        "alpha png": (four, "PNG", {"exif": exif}),
        "one bit png": (image.convert("1"), "PNG", {}),
        "grey alpha png": (image.convert("LA"), "PNG", {}),
        "webp": (image, "WEBP", {"quality": draw.randrange(5, 95)}),
        "lossless webp": (image, "WEBP", {"lossless": True}),
        "moving webp": (image, "WEBP", {"save_all": True, "append_images": turned}),
        "moving gif": (few, "GIF", {"save_all": True, "append_images": [few.rotate(180)]}),
        "bmp": (image, "BMP", {}),
        "tiff": (
            image,
            "TIFF",
            {"compression": draw.choice(("tiff_lzw", "tiff_deflate", "raw", "packbits"))},
        ),
        "deep tiff": (deep, "TIFF", {}),
        "turned tiff": (image, "TIFF", {"tiffinfo": {0x0112: exif[0x0112]}}),
        "CMYK tiff": (image.convert("CMYK"), "TIFF", {}),
        "float tiff": (Image.fromarray(rng.random(size, np.float32)), "TIFF", {}),
    }
    kind = draw.choice(list(kinds))
    picture, form, keys = kinds[kind]
    is_exact = kind in ("png", "lossless webp", "bmp", "tiff")
    return kind, encode_image(picture, form, **keys), exact if is_exact else None


def damage_file(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Return a way to damage a file, and the result."""
    way, changed, at = draw.choice(WAYS), bytearray(data), draw.randrange(len(data))
    match way:
        case "cut":
            del changed[at:]
        case "flipped" | "header":
            _change_bytes(changed, way, draw)
        case "longer":
            changed[at:at] = draw.randbytes(draw.choice((1, 4, 100, 5000)))
        case "shorter":
            del changed[at : at + draw.choice((1, 4, 50))]
        case "zeroed":
            count = min(len(changed) - at, draw.choice((4, 40, 400)))
            changed[at : at + count] = bytes(count)
        case "repeated":
            changed[at:at] = changed[at : at + draw.choice((8, 64, 512))]
        case "sizes":
            at = 16 if data.startswith(b"\x89PNG") else draw.randrange(min(200, len(changed)))
            changed[at : at + 8] = struct.pack(">II", draw.choice(HARD), draw.choice(HARD))
        case "alien":
            return way, draw.choice(ALIEN)
        case "tail":
            changed += draw.randbytes(draw.randrange(1, 3000))
    return way, bytes(changed)


def _change_bytes(changed: bytearray, way: str, draw: random.Random) -> None:
    """Flip bits anywhere, or replace bytes of the header."""
    if way == "flipped":
        for _ in range(draw.choice((1, 1, 2, 5, 20))):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    else:
        for _ in range(draw.randrange(1, 6)):
            changed[draw.randrange(min(64, len(changed)))] = draw.randrange(256)


def check_file(
    kind: str, way: str, data: bytes, exact: np.ndarray | None, draw: random.Random
) -> tuple[str, str | None]:
    """Return what became of a file, and what is wrong with that."""
    channels, is_whole = draw.choice((3, 3, 3, 1)), draw.random() < 0.5
    try:
        picture = Picture(data, channels)
        pixels = picture.read_pixels() if is_whole else Transform(None, SEEN, "eval")(picture)
    except BrokenImageError as error:
        message = str(error)
        if not message.isprintable() or len(message) > 300:
            return "named", f"the message {message!r}"
        refused = way == "as it is" and kind != "float tiff"
        return "named", f"an image that is whole is refused: {message}" if refused else None
    except Exception as error:
        return "raised", repr(error)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[-1] != channels:
        return "read", f"pixels {pixels.dtype} {pixels.shape}"
    if (
        way in ("as it is", "tail")
        and exact is not None
        and is_whole
        and channels == 3
        and not np.array_equal(pixels, exact)
    ):
        return "read", "other pixels"
    return "read", None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=2600)
    arguments = parser.parse_args()
    draw, rng = random.Random(arguments.seed), np.random.default_rng(arguments.seed)
    ends: Counter[str] = Counter()
    faults, slowest = 0, 0.0
    for number in range(arguments.count):
        kind, whole, exact = make_image(draw, rng)
        way, data = damage_file(whole, draw)
        started_at = time.process_time()
        end, fault = check_file(kind, way, data, exact, draw)
        slowest = max(slowest, took := time.process_time() - started_at)
        ends[end] += 1
        if fault is None and took > MOST_S:
            fault = f"{took:.1f} s of the processor"
        if fault is not None:
            faults += 1
            print(f"file {number}, {kind}, {way}: {fault}", flush=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    counts = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    print(
        f"{arguments.count} files: {counts}; {faults} wrong; at most {slowest:.2f} s each, "
        f"{memory} MiB of memory"
    )
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
