"""The same promises on an object store, where there are no folders and no rename: gs://, served from this process."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from tests.trainer.checkpoint import bucket
from tests.trainer.checkpoint.bucket import Objects
from tests.trainer.checkpoint.state import abstract, mesh, same, state
from trainer.checkpoint import kept
from trainer.checkpoint.manifest import NAME
from trainer.checkpoint.store import Store
from trainer.errors import CheckpointError

FOLDER = "gs://bucket/runs/lm/checkpoints"


@pytest.fixture(scope="module")
def server() -> Iterator[Objects]:
    with pytest.MonkeyPatch.context() as environ:
        server = bucket.serve()
        environ.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{server.server_port}")
        environ.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")
        yield bucket.Handler.objects
        server.shutdown()
        server.server_close()


@pytest.fixture
def objects(server) -> Iterator[Objects]:
    yield server
    server.store.clear()


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def store(objects, notes) -> Iterator[Store]:
    """A claimed store with steps 1 and 2, the second just committed."""
    store = Store(FOLDER, keep=2, uid="run-a", note=notes.append)
    store.claim()
    assert store.restore(abstract(mesh())) is None
    for step in (1, 2):
        store.save(step, state(step, mesh()), {"at": step})
    store.wait()
    yield store
    store.close()


def names(objects: Objects) -> list[str]:
    return sorted(name.removeprefix("/bucket/runs/lm/checkpoints/") for name in objects.store)


def cut_short(objects: Objects, start: str) -> None:
    name = next(name for name in objects.store if f"/checkpoints/{start}" in name)
    objects.pipe_file(f"gs:/{name}", objects.cat_file(f"gs:/{name}")[:5])


def test_what_was_saved_comes_back_and_rotation_leaves_nothing_of_the_oldest(store, objects, notes):
    store.save(3, state(3, mesh()), {"at": 3})
    store.wait()
    step, tree, meta = store.restore(abstract(mesh()))
    assert (step, meta, notes) == (3, {"at": 3}, []) and same(tree, 3)
    assert store.steps() == [2, 3]
    assert {name.split("/")[0] for name in names(objects)} == {"2", "3", "jaxlaunch.owner.json"}


def test_an_object_cut_short_is_walked_back_from_and_its_step_can_be_saved_again(store, objects, notes):
    cut_short(objects, "2/state/d/")
    step, tree, _ = store.restore(abstract(mesh()))
    assert step == 1 and same(tree, 1)
    assert "step 2: file state/d/" in notes[0] and "cut short (5 of " in notes[0]
    store.save(2, state(2, mesh()), {})
    store.wait()
    assert store.restore(abstract(mesh()))[0] == 2
    assert any(name.startswith("2.bad-1/state/") for name in names(objects))


def test_a_save_that_was_killed_before_orbax_marked_it_is_cleared_and_one_killed_after_is_adopted(
    store, objects, notes
):
    store.close()
    for name in (f"1/{NAME}", f"2/{NAME}", "2/commit_success.txt"):
        del objects.store[f"/bucket/runs/lm/checkpoints/{name}"]
    second = Store(FOLDER, keep=2, uid="run-b", note=notes.append)
    second.claim()
    assert not any(name.startswith("2/") for name in names(objects))
    step, tree, _ = second.restore(abstract(mesh()))
    assert step == 1 and same(tree, 1)
    assert "digested and adopted" in notes[0]
    second.close()


def test_a_live_run_holds_its_bucket(store, objects):
    with pytest.raises(CheckpointError, match="belongs to run run-a"):
        Store(FOLDER, keep=2, uid="run-b", note=print).claim()


def test_a_reader_who_owns_nothing_reads_array_by_array(objects) -> None:
    with contextlib.closing(Store(FOLDER, keep=2, uid="run-a")) as store:
        store.claim()
        store.save(1, {"params": {"a.kernel": np.arange(6, dtype=np.float32)}}, {"model": 1})
    found = kept.find(FOLDER)
    assert (found.step, found.meta) == (1, {"model": 1})
    np.testing.assert_array_equal(found.part("params")["a.kernel"][2:4], [2.0, 3.0])
