"""Checkpoints are whole or not there: damage is found, and a saved state is restored equal."""

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from etils import epath
from jax.sharding import Mesh

from jaxlaunch import contract
from jaxlaunch.trainer.checkpoint import manifest, owner
from jaxlaunch.trainer.checkpoint.arrays import ArrayCheckpointer, describe_first_difference
from jaxlaunch.trainer.checkpoint.folder import CheckpointFolder
from jaxlaunch.trainer.checkpoint.owner import OWNER_FILE as OWNER
from jaxlaunch.trainer.checkpoint.owner import Owner
from jaxlaunch.trainer.checkpoint.store import Restore, Store
from jaxlaunch.trainer.errors import CheckpointError, StorageError
from jaxlaunch.trainer.loop.driver import Loop
from jaxlaunch.trainer.metrics.progress import Progress
from tests.found import shows
from tests.trainer.checkpoint.state import abstract, mesh, same, state

HERE = Path(__file__).parent


class Opened(Store):
    """A claimed store that keeps what it was told to say."""

    def __init__(
        self, folder: Path, uid: str = "run-a", keep: int = 3, take_over: bool = False
    ) -> None:
        self.notes: list[str] = []
        super().__init__(
            str(folder), keep=keep, uid=uid, take_over=take_over, note=self.notes.append
        )
        self.claim()

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def found(self) -> tuple[int, str]:
        """Return the step that is restored, proven equal to what was saved, and all notes."""
        restored = self.restore(abstract(mesh()))
        assert restored is not None
        step, tree, meta = restored
        assert same(tree, step) and meta == {"data": "abc", "at": step}
        return step, "\n".join(self.notes)


def save(store: Store, *steps: int) -> None:
    for step in steps:
        store.save(step, state(step, mesh()), {"data": "abc", "at": step})
    store.wait()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Return a folder with steps 20, 30 and 40, which tests copy."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Opened(folder) as store:
        save(store, 20, 30, 40)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def files(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


def biggest(step: Path) -> Path:
    return max(files(step / "state"), key=lambda path: path.stat().st_size)


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
    path.write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in files(folder) if path.name != OWNER)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


# What was saved comes back.


def test_new_folder_restores_nothing(tmp_path):
    with Opened(tmp_path / "new") as store:
        assert store.restore(abstract(mesh())) is None
        assert (store.committed_steps(), store.newest_committed_step()) == ([], None)


def test_newest_step_and_meta_are_restored_silently(folder):
    with Opened(folder, uid="run-b") as store:
        assert store.found() == (40, "")
        assert (store.committed_steps(), store.newest_committed_step()) == ([20, 30, 40], 40)


def test_state_is_restored_on_another_mesh(folder):
    small = Mesh(jax.devices()[:2], ("fsdp",))
    with Opened(folder) as store:
        step, tree, _ = store.restore(abstract(small))
        assert same(tree, step)
        assert len(tree["params"]["dense"]["kernel"].addressable_shards) == 2


def test_arrays_donated_after_save_are_saved_unchanged(tmp_path):
    wipe = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    with Opened(tmp_path) as store:
        tree = state(7, mesh())
        store.save(7, tree, {"data": "abc", "at": 7})
        for _ in range(5):
            tree = wipe(tree)
        jax.block_until_ready(tree)
        store.wait()
        assert store.found() == (7, "")


def test_random_keys_small_dtypes_and_odd_names_round_trip(tmp_path):
    leaves = {"layers.0/key['a']": jax.random.key(3), "half": jnp.arange(3, dtype=jnp.bfloat16)}
    tree = {"rest": leaves}
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )
    with Opened(tmp_path) as store:
        store.save(0, tree, {"none": None, "list": [1, "a"], "float": 1.5})
        store.wait()
        step, result, meta = store.restore(like)
    assert (step, meta) == (0, {"none": None, "list": [1, "a"], "float": 1.5})
    equal = jax.tree.map(lambda a, b: a.dtype == b.dtype and (a == b).all(), tree, result)
    assert jax.tree.all(equal)


def test_committed_step_has_manifest_and_is_not_saved_again(tmp_path):
    with Opened(tmp_path) as store:
        hold = threading.Event()
        store._background.submit(hold.wait)
        store.save(1, state(1, mesh()), {})
        assert store.newest_committed_step() is None and store.committed_steps() == []
        hold.set()
        store.wait()
        assert store.newest_committed_step() == 1 and store.committed_steps() == [1]
        previous = contents(tmp_path)
        save(store, 1)
        assert contents(tmp_path) == previous


def test_rotation_keeps_newest_steps(tmp_path):
    with Opened(tmp_path, keep=2) as store:
        save(store, 1, 2, 3)
        assert store.committed_steps() == [2, 3]
    with Opened(tmp_path, keep=1) as store:
        assert store.restore(abstract(mesh()))[0] == 3
        save(store, 4)
        assert store.committed_steps() == [4]


# Damage is found, said, and walked back from.


def test_hundred_flipped_bytes_are_found(folder):
    step, chance = epath.Path(folder / "40"), random.Random(3)
    sizes = {path: path.stat().st_size for path in files(folder / "40") if path.stat().st_size}
    # Each file once, then files by their size.
    paths = [*sizes, *chance.choices(list(sizes), list(sizes.values()), k=100 - len(sizes))]
    for path in paths:
        whole = path.read_bytes()
        flip(path, chance)
        try:
            assert manifest.find_damage(step, manifest.read_manifest(step)), path
        except manifest.DamagedManifestError:
            assert path.name == manifest.MANIFEST_FILE
        path.write_bytes(whole)
    assert manifest.find_damage(step, manifest.read_manifest(step)) == []


def flip_byte(name):
    def damage(folder):
        step = folder / "40"
        path = biggest(step) if name == "biggest" else next(step.rglob(name))
        flip(path, random.Random(1))

    return damage


def truncate_file(folder):
    os.truncate(biggest(folder / "40"), 12)


def lose_arrays(folder):
    shutil.rmtree(folder / "40" / "state")


def put_foreign_names(folder):
    (folder / "50").mkdir()
    (folder / "60").write_text("not a checkpoint")


def copy_step(folder):
    shutil.copytree(folder / "20", folder / "50")


def lose_manifests_and_arrays(folder):
    without_manifests(folder)
    shutil.rmtree(folder / "40" / "state" / "d")


@pytest.mark.parametrize(
    ("damage", "restored", "words"),
    [
        (flip_byte("biggest"), 30, "SHA-256 differs|using step 30"),
        (flip_byte("_METADATA"), 30, "state/_METADATA has changed|using step 30"),
        (flip_byte("_CHECKPOINT_METADATA"), 30, "_CHECKPOINT_METADATA has changed|using step 30"),
        (flip_byte("metadata"), 30, "meta/metadata has changed|using step 30"),
        (flip_byte(manifest.MANIFEST_FILE), 30, f"{manifest.MANIFEST_FILE} |using step 30"),
        (truncate_file, 30, "step 40: file state/|(12 of |using step 30 (40 is kept as 40.bad-1)"),
        (lose_arrays, 30, "is missing| more; using step 30"),
        (put_foreign_names, 40, "step 60: is a file, not a folder; using step 40"),
        (put_foreign_names, 40, "step 50: the folder is empty; using step 40"),
        (copy_step, 40, "step 50: its manifest is that of step 20"),
        (lose_manifests_and_arrays, 30, "step 40: no manifest, and it cannot be restored: "),
    ],
)
def test_damaged_step_is_skipped_with_note(folder, damage, restored, words):
    damage(folder)
    with Opened(folder) as store:
        step, message = store.found()
        assert store.newest_committed_step() == step == restored
    for text in words.split("|"):
        assert text in message
    assert message.count("is missing") in (0, 3)


def test_foreign_files_are_named_and_kept(folder):
    (folder / "notes.txt").write_text("mine")
    (folder / "040").mkdir()
    (folder / ".jaxlaunch").mkdir()
    (folder / "40" / "state" / "extra").write_text("?")
    with Opened(folder) as store:
        step, message = store.found()
    assert step == 40
    assert message == (
        f"{folder} holds files that are not checkpoints; they are ignored: 040/, notes.txt\n"
        "step 40 holds files that its manifest does not list; they are ignored: state/extra"
    )
    assert (folder / "notes.txt").read_text() == "mine"


def test_error_names_every_unusable_step_and_changes_nothing(folder):
    os.truncate(biggest(folder / "20"), 0)
    (folder / "30" / "meta" / "metadata").unlink()
    shutil.rmtree(folder / "40")
    (folder / "40").mkdir()
    previous = contents(folder)
    with Opened(folder) as store, pytest.raises(CheckpointError) as caught:
        store.restore(abstract(mesh()))
    assert caught.value.code == 78
    shows("no valid checkpoint in", str(caught.value))
    for text in ("step 40: the folder is empty", "step 30: file meta/metadata is missing"):
        assert text in str(caught.value)
    assert "step 20: " in str(caught.value) and "Restore one of these" in str(caught.value)
    assert contents(folder) == previous and (folder / "40").is_dir()


def test_bad_step_is_renamed_and_its_number_is_reused(folder):
    path = biggest(folder / "40")
    os.truncate(path, 5)
    with Opened(folder) as store:
        assert store.found()[0] == 30
        save(store, 40)
        assert store.found()[0] == 40
    assert (folder / "40.bad-1" / path.relative_to(folder / "40")).stat().st_size == 5
    os.truncate(biggest(folder / "40"), 5)
    with Opened(folder) as store:
        assert store.found()[0] == 30
    assert (folder / "40.bad-2").is_dir()


@pytest.mark.parametrize("is_half_written", [False, True])
def test_verified_step_wins_over_step_without_manifest(folder, is_half_written):
    (folder / "40" / manifest.MANIFEST_FILE).unlink()
    if is_half_written:
        # A process that is killed in the middle leaves this.
        draft = folder / "40" / f"{manifest.MANIFEST_FILE}.0123456789abcdef.tmp"
        draft.write_bytes(b'{"files": {')
    with Opened(folder, uid="run-b") as store:
        step, message = store.found()
        assert step == 30 and "step 40: no manifest" in message
        assert "using step 30 (40 was removed)" in message
        assert not (folder / "40").exists() and store.committed_steps()[-1] == 30
        save(store, 40)
    with Opened(folder) as store:
        assert store.found() == (40, "")


def without_manifests(folder):
    for file in folder.glob(f"*/{manifest.MANIFEST_FILE}"):
        file.unlink()


def test_newest_unverified_step_is_adopted_with_note(folder):
    without_manifests(folder)
    with Opened(folder, uid="run-b") as store:
        step, message = store.found()
        assert step == 40 and "its files could not be verified" in message
        assert store.committed_steps() == [40]
    with Opened(folder) as store:
        assert store.found() == (40, "")


def test_step_without_manifest_is_used_if_others_are_damaged(folder):
    (folder / "30" / manifest.MANIFEST_FILE).unlink()
    for step in (20, 40):
        flip(biggest(folder / str(step)), random.Random(step))
    with Opened(folder) as store:
        step, message = store.found()
    assert step == 30 and "using step 30 (40 is kept as 40.bad-1)" in message
    assert (folder / "20").is_dir()


@pytest.mark.parametrize(
    ("reader", "call"),
    [
        (CheckpointFolder, "list_steps"),
        (CheckpointFolder, "clear_unfinished"),
        (Restore, "_inspect_step"),
    ],
)
def test_transient_storage_failure_is_retried(folder, monkeypatch, reader, call):
    monkeypatch.setenv(contract.STORAGE_WAIT, "60")
    monkeypatch.setattr(time, "sleep", lambda _: None)
    real, faults = getattr(reader, call), [errno.EIO, errno.EACCES, errno.ESTALE]

    def fail(*args):
        if faults:
            raise OSError(faults.pop(0), "away")
        return real(*args)

    monkeypatch.setattr(reader, call, fail)
    with Opened(folder, uid="run-b") as store:
        assert store.found()[0] == 40
    assert not faults


def fail_for(monkeypatch: pytest.MonkeyPatch, failing: Path, *numbers: int) -> list[int]:
    """Let os.stat of a path and of what is below it fail so often; return the remaining errors."""
    remaining, real = list(numbers), os.stat

    def stat(path, *args, **keys):
        is_failing = not isinstance(path, int) and f"{os.fspath(path)}/".startswith(f"{failing}/")
        if is_failing and remaining:
            number = remaining.pop(0)
            raise OSError(number, os.strerror(number), os.fspath(path))
        return real(path, *args, **keys)

    monkeypatch.setattr(os, "stat", stat)
    return remaining


def test_storage_failure_is_no_sign_that_a_step_is_gone(folder, monkeypatch) -> None:
    checkpoints = CheckpointFolder(str(folder))
    newest = max(manifest.committed_steps(epath.Path(folder)))
    with monkeypatch.context() as patch:
        remaining = fail_for(patch, folder / f"{newest}", errno.ESTALE)
        assert not checkpoints.is_gone(newest) and not remaining
    with monkeypatch.context() as patch:
        fail_for(patch, folder, errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            manifest.committed_steps(epath.Path(folder))
    shutil.rmtree(folder / f"{newest}")
    assert checkpoints.is_gone(newest)


def test_storage_failure_is_no_damage_of_the_newest_step(folder, monkeypatch) -> None:
    newest = max(manifest.committed_steps(epath.Path(folder)))
    with Opened(folder) as store:
        with monkeypatch.context() as patch:
            fail_for(patch, folder / f"{newest}", *[errno.EIO] * 100)
            with pytest.raises(StorageError, match="Input/output error"):
                store.restore(abstract(mesh()))
        assert store.found() == (newest, "")


@pytest.mark.parametrize("subject", ["", "2"])
def test_deleted_step_is_reported_once_and_saved_again(tmp_path, subject):
    with Opened(tmp_path / "checkpoints", keep=2) as store:
        save(store, 1, 2)
        store._owner._on_renewed()
        assert store.newest_committed_step() == 2 and not store.forget_if_deleted(2)
        assert store.notes == []
        shutil.rmtree(tmp_path / "checkpoints" / subject)
        for _ in range(2):
            store._owner._on_renewed()
            store.newest_committed_step()
        (note,) = store.notes
        assert note.startswith("step 2 is gone from ")
        shows("step 40 is gone from", note)
        assert store.forget_if_deleted(2)
        save(store, 2)
        assert store.committed_steps()[-1] == 2 and len(store.notes) == 1
    with Opened(tmp_path / "checkpoints") as store:
        assert store.found() == (2, "")


# What is another's is refused.


def test_state_of_another_optimizer_is_described_by_job_keys(folder):
    now = {**abstract(mesh()), "opt": {"1.count": jax.ShapeDtypeStruct((), jnp.int32)}}
    previous = {path: path.stat().st_mtime_ns for path in folder.rglob("[0-9]*/**/*")}
    with Opened(folder) as store, pytest.raises(CheckpointError) as raised:
        store.restore(
            now, lambda meta: f"was trained with adamw on {meta['data']}, the job says sgd"
        )
    message = str(raised.value)
    assert "step 40 of" in message and "absent" not in message
    assert "was trained with adamw on abc, the job says sgd; change it back, or set" in message
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("[0-9]*/**/*")} == previous


def test_model_of_another_shape_is_refused_by_first_leaf(folder):
    previous = contents(folder)
    with Opened(folder) as store, pytest.raises(CheckpointError) as caught:
        store.restore(abstract(mesh(), width=16))
    assert (
        "params/dense/kernel is float32[8,64] in the checkpoint and float32[8,16] in this model"
        in (str(caught.value))
    )
    assert contents(folder) == previous


@pytest.mark.parametrize(
    ("saved", "model", "difference"),
    [
        ("float32", "float32", None),
        (None, "float32", "a is absent in the checkpoint and float32[8] in this model"),
        ("float32", None, "a is float32[8] in the checkpoint and absent in this model"),
        ("bfloat16", "float32", "a is bfloat16[8] in the checkpoint and float32[8] in this model"),
    ],
)
def test_missing_leaves_are_named(saved, model, difference):
    trees = [{} if dtype is None else {"a": ((8,), dtype)} for dtype in (saved, model)]
    assert describe_first_difference(*trees) == difference


def test_replaced_owner_writes_nothing_more(tmp_path):
    first = Opened(tmp_path)
    save(first, 1)
    hold = threading.Event()
    # The next save is cut off between Orbax's part and the manifest.
    first._background.submit(hold.wait)
    first.save(2, state(2, mesh()), {})
    first._checkpointer.wait()
    second = Opened(tmp_path, uid="run-b", take_over=True)
    assert "--take-over was given" in second.notes[0]
    hold.set()
    with pytest.raises(CheckpointError, match="no longer belongs to run"):
        first.wait()
    previous = contents(tmp_path)
    with pytest.raises(CheckpointError, match="no longer belongs to run"):
        save(first, 3)
    assert contents(tmp_path) == previous
    assert first.committed_steps() == [1]
    first.close()
    second.close()


def test_second_live_run_is_refused_before_any_change(tmp_path):
    with Opened(tmp_path):
        (tmp_path / "7.orbax-checkpoint-tmp").mkdir()
        with pytest.raises(CheckpointError, match="belongs to run run-a"):
            Opened(tmp_path, uid="run-b")
        assert (tmp_path / "7.orbax-checkpoint-tmp").exists()


# Storage fails, processes are killed.


def test_background_storage_failure_is_raised_at_next_call(tmp_path):
    done = subprocess.run(
        [sys.executable, HERE / "saves_to_full_storage.py", tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.splitlines() == [
        f"StorageError saving step 2 in {tmp_path} failed",
        "committed 1",
        "[1, 3]",
    ], done
    with Opened(tmp_path) as store:
        assert store.restore(abstract(mesh()))[0] == 3


def test_only_files_of_killed_saves_are_cleared(tmp_path):
    unfinished = "7.orbax-checkpoint-tmp", "8.orbax-checkpoint-tmp-17", "model.orbax-checkpoint-tmp"
    for name in unfinished:
        (tmp_path / name / "state").mkdir(parents=True)
    with Opened(tmp_path) as store:
        assert store.restore(abstract(mesh())) is None
    assert [path.name for path in tmp_path.iterdir()] == ["model.orbax-checkpoint-tmp"]


def test_foreign_numbered_folders_are_named_and_unchanged(tmp_path):
    foreign = (
        "1/weights",
        "2/state/w",
        "7.orbax-checkpoint-tmp/state/w",
        "jaxlaunch.digests/notes.txt",
    )
    for name in foreign:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"mine: {name}")
    (tmp_path / "8").write_text("a file")
    previous = contents(tmp_path)
    with Opened(tmp_path, keep=1) as store:
        assert "they are ignored: 1/, 2/, 7.orbax-checkpoint-tmp/" in store.notes[0]
        store.check_free(lambda step: step > 8)
        for step in (7, 8):
            with pytest.raises(
                CheckpointError, match=f"holds {step}.*, in the place of checkpoints"
            ):
                save(store, step)
        save(store, 9, 10)
        (tmp_path / "10" / "notes.txt").write_text("mine")
        save(store, 11)
    after = contents(tmp_path)
    assert {name: after.get(name) for name in previous} == previous
    assert store.notes[-1] == "step 10 was removed, except for files that no save wrote: notes.txt"
    assert [path.name for path in files(tmp_path / "10")] == ["notes.txt"]


def test_unrestorable_foreign_step_is_not_renamed(folder):
    (folder / "50" / "items").mkdir(parents=True)
    (folder / "50" / "commit_success.txt").write_text("another's")
    previous = contents(folder / "50")
    with Opened(folder) as store:
        step, message = store.found()
    assert step == 40 and "using step 40 (50 is left: no run saved it)" in message
    assert contents(folder / "50") == previous


def test_unfinished_save_of_older_version_is_reported_early(tmp_path):
    for name in ("8.orbax-checkpoint-tmp", "9.orbax-checkpoint-tmp-17"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w").touch()
    with Opened(tmp_path) as store:
        store.check_free(lambda step: step != 8)
        with pytest.raises(
            CheckpointError, match=r"holds 8\.orbax-checkpoint-tmp, which no run saved"
        ):
            store.check_free(lambda step: step % 4 == 0)
        assert [store.blocking_names(step) for step in (8, 9)] == ["8.orbax-checkpoint-tmp", ""]


@pytest.mark.extended
def test_latest_good_step_survives_random_kills(tmp_path):
    """Three kills: each next process checks what it restores, and takes over at once."""
    chance, committed = random.Random(time.time_ns()), -1
    for kill in range(3):
        with subprocess.Popen(
            [sys.executable, HERE / "saves.py", tmp_path, f"run-{kill}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ) as process:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if sum(line.startswith("saved") for line in lines) == 3:
                    break
            time.sleep(chance.random() * 0.2)  # a random moment, not a wait for something
            process.kill()
            assert "ready\n" in lines, lines
            reported = [line.split()[1] for line in lines if line.startswith("saved ")]
            committed = max([committed, *(int(step) for step in reported if step != "None")])
    with Opened(tmp_path, uid="last") as store:
        step, tree, _ = store.restore(abstract(mesh()))
        assert same(tree, step) and step >= committed


LATE = (
    'RESOURCE_EXHAUSTED: Error writing "params.w/0" in "/{}/d/f52": Failed to write 63 bytes: '
    "{} [os_error_code=28]"
)


@pytest.mark.parametrize(
    "words", ["No space left on device", "Disk quota exceeded", "Input/output error"]
)
@pytest.mark.parametrize("call", ["save", "wait"])
def test_system_message_of_disk_comes_first(tmp_path, monkeypatch, call, words):
    def fail(*_):
        raise ValueError(LATE.format("long/" * 100, words))

    monkeypatch.setattr(ArrayCheckpointer, call, fail)
    with Opened(tmp_path) as store, pytest.raises(StorageError) as caught:
        store.save(1, state(1, mesh()), {})
        store.wait()
    assert str(caught.value).startswith(f"{words}: saving step 1 in {tmp_path} failed")


def unreachable(*_, **__):
    error = type("EndpointConnectionError", (Exception,), {"__module__": "botocore.exceptions"})
    raise error("no such endpoint")


@pytest.mark.parametrize("act", ["claim", "restore", "check_free", "save", "close"])
def test_unreachable_bucket_is_storage_error_in_every_call(tmp_path, monkeypatch, act):
    store = Store(str(tmp_path), keep=1, uid="run-a", note=print)
    if act != "claim":
        store.claim()
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="no such endpoint"):
        for name in ("iterdir", "write_bytes", "exists"):
            patch.setattr(type(epath.Path(tmp_path)), name, unreachable)
        for module in (manifest, owner):
            patch.setattr(module, "read_small_file", unreachable)
        calls = {"restore": ({},), "check_free": (lambda step: True,), "save": (1, {}, {})}
        getattr(store, act)(*calls.get(act, ()))
    store.close()


def test_claim_renewal_survives_unreachable_bucket(tmp_path, monkeypatch):
    claim = Owner(epath.Path(tmp_path), "run-a")
    claim.claim()
    with monkeypatch.context() as patch:
        patch.setattr(owner, "read_small_file", unreachable)
        assert claim._renew_once()
    assert claim._renew_once()
    claim.release()


def test_unreachable_store_keeps_original_error():
    loop = Loop.__new__(Loop)
    loop.store, loop.done_step = SimpleNamespace(close=unreachable, wait=unreachable), 0
    loop.progress = Progress(None)
    for loop.has_stepped in (False, True):
        loop.end_saves()


def test_array_error_is_no_storage_error(tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("these arrays cannot be saved")

    monkeypatch.setattr(ArrayCheckpointer, "save", fail)
    with Opened(tmp_path) as store, pytest.raises(ValueError, match="cannot be saved"):
        store.save(1, state(1, mesh()), {})
