"""Checkpoints that are whole or are not there: saving, verifying, walking back, rotating.

A step is committed by its manifest, written last. What fails verification is never trained on, never counted, never
deleted: it is renamed aside once an older step was restored. Only committed steps are rotated, and the newest stays.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
from etils import epath

from trainer.checkpoint import manifest
from trainer.checkpoint.agree import gather, on_primary
from trainer.checkpoint.arrays import COMMITTED, STATE, TIMEOUT_S, Arrays
from trainer.checkpoint.manifest import STEP, Damaged, Entry, Manifest, is_remote
from trainer.checkpoint.owner import NAME as OWNER
from trainer.checkpoint.owner import Owner
from trainer.errors import CheckpointError, StorageError, TrainerError

DIGESTS = "jaxlaunch.digests"  # where the processes leave their digests for process 0 to collect
UNFINISHED = re.compile(r"(0|[1-9][0-9]*)\.orbax-checkpoint-tmp(-[0-9]+)?")  # Orbax's own names
ASIDE = re.compile(r"(0|[1-9][0-9]*)\.bad-[0-9]+")  # a step that failed verification
SHOWN = 3  # faults of a step that are spelled out

T = TypeVar("T")
Tree = dict[str, Any]


class Store:
    """The checkpoints of one run in one folder. Every process makes the same calls in the same order."""

    def __init__(
        self, path: str, *, keep: int, uid: str, take_over: bool = False, note: Callable[[str], None] = print
    ) -> None:
        folder = epath.Path(path)
        self._folder = folder if is_remote(folder) else folder.expanduser().absolute()
        self._keep = keep
        self._uid = uid
        self._take_over = take_over
        self._note = note if jax.process_index() == 0 else _silent
        self._owner = Owner(self._folder, uid)
        self._nonce = ""
        self._arrays = Arrays(self._folder)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._committed: int | None = None

    def claim(self) -> None:
        """Takes the folder and clears what a killed save left. Raises CheckpointError when another run lives there."""
        self._nonce, said = on_primary(self._claim)
        if said:
            self._note(said)

    def _claim(self) -> tuple[str, str]:
        self._folder.mkdir(parents=True, exist_ok=True)
        said = self._owner.claim(self._take_over)
        for child in self._folder.iterdir():
            if child.is_dir() and (
                UNFINISHED.fullmatch(child.name) or child.name == DIGESTS or self._is_unfinished(child)
            ):
                child.rmtree()
        return secrets.token_hex(4), said

    def _is_unfinished(self, child: epath.Path) -> bool:
        """Whether this is a step that Orbax began and did not end, on a store without rename."""
        if not is_remote(child) or not STEP.fullmatch(child.name):
            return False
        return not (child / COMMITTED).exists() and not (child / manifest.NAME).exists()

    # Restoring.

    def restore(self, abstract: Mapping[str, Any]) -> tuple[int, Tree, Tree] | None:
        """The newest step that verifies, its state laid out as `abstract` says, and its meta; None in a new folder.

        What is wrong with newer ones is noted, and they are set aside. Raises CheckpointError when there are steps and
        none is usable, or when the state is another model's; StorageError when storage fails.
        """
        steps, foreign = on_primary(self._survey)
        if foreign:
            self._note(f"{self._folder} holds what is no checkpoint, left alone: {', '.join(foreign)}")
        bad: dict[int, str] = {}
        for step in sorted(steps, reverse=True):
            found = self._restore_step(step, abstract)
            if not isinstance(found, str):
                on_primary(lambda: self._set_aside(bad, step))  # noqa: B023 (called at once)
                self._committed = step
                return step, *found
            bad[step] = found
        if bad:
            listed = "".join(f"\n  step {step}: {fault}" for step, fault in bad.items())
            raise CheckpointError(
                f"no usable checkpoint in {self._folder}:{listed}\n"
                "hint: bring one of these folders back from a copy, or set checkpoint.path to a new folder to start "
                "from the first step; nothing was changed"
            )
        return None

    def _survey(self) -> tuple[list[int], list[str]]:
        """The steps in the folder, good or not, and the names of what is none of ours."""
        steps, foreign = [], []
        for child in sorted(self._folder.iterdir()) if self._folder.exists() else []:
            if STEP.fullmatch(child.name):
                steps.append(int(child.name))
            elif not (child.name.startswith((".", OWNER, DIGESTS)) or ASIDE.fullmatch(child.name)):
                foreign.append(f"{child.name}/" if child.is_dir() else child.name)
        return steps, foreign

    def _restore_step(self, step: int, abstract: Mapping[str, Any]) -> tuple[Tree, Tree] | str:
        """State and meta of `step`, or what is wrong with it."""
        text, fault, extra = on_primary(lambda: self._inspect(step))
        if fault:
            return str(fault)
        if text is None:
            return self._adopt(step, abstract)
        written = Manifest.from_bytes(text.encode())
        with _storage(f"reading step {step} of {self._folder}"):
            faults = manifest.faults(self._step(step), written, jax.process_index(), jax.process_count())
        faults = sum(gather(faults), [])
        if faults:
            return _some(faults)
        if extra:
            self._note(f"step {step} holds files that nobody wrote down, left alone: {_some(extra)}")
        with _storage(f"reading step {step} of {self._folder}"):
            self._refuse_other_model(step, abstract)
            return self._arrays.load(self._step(step), abstract)

    def _inspect(self, step: int) -> tuple[str | None, str, list[str]]:
        """The manifest's text if there is one, what is wrong at first sight, and files the manifest does not know."""
        folder = self._step(step)
        if not folder.is_dir():
            return None, "is a file, not a folder", []
        names = manifest.listing(folder)
        try:
            written = manifest.read(folder)
        except Damaged as error:
            return None, str(error), []
        if written is None:
            return None, "" if names else "the folder is empty", []
        if written.step != step:
            return None, f"its manifest is that of step {written.step}", []
        return written.to_bytes().decode(), "", sorted(set(names) - set(written.files))

    def _refuse_other_model(self, step: int, abstract: Mapping[str, Any]) -> None:
        difference = self._arrays.difference(self._step(step), abstract)
        if difference:
            raise CheckpointError(
                f"step {step} of {self._folder} is another model's: {difference}; "
                "restore the model of the spec, or set checkpoint.path to a new folder"
            )

    def _adopt(self, step: int, abstract: Mapping[str, Any]) -> tuple[Tree, Tree] | str:
        """A step that Orbax finished and we had no time to digest: good if it restores."""
        folder = self._step(step)
        error, found = "", None
        try:
            self._arrays.probe(folder, jax.process_index(), jax.process_count())
            self._refuse_other_model(step, abstract)
            found = self._arrays.load(folder, abstract)
        except CheckpointError:
            raise
        except Exception as raised:  # Orbax has no type of its own for what it cannot read
            error = f"no manifest, and it cannot be restored: {_first_line(raised)}"
        errors = [error for error in gather(error) if error]
        if errors or found is None:
            return errors[0]
        with _storage(f"digesting step {step} of {self._folder}"):
            names = on_primary(lambda: manifest.listing(folder))
            mine = manifest.digests(folder, names[jax.process_index() :: jax.process_count()])
        files = _merge(gather(_plain(mine)))
        on_primary(lambda: self._write_manifest(step, files))
        self._note(f"step {step} had no manifest (killed while saving?); it restores, so it was digested and adopted")
        return found

    def _set_aside(self, bad: Mapping[int, str], good: int) -> None:
        self._owner.check()
        for step, fault in bad.items():
            aside = next(path for n in range(1, 1000) if not (path := self._folder / f"{step}.bad-{n}").exists())
            self._step(step).rename(aside)
            self._note(f"step {step}: {fault}; using step {good} ({step} is kept as {aside.name})")

    # Saving.

    def save(self, step: int, tree: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Starts saving; returns when the arrays are copied. A step that is committed already is not saved again.

        Waits for the save before. Raises StorageError or CheckpointError, of this save or of the one before.
        """
        self.wait()
        if step == self._committed:
            return
        with _storage(f"saving step {step} in {self._folder}", OSError):  # a ValueError here is of the arrays' making
            if jax.process_index() == 0:
                self._owner.check()
            self._arrays.save(self._step(step), tree, meta)
        self._pending = self._background.submit(self._commit, step)

    def committed(self) -> int | None:
        """The newest step that is whole on storage, manifest and all. Raises what went wrong in the background."""
        if self._pending is not None and self._pending.done():
            self.wait()
        return self._committed

    def wait(self) -> None:
        """Until the last save is committed and rotation done. Raises StorageError or CheckpointError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _commit(self, step: int) -> None:
        """The background part of a save: Orbax's, digests, manifest, rotation. Another thread, so no collectives."""
        with _storage(f"saving step {step} in {self._folder}"):
            self._finish_arrays()
            if jax.process_index() == 0:
                self._write_manifest(step, self._collect(step))
                self._committed = step
                self._rotate()
            else:
                self._post(step)
                _await(lambda: manifest.read(self._step(step)), f"the manifest of step {step}")
                self._committed = step

    def _finish_arrays(self) -> None:
        try:
            self._arrays.wait()
        except Exception:
            if jax.process_index() == 0:
                self._owner.check()  # a folder that was taken from us fails in many ways, and this is the one to say
            raise

    def _post(self, step: int) -> None:
        """Leaves the digests of what this process wrote. The rest is process 0's: only it lists the whole folder."""
        own = epath.Path(STATE) / f"ocdbt.process_{jax.process_index()}"
        names = manifest.listing(self._step(step) / own) if (self._step(step) / own).exists() else []
        mine = manifest.digests(self._step(step), [f"{own}/{name}" for name in names])
        path = self._digests(step, jax.process_index())
        path.parent.mkdir(parents=True, exist_ok=True)
        manifest.replace(path, json.dumps(_plain(mine)).encode())

    def _collect(self, step: int) -> dict[str, Entry]:
        """Digests of every file of the step: those that the other processes left, and of all the rest."""
        folder = self._step(step)
        posts = [self._digests(step, index) for index in range(1, jax.process_count())]
        files = _merge([_await(lambda: _read_json(post), f"{post}") for post in posts])  # noqa: B023 (called at once)
        names = manifest.listing(folder)
        lost = sorted(set(files) - set(names))
        if lost:
            raise StorageError(f"files of step {step} that were written are gone: {_some(lost)}")
        files |= manifest.digests(folder, (name for name in names if name not in files))
        for post in posts:
            post.unlink()
        return files

    def _write_manifest(self, step: int, files: Mapping[str, Entry]) -> None:
        self._owner.check()
        manifest.write(self._step(step), Manifest(step, self._uid, files))

    def _rotate(self) -> None:
        for step in self.steps()[: -self._keep]:
            _remove(self._step(step))

    # Looking.

    def steps(self) -> list[int]:
        """Committed steps, oldest first. Their manifests are there; whether they still hold, `restore` finds out."""
        return manifest.committed(self._folder)

    def latest_good(self) -> int | None:
        """The newest committed step. After `restore` it is a verified one."""
        return max(self.steps(), default=None)

    def close(self) -> None:
        """Waits for the last save, then gives the folder up. Raises what went wrong in the background."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._arrays.close()
            if jax.process_index() == 0:
                self._owner.release()

    def _step(self, step: int) -> epath.Path:
        return self._folder / str(step)

    def _digests(self, step: int, index: int) -> epath.Path:
        """Carries the claim's nonce, so that what an earlier attempt left is never taken for this one's."""
        return self._folder / DIGESTS / f"{self._nonce}.{step}.{index}.json"


@contextlib.contextmanager
def _storage(doing: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """What is raised while `doing`, and of that kind, becomes a StorageError that says so.

    Any kind by default: tensorstore's failures come as ValueError, RuntimeError and bare Exception.
    """
    try:
        yield
    except TrainerError:
        raise
    except kind as error:
        raise StorageError(f"{doing} failed: {_first_line(error)}") from error


def _await(read: Callable[[], T | None], what: str) -> T:
    """What `read` finds, once it finds something. Raises StorageError when that takes longer than a save may."""
    deadline, pause_s = time.monotonic() + TIMEOUT_S, 0.01
    while (found := read()) is None:
        if time.monotonic() > deadline:
            raise StorageError(f"waited {TIMEOUT_S} s for {what}")
        time.sleep(pause_s)
        pause_s = min(1.0, 1.5 * pause_s)
    return found


def _read_json(path: epath.Path) -> dict[str, list[Any]] | None:
    try:
        return json.loads(path.read_bytes())  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None


def _remove(folder: epath.Path) -> None:
    """Deletes a step, its manifest last: half deleted, it is known by the files that are missing."""
    for child in folder.iterdir():
        if child.name != manifest.NAME:
            child.rmtree() if child.is_dir() else child.unlink()
    folder.rmtree()


def _plain(files: Mapping[str, Entry]) -> dict[str, list[Any]]:
    return {name: [entry.size, entry.sha256] for name, entry in files.items()}


def _merge(parts: list[dict[str, list[Any]]]) -> dict[str, Entry]:
    return {name: Entry(*entry) for part in parts for name, entry in part.items()}


def _some(things: list[str]) -> str:
    """The first few of a list, and how many more there are."""
    more = f" and {len(things) - SHOWN} more" if len(things) > SHOWN else ""
    return ", ".join(things[:SHOWN]) + more


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"


def _silent(text: str) -> None:
    """Process 0 speaks for the gang."""
