"""Odd image files are read as the pixels they were made of, or named; nothing hangs."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images import source as images
from jaxlaunch.trainer.sources.images.picture import Picture
from jaxlaunch.trainer.spec import Images
from tests.trainer.sources.images import made_images

RGB_HW = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
DEEP_HW = np.random.default_rng(1).integers(0, 65536, (5, 7), np.uint16)


def encode_image(image: Image.Image, form: str = "PNG", **keys: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **keys)
    return file.getvalue()


def make_rotated_jpeg(orientation: int) -> bytes:
    image = Image.fromarray(RGB_HW)
    exif = image.getexif()
    exif[0x0112] = orientation
    return encode_image(image, exif=exif)


def make_bomb(width: int, height: int) -> bytes:
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(10**6))),
    )
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def make_grey_tiff(bits: int, meaning: int, data: bytes) -> bytes:
    """A TIFF of 7 by 5 grey pixels, which Pillow reads and does not write."""
    tags = {256: 7, 257: 5, 258: bits, 259: 1, 262: meaning, 273: 134, 277: 1, 278: 5}
    tags |= {279: len(data), 284: 1}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + data


def pack_12_bits(image: np.ndarray) -> bytes:
    """The upper 12 of 16 bits, each row from a byte on."""
    rows = ["".join(f"{int(value) >> 4:012b}" for value in row) for row in image]
    return b"".join(int(row.ljust(88, "0"), 2).to_bytes(11, "big") for row in rows)


PLAIN = Image.fromarray(RGB_HW)
INK = Image.fromarray(np.dstack([255 - RGB_HW, np.zeros((5, 7), np.uint8)]), "CMYK")
READ = {
    "upright.png": (make_rotated_jpeg(1), RGB_HW),
    "half.png": (make_rotated_jpeg(3), RGB_HW[::-1, ::-1]),
    "right.png": (make_rotated_jpeg(6), np.rot90(RGB_HW, -1)),
    "left.png": (make_rotated_jpeg(8), np.rot90(RGB_HW)),
    "nonsense.png": (make_rotated_jpeg(77), RGB_HW),
    "alpha.png": (encode_image(Image.fromarray(np.dstack([RGB_HW, RGB_HW[..., 0]]))), RGB_HW),
    "deep.png": (
        encode_image(Image.fromarray(DEEP_HW)),
        np.repeat((DEEP_HW >> 8)[..., None], 3, 2),
    ),
    "deep.tif": (
        encode_image(Image.fromarray(DEEP_HW), "TIFF"),
        np.repeat((DEEP_HW >> 8)[..., None], 3, 2),
    ),
    "twelve.tif": (
        make_grey_tiff(12, 1, pack_12_bits(DEEP_HW)),
        np.repeat((DEEP_HW >> 8)[..., None], 3, 2),
    ),
    "white_is_0.tif": (
        make_grey_tiff(16, 0, DEEP_HW.tobytes()),
        np.repeat(((65535 - DEEP_HW) >> 8)[..., None], 3, 2),
    ),
    "half.tif": (
        encode_image(PLAIN, "TIFF", tiffinfo={274: 3}, compression="tiff_lzw"),
        RGB_HW[::-1, ::-1],
    ),
    "right.tif": (encode_image(PLAIN, "TIFF", tiffinfo={274: 6}), np.rot90(RGB_HW, -1)),
    "ink.tif": (encode_image(INK, "TIFF"), RGB_HW),
    "palette.png": (
        encode_image(PLAIN.quantize(64), transparency=1),
        np.asarray(PLAIN.quantize(64).convert("RGB")),
    ),
    "moving.png": (
        encode_image(PLAIN, save_all=True, append_images=[INK.convert("RGB").rotate(180)]),
        RGB_HW,
    ),
    "moving.webp": (
        encode_image(
            PLAIN, "WEBP", lossless=True, save_all=True, append_images=[PLAIN.rotate(180)]
        ),
        RGB_HW,
    ),
    "really_png.jpg": (encode_image(PLAIN), RGB_HW),
    "dot.bmp": (encode_image(PLAIN.crop((0, 0, 1, 1)), "BMP"), RGB_HW[:1, :1]),
    "line.png": (
        encode_image(Image.fromarray(np.tile(RGB_HW[:1, :1], (1, 20_000, 1)))),
        np.tile(RGB_HW[:1, :1], (1, 20_000, 1)),
    ),
    "two\nlines\u202e.png": (encode_image(PLAIN), RGB_HW),
}
NAMED = {
    "empty.jpg": (b"", "is empty"),
    "text.jpg": (b"no image\n", "is not an image of JPEG"),
    "float.tif": (
        encode_image(Image.fromarray(np.ones((5, 7), np.float32)), "TIFF"),
        "has floating-point pixels",
    ),
    "bomb.png": (make_bomb(20_000, 20_000), "more than 89,478,485"),
    "bomb_of_one_row.png": (make_bomb(2**31 - 1, 1), "more than 89,478,485"),
    "cut.webp": (encode_image(PLAIN, "WEBP")[:60], "damaged"),
    "cut\nname.png": (encode_image(PLAIN)[:80], r"cut\\nname\.png, is truncated or damaged"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> images.ImageSource:
    root = made_images.write_folders(tmp_path_factory.mktemp("odd"), count=1)
    for name, (data, _) in {**READ, **NAMED}.items():
        (root / "cat" / name).write_bytes(data)
    os.symlink("loop.png", root / "cat" / "loop.png")
    os.symlink("..", root / "cat" / "up")
    os.symlink("/dev/zero", root / "cat" / "endless.png")
    os.mkfifo(root / "cat" / "pipe.png")
    with open(os.fsencode(root / "cat") + b"/\xff.png", "wb") as file:
        file.write(encode_image(PLAIN))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        source = images.open_source(Images(source="images", path=str(root)), "train")
    # The links and the pipe do not count as files.
    assert source is not None and len(source) == len(READ) + len(NAMED) + 3
    return source


def find_number(source: images.ImageSource, name: str) -> int:
    return next(at for at in range(len(source)) if Path(source.index.file_path(at)).name == name)


@pytest.mark.parametrize("name", READ)
def test_odd_image_is_decoded_to_its_pixels(source: images.ImageSource, name: str) -> None:
    np.testing.assert_array_equal(source[find_number(source, name)]["image"], READ[name][1])


def test_crop_of_a_rotated_tiff_matches_the_upright_image() -> None:
    data = encode_image(PLAIN, "TIFF", tiffinfo={274: 6})
    picture = Picture(data)
    assert picture.size == (7, 5)
    np.testing.assert_array_equal(
        picture.read_pixels((2.0, 1.0, 4.0, 3.0)), np.rot90(RGB_HW, -1)[2:6, 1:4]
    )


@pytest.mark.parametrize("name", NAMED)
def test_unreadable_file_is_reported_in_one_line(source: images.ImageSource, name: str) -> None:
    with pytest.raises(DataError, match=NAMED[name][1]) as error:
        source[find_number(source, name)]
    assert "\n" not in str(error.value)
