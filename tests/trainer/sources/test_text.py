import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources import text
from jaxlaunch.trainer.spec import Text


def open_split(split: Any, path: Any, length: int = 8, **data: Any) -> Any:
    return text.open_stream(Text(source="text", path=str(path), **data), length, split)


def read_targets(source: Any) -> bytes:
    """The stream put together again from the windows."""
    result = bytes([source[0]["tokens"][0]])
    for index in range(len(source)):
        window = source[index]
        result += bytes(window["tokens"][1:][window["mask"] == 1].astype(np.uint8))
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_bytes(
            bytes([65 + number]) * (number * 3)
        )  # the first is empty
    return tmp_path


@pytest.mark.parametrize("length", [1, 4, 7, 8, 1000])
def test_each_byte_is_a_target_once(folder: Path, length: int) -> None:
    source = open_split("train", f"{folder}/*.txt", length, eval_split=0.0)
    actual = read_targets(source)
    assert actual == b"".join((folder / f"{number}.txt").read_bytes() for number in range(10))


def test_windows_have_one_shape_and_overlap(folder: Path) -> None:
    source = open_split("train", f"{folder}/*.txt", 8, eval_split=0.0)
    windows = [source[index] for index in range(len(source))]
    assert {
        (w["tokens"].shape, w["tokens"].dtype.str, w["mask"].shape, w["mask"].dtype.str)
        for w in windows
    } == {((9,), "<i4", (8,), "<f4")}
    assert [a["tokens"][-1] for a in windows[:-1]] == [b["tokens"][0] for b in windows[1:]]
    assert all(w["mask"].all() for w in windows[:-1])


def test_apart_separates_files_by_segments(folder: Path) -> None:
    source = open_split("train", f"{folder}/*.txt", 10, eval_split=0.0, apart=True)
    for index in range(len(source) - 1):  # every file has a byte of its own
        window = source[index]
        tokens, segments = window["tokens"], window["segments"]
        np.testing.assert_array_equal(tokens[:, None] == tokens, segments[:, None] == segments)
    assert source[0]["segments"].tolist() == [1] * 3 + [2] * 6 + [3] * 2
    assert "segments" not in open_split("train", f"{folder}/*.txt", 10)[0]


def test_share_of_the_files_is_held_out(folder: Path) -> None:
    train, held_out = (
        read_targets(open_split(split, f"{folder}/*.txt", eval_split=0.2))
        for split in ("train", "eval")
    )
    expected = Counter(b"".join(path.read_bytes() for path in folder.iterdir()))
    assert Counter(train) + Counter(held_out) == expected
    assert set(train).isdisjoint(held_out) and 1 <= len(set(held_out)) <= 5


def test_small_share_holds_out_one_file(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(bytes([65 + number]) * 3)
    for share in (0.001, 0.0004, 1e-6):
        train, held_out = (
            read_targets(open_split(split, f"{tmp_path}/*.txt", eval_split=share))
            for split in ("train", "eval")
        )
        assert len(held_out) == 3 and sorted(held_out + train) == sorted(b"AAABBBCCCDDDEEE")


def test_too_small_share_of_one_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    with pytest.raises(DataError, match="the eval split has 0 bytes, .* data.eval_split = 0.0004"):
        open_split("eval", tmp_path / "a.txt", eval_split=0.0004)


def test_end_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    assert read_targets(open_split("train", tmp_path / "a.txt", eval_split=0.1)) == bytes(range(90))
    actual = read_targets(open_split("eval", tmp_path / "a.txt", eval_split=0.1))
    assert actual == bytes(range(90, 100))


def test_nothing_is_held_out_without_eval_split(folder: Path) -> None:
    assert open_split("eval", f"{folder}/*.txt", eval_split=0.0) is None


def test_empty_or_short_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="every file that matches is empty"):
        open_split("train", tmp_path / "*.txt")
    (tmp_path / "a.txt").write_bytes(b"a")
    with pytest.raises(DataError, match="the all split has 1 bytes"):
        open_split("train", tmp_path / "*.txt", eval_split=0.0)


def test_shrunk_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(20))
    source = open_split("train", tmp_path / "a.txt", eval_split=0.0)
    (tmp_path / "a.txt").write_bytes(bytes(5))
    with pytest.raises(DataError, match="a.txt ends at byte 5; at the start of the run it had 9"):
        source[0]


def test_fingerprint_depends_on_split_length_content_and_apart(folder: Path) -> None:
    def fingerprint(split: str = "train", length: int = 8, **keys: Any) -> str:
        return str(open_split(split, f"{folder}/*.txt", length, **keys).fingerprint())

    observed = {fingerprint(), fingerprint("eval"), fingerprint(length=9), fingerprint(apart=True)}
    (folder / "9.txt").write_bytes(b"other")
    observed.add(fingerprint())
    assert len(observed) == 5
    # A checkpoint has the text that was written when its run began.
    assert ", apart, sha256 " in fingerprint(apart=True)
    assert "apart" not in fingerprint()


def test_bigram_model_equals_a_manual_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "CHUNK_BYTES", 3)
    (tmp_path / "a.txt").write_bytes(b"abab")
    (tmp_path / "b.txt").write_bytes(b"acx")
    train, held_out = (
        open_split("train", tmp_path / name, eval_split=0.0) for name in ("a.txt", "b.txt")
    )
    unigram = {
        ord(byte): count / (3 + 256) for byte, count in {"c": 1, "x": 1}.items()
    }  # targets of abab: b a b
    # After a: twice b, so one kind of follower; c was never seen, nothing is known of what follows
    # it.
    expected = [(0 + 1 * unigram[ord("c")]) / (2 + 1), unigram[ord("x")]]
    bits = -sum(map(math.log2, expected)) / 2
    assert text.bigram_bits_per_byte(train, held_out) == pytest.approx(bits)


def test_bigram_bits_of_the_standard_library() -> None:
    train, held_out = (open_split(split, "stdlib://*.py", 256) for split in ("train", "eval"))
    assert 3.3 < text.bigram_bits_per_byte(train, held_out) < 3.8
