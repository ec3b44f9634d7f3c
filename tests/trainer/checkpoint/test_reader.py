import errno
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from jaxlaunch.trainer.checkpoint import arrays, manifest, reader
from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.errors import CheckpointError, StorageError

FLAT = {"a.kernel": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(2, np.float32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 1 and 2, whose arrays differ by a factor."""
    store = Store(str(tmp_path), keep=9, uid="mine")
    store.claim()
    for step in (1, 2):
        store.save(
            step, {"params": {name: step * array for name, array in FLAT.items()}}, {"model": step}
        )
    store.close()
    return tmp_path


def test_newest_step_and_its_arrays_are_read(folder: Path) -> None:
    result = reader.find_step(str(folder))
    assert (result.step, result.meta) == (2, {"model": 2})
    params = result.part_arrays("params")
    assert {name: (array.shape, array.dtype) for name, array in params.items()} == {
        "a.kernel": ((3, 4), np.float32),
        "b": ((2,), np.float32),
    }
    np.testing.assert_array_equal(params["a.kernel"][1:, :2], 2 * FLAT["a.kernel"][1:, :2])
    np.testing.assert_array_equal(params["b"][:], [2.0, 2.0])
    assert result.part_arrays("ema") == {}
    assert reader.find_step(str(folder), 1).step == 1


def test_sliced_array_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = [], arrays.load_array
    monkeypatch.setattr(
        arrays,
        "load_array",
        lambda folder, part, name: read.append(name) or real(folder, part, name),
    )
    params = reader.find_step(str(folder)).part_arrays("params")
    rows = [params["a.kernel"][row] for row in range(3)]
    np.testing.assert_array_equal(np.stack(rows), 2 * FLAT["a.kernel"])
    params["b"][0], params["b"][1]
    assert read == ["a.kernel", "b"]


def test_damaged_step_is_skipped_with_note(folder: Path) -> None:
    file = next(path for path in (folder / "2" / "meta").iterdir() if path.is_file())
    file.write_bytes(file.read_bytes() + b" ")
    previous = sorted(path.name for path in folder.iterdir())
    message: list[str] = []
    assert reader.find_step(str(folder), note=message.append).step == 1
    assert (
        len(message) == 1
        and message[0].startswith("step 2: file meta/")
        and message[0].endswith("; using step 1")
    )
    with pytest.raises(CheckpointError, match="no valid checkpoint in .*: step 2: file meta/"):
        reader.find_step(str(folder), 2)
    assert sorted(path.name for path in folder.iterdir()) == previous


def test_missing_step_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no finished step 3; it holds 1, 2"):
        reader.find_step(str(folder), 3)
    (folder / "2" / manifest.MANIFEST_FILE).unlink()
    assert reader.find_step(str(folder)).step == 1
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        reader.find_step(str(tmp_path / "elsewhere"))


def test_step_deleted_while_read_is_storage_error(folder: Path) -> None:
    result = reader.find_step(str(folder), 1)
    (folder / "1" / arrays.STATE).rename(folder / "gone")
    with pytest.raises(StorageError, match="reading b of .* failed"):
        result.part_arrays("params")["b"][:]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize(
    "owner, call", [(manifest, "committed_steps"), (manifest, "find_damage"), (arrays, "read_meta")]
)
def test_storage_failure_while_finding_step_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: ModuleType, call: str, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(owner, call, fail)
    with pytest.raises(StorageError, match=rf"reading .* failed: .*Errno {number}\]"):
        reader.find_step(str(folder))
