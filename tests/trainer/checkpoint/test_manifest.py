"""A manifest finds every change to what it wrote down, in itself too."""

import hashlib
import json
import os
import random

import pytest
from etils import epath

from jaxlaunch.trainer.checkpoint import manifest
from jaxlaunch.trainer.checkpoint.folder import MARK_FILE, _has_mark
from jaxlaunch.trainer.checkpoint.manifest import DamagedManifestError, FileDigest, Manifest
from tests import mutate


@pytest.fixture
def folder(tmp_path) -> epath.Path:
    """A committed step of three files, one in a folder below and one empty."""
    step = epath.Path(tmp_path) / "40"
    (step / "state" / "d").mkdir(parents=True)
    (step / "state" / "d" / "weights").write_bytes(bytes(range(200)))
    (step / "state" / "_METADATA").write_text("{}")
    (step / "commit_success.txt").write_text("")
    entries = manifest.digest_files(step, manifest.list_files(step))
    manifest.write_manifest(step, Manifest(40, "run-a", entries))
    return step


def faults(folder: epath.Path) -> list[str]:
    written = manifest.read_manifest(folder)
    assert written is not None
    return manifest.find_damage(folder, written)


def test_manifest_round_trips_and_lists_all_other_files(folder):
    written = manifest.read_manifest(folder)
    assert written is not None and (written.step, written.uid) == (40, "run-a")
    assert list(written.files) == ["commit_success.txt", "state/_METADATA", "state/d/weights"]
    assert faults(folder) == []


def test_folder_without_manifest_reads_as_none(folder):
    (folder / manifest.MANIFEST_FILE).unlink()
    assert manifest.read_manifest(folder) is None


def test_changed_byte_of_manifest_is_damage(folder):
    data = (folder / manifest.MANIFEST_FILE).read_bytes()
    chance = random.Random(0)
    for place in range(len(data)):
        changed = bytes([data[place] ^ chance.randrange(1, 256)])
        with pytest.raises(DamagedManifestError):
            Manifest.from_bytes(data[:place] + changed + data[place + 1 :])


@pytest.mark.parametrize("size", [0, 1, 100])
def test_truncated_manifest_is_damaged(folder, size):
    with pytest.raises(DamagedManifestError, match="cannot be read"):
        Manifest.from_bytes((folder / manifest.MANIFEST_FILE).read_bytes()[:size])


def grow_file(step):
    with (step / "commit_success.txt").open("wb") as file:
        file.truncate(1 << 40)


def replace_by_folder(step):
    (step / "state" / "_METADATA").unlink()
    (step / "state" / "_METADATA").mkdir()


@pytest.mark.parametrize(
    ("change", "damage"),
    [
        (
            lambda step: (step / "state/d/weights").write_bytes(bytes(12)),
            "file state/d/weights cut short (12 of 200 bytes)",
        ),
        (
            lambda step: (step / "commit_success.txt").write_text("yes"),
            "file commit_success.txt grew (3 bytes, 0 were written)",
        ),
        # It is not read.
        (grow_file, f"file commit_success.txt grew ({1 << 40} bytes, 0 were written)"),
        (lambda step: (step / "state/_METADATA").unlink(), "file state/_METADATA is missing"),
        (replace_by_folder, "file state/_METADATA is a folder"),
        (
            lambda step: (step / "state/_METADATA").write_text("[]"),
            "file state/_METADATA has changed since it was written (SHA-256 differs)",
        ),
    ],
)
def test_damaged_file_is_named(folder, change, damage):
    change(folder)
    assert faults(folder) == [damage]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_process_shares_cover_each_file_once(count):
    sizes = {f"file-{n}": n * n for n in range(20)}
    shares = [manifest.files_of_process(sizes, index, count) for index in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_draft_manifest_is_not_part_of_step(folder):
    (folder / (f"{manifest.MANIFEST_FILE}.0123456789abcdef.tmp")).write_text("half")
    assert "jaxlaunch" not in str(manifest.list_files(folder))


OUTSIDE = ["/dev/zero", "../50/state/weights", "state/../../x", "state//x", "./x", "", "a\0b"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_manifest_with_outside_path_is_damaged(folder, name):
    manifest.write_manifest(folder, Manifest(40, "run-a", {name: FileDigest(1, "0" * 64)}))
    with pytest.raises(DamagedManifestError, match="which is not a file of this folder"):
        manifest.read_manifest(folder)


def fifo(path: epath.Path) -> None:
    os.mkfifo(path)


def zero(path: epath.Path) -> None:
    os.symlink("/dev/zero", path)


@pytest.mark.parametrize("make", [fifo, zero])
def test_special_file_in_step_is_named_and_not_read(folder, make):
    (folder / "state" / "_METADATA").unlink()
    make(folder / "state" / "_METADATA")
    assert faults(folder) == ["file state/_METADATA is not a regular file"]


@pytest.mark.parametrize("make", [fifo, zero])
def test_special_file_is_no_manifest_or_mark(folder, make):
    (folder / manifest.MANIFEST_FILE).unlink()
    make(folder / manifest.MANIFEST_FILE)
    with pytest.raises(DamagedManifestError, match="is not a regular file"):
        manifest.read_manifest(folder)
    make(folder / MARK_FILE)
    assert not _has_mark(folder)


def test_resigned_manifest_never_names_outside_files(folder):
    data, chance = (folder / manifest.MANIFEST_FILE).read_bytes(), random.Random(19)
    body = json.dumps(json.loads(data)["manifest"]).encode()
    for number in range(6_000):
        forged = mutate.mutate_message(data if number % 2 else body, chance)
        if not number % 2:
            text = forged.decode(errors="replace")
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                continue
            written = json.dumps(value, sort_keys=True, indent=1).encode() + b"\n"
            digest = hashlib.sha256(written).hexdigest()
            forged = manifest._to_json({"manifest": value, "sha256": digest})
        try:
            result = Manifest.from_bytes(forged)
        except DamagedManifestError:
            continue
        assert all(isinstance(damage, str) for damage in manifest.find_damage(folder, result))
