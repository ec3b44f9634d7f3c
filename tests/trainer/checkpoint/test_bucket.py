"""Checkpoints on object stores without folders and renames: gs:// and s3://, served here."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from etils import epath

from jaxlaunch.trainer.checkpoint import reader, saved_files
from jaxlaunch.trainer.checkpoint.folder import begin_step
from jaxlaunch.trainer.checkpoint.manifest import MANIFEST_FILE
from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.errors import CheckpointError, StorageError
from tests import bucket_server
from tests.bucket_server import Bucket
from tests.trainer.checkpoint.state import abstract, mesh, same, state

INSIDE = "bucket/runs/lm/checkpoints/"


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    with bucket_server.serve_bucket() as server:
        yield server


@pytest.fixture
def objects(server) -> Iterator[dict[str, bytes]]:
    yield server.objects
    server.objects.clear()
    server.deleted_buckets.clear()


# The tests of all calls that a store makes use both kinds of buckets.
BOTH_BUCKETS = pytest.mark.parametrize("folder", ["gs", "s3"], indirect=True)


@pytest.fixture
def folder(request, objects) -> str:
    return f"{getattr(request, 'param', 's3')}://{INSIDE.rstrip('/')}"


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def store(objects, folder, notes) -> Iterator[Store]:
    """A claimed store with steps 1 and 2, the second just committed."""
    store = Store(folder, keep=2, uid="run-a", note=notes.append)
    store.claim()
    assert store.restore(abstract(mesh())) is None
    for step in (1, 2):
        store.save(step, state(step, mesh()), {"at": step})
    store.wait()
    yield store
    store.close()


def names(objects: dict[str, bytes]) -> list[str]:
    return sorted(name.removeprefix("bucket/runs/lm/checkpoints/") for name in objects)


def cut_short(objects: dict[str, bytes], start: str) -> None:
    name = next(name for name in objects if f"/checkpoints/{start}" in name)
    objects[name] = objects[name][:5]


@BOTH_BUCKETS
def test_saved_step_is_restored_and_oldest_is_removed(tmp_path, monkeypatch, store, objects, notes):
    monkeypatch.chdir(tmp_path)
    store.save(3, state(3, mesh()), {"at": 3})
    store.wait()
    step, tree, meta = store.restore(abstract(mesh()))
    assert (step, meta, notes) == (3, {"at": 3}, []) and same(tree, 3)
    assert store.committed_steps() == [2, 3]
    assert {name.split("/")[0] for name in names(objects)} == {"2", "3", "jaxlaunch.owner.json"}
    assert not list(tmp_path.iterdir())  # no folder here that is named like the URL


@BOTH_BUCKETS
def test_truncated_object_is_skipped_and_step_is_saved_again(store, objects, notes):
    cut_short(objects, "2/state/d/")
    step, tree, _ = store.restore(abstract(mesh()))
    assert step == 1 and same(tree, 1)
    assert "step 2: file state/d/" in notes[0] and "cut short (5 of " in notes[0]
    store.save(2, state(2, mesh()), {})
    store.wait()
    assert store.restore(abstract(mesh()))[0] == 2
    assert any(name.startswith("2.bad-1/state/") for name in names(objects))


@BOTH_BUCKETS
def test_killed_save_is_cleared_or_adopted(store, objects, notes, folder):
    store.close()
    for name in (f"1/{MANIFEST_FILE}", f"2/{MANIFEST_FILE}", "2/commit_success.txt"):
        del objects[f"bucket/runs/lm/checkpoints/{name}"]
    second = Store(folder, keep=2, uid="run-b", note=notes.append)
    second.claim()
    assert not any(name.startswith("2/") for name in names(objects))
    step, tree, _ = second.restore(abstract(mesh()))
    assert step == 1 and same(tree, 1)
    assert "could not be verified" in notes[0]
    second.close()


@BOTH_BUCKETS
def test_deleted_bucket_is_an_error_and_not_created_again(server, objects, folder):
    server.deleted_buckets.add("bucket")
    words = f"the bucket {folder[:2]}://bucket does not exist"
    with pytest.raises(FileNotFoundError, match=words):
        begin_step(epath.Path(folder) / "3")
    with pytest.raises(FileNotFoundError, match=words):
        saved_files.save_inputs(folder, {"classes": []})
    store = Store(folder, keep=2, uid="run-a")
    with pytest.raises(StorageError, match=f"claiming {folder} failed: .*{words}"):
        store.claim()
    assert server.deleted_buckets == {"bucket"} and not objects


def test_reader_without_claim_reads_arrays(objects, folder) -> None:
    with contextlib.closing(Store(folder, keep=2, uid="run-a")) as store:
        store.claim()
        store.save(1, {"params": {"a.kernel": np.arange(6, dtype=np.float32)}}, {"model": 1})
    result = reader.find_step(folder)
    assert (result.step, result.meta) == (1, {"model": 1})
    np.testing.assert_array_equal(result.part_arrays("params")["a.kernel"][2:4], [2.0, 3.0])


# What another put there.


def put(objects: dict[str, bytes], *names: str) -> dict[str, bytes]:
    for name in names:
        objects[INSIDE + name] = f"mine: {name}".encode()
    return contents(objects)


def contents(objects: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in objects.items() if not name.endswith("owner.json")}


def test_foreign_numbered_folders_are_named_and_unchanged(objects, notes, folder):
    foreign = "1/weights", "2/state/w", "3/4/weights", "5.orbax-checkpoint-tmp/w", "6.bad-1/w"
    previous = put(objects, *foreign, "7/_METADATA")
    with contextlib.closing(Store(folder, keep=1, uid="run-a", note=notes.append)) as store:
        store.claim()
        assert contents(objects) == previous
        assert "they are ignored: 1/, 2/, 3/ and 2 more" in notes[0]
        assert store.restore(abstract(mesh())) is None
        for step in (8, 9):
            store.save(step, state(step, mesh()), {})
        store.wait()
    after = contents(objects)
    assert {name: after.get(name) for name in previous} == previous
    assert {name.split("/")[4] for name in after.keys() - previous.keys()} == {"9"}


def test_foreign_objects_in_step_place_are_refused_early(objects, notes, folder):
    previous = put(objects, "20/weights")
    with contextlib.closing(Store(folder, keep=1, uid="run-a", note=notes.append)) as store:
        store.claim()
        store.check_free(lambda step: step % 15 == 0)
        words = "holds 20, which no run saved"
        with pytest.raises(CheckpointError, match=words):
            store.check_free(lambda step: step % 10 == 0)
        with pytest.raises(CheckpointError, match=words):
            store.save(20, state(20, mesh()), {})
    assert contents(objects) == previous


def test_foreign_objects_in_step_folder_survive_rotation(store, objects, notes, folder):
    previous = put(objects, "1/notes.txt", "1/state/notes.txt", "2/notes.txt")
    store.save(3, state(3, mesh()), {})
    store.wait()
    del objects[f"bucket/runs/lm/checkpoints/2/{MANIFEST_FILE}"]
    del objects["bucket/runs/lm/checkpoints/2/commit_success.txt"]
    store.close()
    with contextlib.closing(Store(folder, keep=2, uid="run-b", note=notes.append)) as second:
        second.claim()
    remaining = [name for name in names(objects) if name[0] in "12"]
    assert remaining == ["1/notes.txt", "1/state/notes.txt", "2/notes.txt"]
    after = contents(objects)
    assert all(after[name] == previous[name] for name in previous if name.endswith("notes.txt"))
    removed = "step 1 was removed, except for files that no save wrote: notes.txt, state/notes.txt"
    assert removed in notes and "they are ignored: 1/, 2/notes.txt" in notes[-1]


def test_damaged_foreign_step_is_skipped_in_place(store, objects, notes):
    put(objects, "3/commit_success.txt", "3/items/w")
    previous = contents(objects)
    assert store.restore(abstract(mesh()))[0] == 2
    assert contents(objects) == previous
    assert "using step 2 (3 is left: no run saved it)" in notes[0]
