from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources import tfds
from jaxlaunch.trainer.spec import Tfds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("tfds"))


def test_digits_hold_out_every_fifth_image(folder: str) -> None:
    digits = load_digits()
    pixels = np.rint(digits.images * 255 / 16).astype(np.uint8)
    is_held_out = np.arange(1797) % 5 == 0
    for split, expected, count in (("train", ~is_held_out, 1437), ("test", is_held_out, 360)):
        source = tfds.TfdsSplit("digits", split, folder)
        assert len(source) == count
        examples = [source[i] for i in range(count)]
        assert examples[0]["image"].shape == (8, 8, 1) and examples[0]["image"].dtype == np.uint8
        result = sorted((example["image"].tobytes(), int(example["label"])) for example in examples)
        assert result == sorted(
            (image.tobytes(), int(label))
            for image, label in zip(pixels[expected], digits.target[expected], strict=True)
        )


def test_splits_may_be_sliced(folder: str) -> None:
    data = Tfds(data_dir=folder, split="train[:10]", eval_split=None)
    train = tfds.open_source(data, "train")
    assert train is not None and len(train) == 10
    assert tfds.open_source(data, "eval") is None


def test_unknown_split_lists_the_splits(folder: str) -> None:
    with pytest.raises(DataError, match="digits has no split 'val'; it has test, train"):
        tfds.TfdsSplit("digits", "val", folder)


def test_fingerprint_does_not_depend_on_the_folder(folder: str, tmp_path: Path) -> None:
    here = tfds.TfdsSplit("digits", "test", folder).fingerprint()
    assert tfds.TfdsSplit("digits", "test", str(tmp_path)).fingerprint() == here
    assert tfds.TfdsSplit("digits", "test[:359]", folder).fingerprint() != here


def test_format_without_random_access_is_refused(tmp_path: Path) -> None:
    from jaxlaunch.trainer.sources.digits.digits_dataset_builder import Builder

    folder = tmp_path / "digits" / "1.0.0"
    tfds.TfdsSplit("digits", "train", str(tmp_path))
    info = folder / "dataset_info.json"
    info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
    assert Builder(data_dir=str(tmp_path)).info.file_format.value == "tfrecord"
    with pytest.raises(DataError, match="which has no random access"):
        tfds.TfdsSplit("digits", "train", str(tmp_path))
