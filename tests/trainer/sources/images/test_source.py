"""Images are read from wherever people keep them, by number, with their labels."""

import io
import json
import os

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from jaxlaunch.trainer.data import workers
from jaxlaunch.trainer.data.workers import RandomPolicy, Request
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images import listing
from jaxlaunch.trainer.sources.images import source as images
from jaxlaunch.trainer.sources.images.picture import BrokenImageError, Picture
from jaxlaunch.trainer.spec import Images
from tests.trainer.sources.images import made_images


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_block(path, **keys) -> Images:
    return Images(source="images", path=str(path), **keys)


def read_examples(path, split="train", **keys) -> list[tuple[bytes, int]]:
    """Pixels and label of every example."""
    result = images.open_source(make_block(path, **keys), split)
    assert result is not None
    return [
        (example["image"].tobytes(), int(example["label"]))
        for example in map(result.__getitem__, range(len(result)))
    ]


def write_list(folder, name: str, text: str):
    made_images.write_folders(folder)
    (folder / name).write_text(text, encoding="utf-8-sig")
    return folder / name


def write_csv(folder):
    rows = "".join(f'"{name}/{number}.png",{name}\n' for name, number in made_images.make_pairs())
    return write_list(folder, "images.csv", f"path,label\n{rows}")


def write_jsonl(folder):
    rows = (
        json.dumps({"file_name": f"{name}/{at}.png", "class": name})
        for name, at in made_images.make_pairs()
    )
    return write_list(folder, "images.jsonl", "\n".join(rows))


def write_metadata(folder):
    return write_csv(folder).rename(folder / "metadata.csv").parent


@pytest.mark.parametrize(
    "stored",
    [
        write_csv,
        write_jsonl,
        write_metadata,
        lambda folder: made_images.write_folders(folder / "train").parent,
        lambda folder: f"{made_images.write_folders(folder)}/*/*.png",
        lambda folder: made_images.write_webdataset(folder / "a.tar"),
        lambda folder: made_images.save_dataset(folder / "saved"),
        lambda folder: made_images.save_dataset(folder / "saved", "zstd"),
        lambda folder: made_images.export_dataset(folder / "hub"),
    ],
    ids=[
        "csv",
        "jsonl",
        "metadata",
        "splits",
        "glob",
        "webdataset",
        "arrow",
        "compressed",
        "parquet",
    ],
)
def test_all_layouts_give_the_same_images(tmp_path, stored) -> None:
    expected = read_examples(made_images.write_folders(tmp_path / "folders"))
    (tmp_path / "kept").mkdir()
    assert [label for _, label in expected] == [0] * 4 + [1] * 4
    path = stored(tmp_path / "kept")
    assert read_examples(path) == expected  # made
    assert read_examples(path) == expected  # from the cache


@pytest.mark.parametrize(
    "stored",
    [
        lambda folder: f"{made_images.write_folders(folder)}/*/*.png",
        write_csv,
        lambda folder: made_images.write_folders(folder / "train").parent,
    ],
    ids=["glob", "csv", "folder"],
)
def test_fingerprint_does_not_depend_on_the_place_of_the_files(tmp_path, stored) -> None:
    fingerprints = set()
    for place in ("first", "second/deeper"):
        (tmp_path / place).mkdir(parents=True)
        source = images.open_source(make_block(stored(tmp_path / place)), "train")
        fingerprints.add(source.fingerprint())
    assert len(fingerprints) == 1


def test_fingerprint_of_a_glob_depends_on_names_below_the_common_folder(tmp_path) -> None:
    folder = made_images.write_folders(tmp_path / "set")
    block = make_block(f"{folder}/*/*.png")
    first = images.open_source(block, "train").fingerprint()
    (folder / "cat" / "0.png").rename(folder / "cat" / "00.png")
    assert images.open_source(block, "train").fingerprint() != first


def test_index_is_rebuilt_only_when_files_change(tmp_path, monkeypatch) -> None:
    folder = made_images.write_folders(tmp_path / "set")
    first = images.open_source(make_block(folder), "train")
    monkeypatch.setattr(listing, "list_files", None)
    assert images.open_source(make_block(folder), "train").fingerprint() == first.fingerprint()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder / "dog" / "new.png").write_bytes(made_images.encode_image("dog", 9))
    assert len(images.open_source(make_block(folder), "train")) == 9


def test_evaluation_files_use_the_training_classes(tmp_path) -> None:
    made_images.write_folders(tmp_path / "set" / "train")
    (tmp_path / "set" / "val" / "dog").mkdir(parents=True)
    (tmp_path / "set" / "val" / "dog" / "1.png").write_bytes(made_images.encode_image("dog", 7))
    assert [label for _, label in read_examples(tmp_path / "set", "eval")] == [1]
    whole = made_images.write_folders(tmp_path / "whole", count=10)
    assert (
        len(read_examples(whole, "eval", eval_split=0.1))
        + len(read_examples(whole, eval_split=0.1))
        == 20
    )
    assert images.open_source(make_block(whole), "eval") is None
    (tmp_path / "set" / "val" / "cow").mkdir()
    (tmp_path / "set" / "val" / "cow" / "1.png").write_bytes(made_images.encode_image("dog", 7))
    with pytest.raises(DataError, match="'cow' is not among the 2 classes"):
        read_examples(tmp_path / "set", "eval")


def test_image_in_both_splits_is_reported(tmp_path) -> None:
    folder = made_images.write_folders(tmp_path / "set")
    words = r"both name .*cat/0\.png, one of 4 images of the 4 that are evaluated"
    with pytest.raises(DataError, match=words):
        read_examples(folder, "eval", eval_path=f"{folder}/cat/*.png")
    # Who wants to evaluate the training's.
    assert len(read_examples(folder, "eval", eval_path=str(folder))) == 8


def test_broken_file_is_reported_or_skipped(tmp_path, capfd) -> None:
    folder = made_images.write_folders(tmp_path / "set")
    (folder / "cat" / "0.png").write_bytes(made_images.encode_image("cat", 0)[:200])
    with pytest.raises(DataError, match=r"example 0, .*cat/0\.png, is truncated or damaged"):
        read_examples(folder)
    assert len(read_examples(folder, on_broken="skip")) == 7
    assert "left out 1 of 8 images" in capfd.readouterr().err


def test_broken_parquet_image_is_reported_with_file_and_row(tmp_path, capfd) -> None:
    images_of = [made_images.encode_image("cat", 0), b"", made_images.encode_image("dog", 1)]
    column = pyarrow.array(images_of, pyarrow.binary_view())  # as polars writes bytes
    parquet.write_table(
        pyarrow.table({"image": column, "label": [0, 1, 1]}), tmp_path / "a.parquet"
    )
    with pytest.raises(DataError, match=r"example 1, .*/a\.parquet, image 2, is empty"):
        read_examples(tmp_path / "a.parquet")
    for _ in ("made", "from the cache"):
        result = images.open_source(make_block(tmp_path / "a.parquet", on_broken="skip"), "train")
        assert len(result) == 2 and result.locate_example(1).endswith("a.parquet, image 3")
    assert "a.parquet, image 2 is empty" in capfd.readouterr().err


def test_workers_decode_the_same_pixels(tmp_path) -> None:
    folder = made_images.write_folders(tmp_path / "set")
    result = images.open_source(make_block(folder, size=8, workers=1), "train")
    try:
        name, arguments = result.opener
        items = workers.shared_workers(1).read_items(
            Request(name, arguments, RandomPolicy(0, 0, False, False), [5, 2], [0, 1])
        )
    finally:
        workers.shared_workers(1).close()
        workers.shared_workers.cache_clear()
    actual = [item.value["image"].tobytes() for item in items]
    assert actual == [result[5]["image"].tobytes(), result[2]["image"].tobytes()]


def test_large_jpeg_is_decoded_at_reduced_scale(tmp_path) -> None:
    tall = Image.fromarray(
        np.tile(np.linspace(0, 255, 640, dtype=np.uint8)[:, None, None], (1, 480, 3))
    )
    exif = tall.getexif()
    exif[0x0112] = 6  # stored on its side
    file = io.BytesIO()
    tall.rotate(90, expand=True).save(file, "JPEG", exif=exif, quality=95)
    picture = Picture(file.getvalue())
    assert picture.size == (640, 480)
    small = picture.read_pixels(None, (64, 48))
    assert picture._image.size == (80, 60)  # an eighth, of which a tenth is wanted
    expected = np.asarray(tall.resize((48, 64), Image.Resampling.BILINEAR))
    assert np.abs(small.astype(int) - expected).max() < 12
    whole = Picture(file.getvalue()).read_pixels((320.0, 0.0, 64.0, 48.0))
    assert np.abs(whole.astype(int) - np.asarray(tall)[320:384, :48]).max() < 12


def test_partial_jpeg_decode_gives_the_same_pixels() -> None:
    y, x = np.mgrid[:90, :120]
    image = Image.fromarray(np.stack([y * 2, x * 2, (y * x) % 251], -1).astype(np.uint8))
    box = (6.0, 11.0, 40.0, 52.0)
    size = (24, 30)
    kinds = [{}, {"progressive": True}, {"subsampling": 0}]
    for mode, kind in [("RGB", item) for item in kinds] + [("L", {}), ("CMYK", {})]:
        file = io.BytesIO()
        image.convert(mode).save(file, "JPEG", quality=95, **kind)
        data = file.getvalue()
        decoded = Picture(data)
        whole = Image.fromarray(decoded.read_pixels())  # decoded to its end
        cut = (box[1], box[0], box[1] + box[3], box[0] + box[2])
        expected = np.asarray(whole.resize((30, 24), Image.Resampling.BILINEAR, box=cut))
        above = Picture(data)
        result = above.read_pixels(box, size)
        np.testing.assert_array_equal(result, expected, str((mode, kind)))
        np.testing.assert_array_equal(
            Picture(data).read_pixels(box, size, mirrored=True), expected[:, ::-1]
        )
        assert not np.asarray(above._image)[60:].any()  # was left out
        with pytest.raises(BrokenImageError, match="truncated"):
            Picture(data[: len(data) // 4]).read_pixels(box, size)
    dark = io.BytesIO()
    Image.new("RGB", (120, 90)).save(dark, "JPEG")
    assert not Picture(dark.getvalue()).read_pixels(box, size).any()
    progressive = io.BytesIO()
    image.save(progressive, "JPEG", progressive=True)
    head, table, rest = progressive.getvalue().rpartition(
        b"\xff\xc4"
    )  # the last Huffman table: none of 250 codes
    with pytest.raises(BrokenImageError, match="broken data stream"):
        Picture(head + table + rest[:3] + b"\xff" * 9 + rest[12:]).read_pixels(box, size)


def write_rows(rows: str):
    """Writes a list of these rows."""
    return lambda root: (root / "a.csv").write_text(f"path,label\n{rows}\n")


@pytest.mark.parametrize(
    ("built", "message"),
    [
        (lambda root: (root / "cow").mkdir(), "the folder 'cow' has no image"),
        (lambda root: os.rename(root / "cat", root / "Dog"), "'Dog' and 'dog' differ only in case"),
        (lambda root: (root / "a.png").write_bytes(b"x"), "a.png is not in a class folder"),
        (write_rows("cat/0.png,0\ndog/0.png,2"), "up to 2, without 1"),
        (write_rows("cat/0.png,-1\ndog/0.png,1"), "the label -1 is not the number of a class"),
        (write_rows("cat/0.png,cat\ncat/9.png,cat"), r"row 2: the file .*cat/9\.png is not there"),
        (write_rows("cat,cat"), r"row 1: the file .*/cat is a folder"),
        (
            write_rows("cat/0.png,cat\ncat/0.png,dog"),
            "row 2: cat/0.png is of class 'dog', and of 'cat' above",
        ),
        (
            lambda root: (root / "a.csv").write_text("path,label\na.png,0,3\n"),
            "row 1: 3 values, and the header has 2",
        ),
        (
            lambda root: (root / "a.csv").write_text("path,label\n,0\n"),
            "row 1: its 'path' is '', not the path of an image",
        ),
        (lambda root: (root / "a.csv").write_text("x,label\na,0\n"), "no column of the image"),
        (lambda root: (root / "a.csv").write_text(""), "has no rows"),
        (
            lambda root: made_images.write_tar(root / "a.tar", {"1.png": b"x"}),
            "image 1 has no label",
        ),
        (lambda root: (root / "a.tar").write_bytes(b"x" * 1000), "is not a tar"),
        (lambda root: (root / "a.tar.gz").write_bytes(b"x"), "unpack it, or pack it as .tar"),
        (
            lambda root: parquet.write_table(
                pyarrow.Table.from_arrays([pyarrow.array([b"x"])] * 2, names=["image"] * 2),
                root / "a.parquet",
            ),
            "has several columns 'image'",
        ),
        (
            lambda root: (root / "a.parquet").write_bytes(b"PAR1"),
            "a.parquet is truncated or damaged",
        ),
    ],
)
def test_faulty_image_set_is_reported(tmp_path, built, message) -> None:
    root = made_images.write_folders(tmp_path / "set")
    built(root)
    named = next(iter(root.glob("a.*")), root)
    with pytest.raises(DataError, match=message):
        images.open_source(make_block(root if named.suffix == ".png" else named), "train")
