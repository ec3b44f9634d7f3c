"""Saves checkpoints, verifies them, falls back to older ones and deletes the oldest.

A step is committed by its manifest, written last. What fails verification is never trained on, never counted, never
deleted: it is renamed aside once an older step was restored. Only committed steps are rotated, and the newest stays, as
do those that a save names as kept for how good they are.
What another put into the folder is named and left, whatever its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
from etils import epath

from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.buckets.again import again
from jaxlaunch.trainer.checkpoint import arrays, manifest, own_steps, saved_inputs, saved_tokenizer
from jaxlaunch.trainer.checkpoint.arrays import STATE, TIMEOUT_S, Arrays
from jaxlaunch.trainer.checkpoint.consensus import gather, on_primary
from jaxlaunch.trainer.checkpoint.manifest import STEP, Damaged, Entry, Manifest, is_remote
from jaxlaunch.trainer.checkpoint.owner import NAME as OWNER
from jaxlaunch.trainer.checkpoint.owner import Owner
from jaxlaunch.trainer.errors import CheckpointError, StorageError, TrainerError, first_line

DIGESTS = "jaxlaunch.digests"  # where the processes leave their digests for process 0 to collect
POST = re.compile(r"[0-9a-f]+\.[0-9]+\.[0-9]+\.json(\.[0-9a-f]{16}\.tmp)?")
ASIDE = re.compile(r"(0|[1-9][0-9]*)\.bad-[0-9]+")  # a step that failed verification
OF_THE_SYSTEM = tuple(map(os.strerror, (*faults.OF_A_DISK, *faults.REFUSED)))
SHOWN = 3  # damaged files of a step that are named
UNVERIFIED = "no manifest (killed while saving?), so its files cannot be verified"

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
        self._owner = Owner(self._folder, uid, renewed=self._look)
        self._nonce = ""
        self._arrays = Arrays(self._folder)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._committed: int | None = None
        self._gone: int | None = None  # a committed step that was found to be gone, until that is said
        self._seen_gone: int | None = None  # the same, for good

    def claim(self) -> None:
        """Takes the folder and clears what a killed save left. Raises CheckpointError when another run owns it.

        Notes what is named like a step and is another's: it is left.
        """
        self._nonce, message, left = on_primary(lambda: _again(f"claiming {self._folder}", self._claim, OSError))
        if message:
            self._note(message)
        if left:
            self._note(
                f"{self._folder} holds folders named like steps that no run saved; they are ignored: {_some(left)}"
            )

    def _claim(self) -> tuple[str, str, list[str]]:
        self._folder.mkdir(parents=True, exist_ok=True)
        message = self._owner.claim(self._take_over)
        left = own_steps.clear(self._folder)
        if (posts := self._folder / DIGESTS).is_dir():
            for post in posts.iterdir():
                if POST.fullmatch(post.name):
                    post.unlink()
        return secrets.token_hex(4), message, left

    def check_free(self, is_due: Callable[[int], bool]) -> None:
        """Raises CheckpointError when what is another's has the name of a step that `is_due` to be saved."""
        taken = on_primary(lambda: self._read(self._others))
        if due := [name for step, name in taken if is_due(step)]:
            raise self._in_the_way(due)

    def _others(self) -> list[tuple[int, str]]:
        """Steps whose place another has, and the name: also that of an unfinished save without our mark."""
        names = [(step, f"{step}") for step, is_own in self._named().items() if not is_own]
        if not is_remote(self._folder):
            every = (child.name for child in self._folder.iterdir() if own_steps.UNFINISHED.fullmatch(child.name))
            names += [
                (int(name.removesuffix(own_steps.MAKING)), name) for name in every if name.endswith(own_steps.MAKING)
            ]
        return sorted(names)

    def taken(self, step: int) -> str:
        """The name of what is another's where step `step` would be saved; "" where it can be. Every process asks."""
        return ", ".join(on_primary(lambda: self._taken(step)))

    def _taken(self, step: int) -> list[str]:
        unfinished = self._folder / f"{step}{own_steps.MAKING}"
        if unfinished.exists() and own_steps.is_begun(unfinished):
            own_steps.remove(unfinished)  # of a save of this process that failed
        places = [self._step(step)] if is_remote(self._folder) else [self._step(step), unfinished]
        return [path.name for path in places if path.exists()]

    def _in_the_way(self, names: list[str]) -> CheckpointError:
        return CheckpointError(
            f"{self._folder} holds {_some(names)}, which no run saved, in the place of checkpoints that this run is to "
            "save; move that elsewhere, or set checkpoint.path to a folder of this run's own"
        )

    def _named(self) -> dict[int, bool]:
        """What is named like a step, and whether it is this product's, or an empty folder."""
        named = {int(child.name): child for child in self._folder.iterdir() if STEP.fullmatch(child.name)}
        return {step: own_steps.is_own(child) or _is_empty(child) for step, child in named.items()}

    # Restoring.

    def restore(
        self, abstract: Mapping[str, Any], changes: Callable[[Tree], str] = lambda meta: ""
    ) -> tuple[int, Tree, Tree] | None:
        """The newest undamaged step, its state sharded as in `abstract`, and its meta; None in a new folder.

        `changes` tells of the meta of a step that is another model's how that differs, in words; "" where it cannot.

        Damaged newer steps are noted and renamed. A step that Orbax finished, killed before its manifest was written,
        cannot be verified: it is used where no other can be, and else removed. Raises CheckpointError when there are
        steps and none is usable, or when the state is that of another model; StorageError when storage fails.
        """
        steps, foreign = on_primary(lambda: self._read(self._survey))
        if foreign:
            self._note(f"{self._folder} holds files that are not checkpoints; they are ignored: {', '.join(foreign)}")
        bad: dict[int, str] = {}
        unverified: list[int] = []
        ways = [(step, self._verified) for step in sorted(steps, reverse=True)]
        for step, way in ways:
            found = way(step, abstract, changes)
            if found is None:
                unverified.append(step)
                ways.append((step, self._adopted))  # when all others have been tried
            elif isinstance(found, str):
                bad[step] = found
            else:
                unused = {**dict.fromkeys(unverified, UNVERIFIED), **bad}
                newer = {each: fault for each, fault in unused.items() if each > step}
                on_primary(lambda: self._set_aside(newer, step))  # noqa: B023 (called at once)
                self._committed = step
                return step, *found
        if bad:
            listed = "; ".join(f"step {step}: {fault}" for step, fault in bad.items())
            raise CheckpointError(
                f"no valid checkpoint in {self._folder}: {listed}. Restore one of these folders from a backup, or set "
                "checkpoint.path to a new folder to start from the first step; nothing was changed"
            )
        return None

    def _survey(self) -> tuple[list[int], list[str]]:
        """The steps in the folder, damaged ones included, and the names of files that are not checkpoints."""
        steps, foreign = [], []
        for child in sorted(self._folder.iterdir()):
            if STEP.fullmatch(child.name):
                if not child.is_dir() or own_steps.is_step(child) or _is_empty(child):
                    steps.append(int(child.name))
            elif not (
                child.name.startswith((".", OWNER, DIGESTS, saved_inputs.FILE, saved_tokenizer.FOLDER))
                or ASIDE.fullmatch(child.name)
                or own_steps.UNFINISHED.fullmatch(child.name)
            ):
                foreign.append(f"{child.name}/" if child.is_dir() else child.name)
        return steps, foreign

    def _verified(
        self, step: int, abstract: Mapping[str, Any], changes: Callable[[Tree], str]
    ) -> tuple[Tree, Tree] | str | None:
        """State and meta of `step`, or a sentence on how it is damaged; None where it has no manifest to verify it."""
        text, fault, extra = on_primary(lambda: self._read(lambda: self._inspect(step), step))
        if fault:
            return str(fault)
        if text is None:
            return None
        written = Manifest.from_bytes(text.encode())
        mine = jax.process_index(), jax.process_count()
        faults = self._read(lambda: manifest.find_damage(self._step(step), written, *mine), step)
        faults = sum(gather(faults), [])
        if faults:
            return _some(faults)
        if extra:
            self._note(f"step {step} holds files that its manifest does not list; they are ignored: {_some(extra)}")
        return self._read(lambda: self._loaded(step, abstract, changes), step)

    def _loaded(self, step: int, abstract: Mapping[str, Any], changes: Callable[[Tree], str]) -> tuple[Tree, Tree]:
        self._refuse_other_model(step, abstract, changes)
        return self._arrays.load(self._step(step), abstract)

    def _read(self, act: Callable[[], T], step: int | None = None) -> T:
        """What `act` reads of the folder, or of a step, tried again while storage fails. Raises StorageError."""
        if step is None:
            return _again(f"reading {self._folder}", act, OSError)
        return _again(f"reading step {step} of {self._folder}", act)

    def _inspect(self, step: int) -> tuple[str | None, str, list[str]]:
        """The manifest's text if there is one, what is wrong without reading the arrays, and files it does not list."""
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

    def _refuse_other_model(self, step: int, abstract: Mapping[str, Any], changes: Callable[[Tree], str]) -> None:
        difference = self._arrays.difference(self._step(step), abstract)
        if difference:
            told = changes(arrays.meta(self._step(step))) or f"was saved by another model: {difference}"
            raise CheckpointError(
                f"step {step} of {self._folder} {told}; change it back, or set checkpoint.path to a new folder"
            )

    def _adopted(
        self, step: int, abstract: Mapping[str, Any], changes: Callable[[Tree], str]
    ) -> tuple[Tree, Tree] | str | None:
        """The same of a step that Orbax finished, killed before its manifest was written, once it can be restored."""
        folder = self._step(step)
        error, found = "", None
        try:
            self._arrays.probe(folder, jax.process_index(), jax.process_count())
            found = self._loaded(step, abstract, changes)
        except CheckpointError:
            raise
        except Exception as raised:  # Orbax has no type of its own for what it cannot read
            if _said_by_the_system(raised):
                raise StorageError(_sentence(f"reading step {step} of {self._folder}", raised)) from raised
            error = f"no manifest, and it cannot be restored: {first_line(raised)}"
        errors = [error for error in gather(error) if error]
        if errors or found is None:
            return errors[0]
        with _storage(f"digesting step {step} of {self._folder}"):
            names = on_primary(lambda: manifest.listing(folder))
            mine = manifest.digests(folder, names[jax.process_index() :: jax.process_count()])
        files = _merge(gather(_plain(mine)))
        on_primary(lambda: self._write_manifest(step, files))
        self._note(
            f"step {step} has no manifest (killed while saving?), so its files could not be verified, and no step of "
            f"{self._folder} can be; it can be restored and is used, and a manifest of it as it is was written"
        )
        return found

    def _set_aside(self, bad: Mapping[int, str], good: int) -> None:
        self._owner.check()
        named = self._named()
        for step, fault in bad.items():
            if not named[step]:
                self._note(f"step {step}: {fault}; using step {good} ({step} is left: no run saved it)")
                continue
            if fault == UNVERIFIED:
                left = own_steps.remove(self._step(step))
                rest = f", except for files that no save wrote: {_some(left)}" if left else ""
                self._note(f"step {step}: {fault}; using step {good} ({step} was removed{rest})")
                continue
            aside = next(path for n in range(1, 1000) if not (path := self._folder / f"{step}.bad-{n}").exists())
            own_steps.move(self._step(step), aside)
            self._note(f"step {step}: {fault}; using step {good} ({step} is kept as {aside.name})")

    # Saving.

    def save(self, step: int, tree: Mapping[str, Any], meta: Mapping[str, Any], besides: Collection[int] = ()) -> None:
        """Starts saving; returns when the arrays are copied. A step that is committed already is not saved again.

        The steps `besides` stay when old ones are deleted.
        Waits for the save before. Raises StorageError or CheckpointError, of this save or of the one before.
        """
        self.wait()
        if step == self._committed:
            return
        with _storage(f"saving step {step} in {self._folder}", OSError):  # a ValueError here is of the arrays' making
            if jax.process_index() == 0:
                self._owner.check()
                self._look()
                if taken := self._taken(step):
                    raise self._in_the_way(taken)
            self._arrays.save(self._step(step), tree, meta)
        self._pending = self._background.submit(self._commit, step, frozenset(besides))

    def committed(self) -> int | None:
        """The newest step that is complete on storage, manifest included. Raises what went wrong in the background.

        Notes that it is gone again, where that is so.
        """
        if self._pending is not None and self._pending.done():
            self.wait()
        gone, self._gone = self._gone, None
        if gone is not None:
            self._note(self._tell_gone(gone))
        return self._committed

    def _look(self) -> None:
        """Looks whether the newest committed step is still there, before a save, and in a thread every few seconds."""
        step = self._committed
        if step is None or step == self._seen_gone or not self._is_gone(step):
            return
        if step == self._committed:  # else it was rotated
            self._gone = self._seen_gone = step

    def _is_gone(self, step: int) -> bool:
        try:
            return not (self._step(step) / manifest.NAME).exists()
        except Exception:  # storage is away: a save says so
            return False

    def _tell_gone(self, step: int) -> str:
        return (
            f"step {step} is gone from {self._folder}, which somebody else deleted; training continues, and saves "
            "again when a save is due"
        )

    def lost(self, step: int) -> bool:
        """Whether `step`, which was saved, is gone again, so that it can be saved anew. Every process asks."""
        self.wait()
        is_lost = step == self._committed and on_primary(lambda: self._is_gone(step))
        if is_lost:
            self._committed = None
        return is_lost

    def wait(self) -> None:
        """Returns when the last save is committed and old steps are deleted. Raises StorageError or CheckpointError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _commit(self, step: int, besides: Collection[int]) -> None:
        """The background part of a save: Orbax's, digests, manifest, rotation. Another thread, so no collectives."""
        with _storage(f"saving step {step} in {self._folder}"):
            self._finish_arrays()
            if jax.process_index() == 0:
                self._write_manifest(step, self._collect(step))
                self._committed = step
                self._rotate(besides)
            else:
                self._post(step)
                _await(lambda: manifest.read(self._step(step)), f"the manifest of step {step}")
                self._committed = step

    def _finish_arrays(self) -> None:
        try:
            self._arrays.wait()
        except Exception:
            if jax.process_index() == 0:
                self._owner.check()  # a folder that was taken over fails in many ways: report that
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
            raise StorageError(f"files of step {step} disappeared after they were written: {_some(lost)}")
        files |= manifest.digests(folder, (name for name in names if name not in files))
        for post in posts:
            post.unlink()
        return files

    def _write_manifest(self, step: int, files: Mapping[str, Entry]) -> None:
        self._owner.check()
        manifest.write(self._step(step), Manifest(step, self._uid, files))

    def _rotate(self, besides: Collection[int]) -> None:
        for step in self.steps()[: -self._keep]:
            if step in besides:
                continue
            if left := own_steps.remove(self._step(step)):
                self._note(f"step {step} was removed, except for files that no save wrote: {_some(left)}")

    # Reading.

    def steps(self) -> list[int]:
        """Committed steps, oldest first. They have a manifest; only `restore` verifies their files."""
        return manifest.committed(self._folder)

    def close(self) -> None:
        """Waits for the last save, then releases the folder. Raises what went wrong in the background."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._arrays.close()
            if jax.process_index() == 0:
                with _storage(f"giving {self._folder} up", OSError):
                    self._owner.release()

    def _step(self, step: int) -> epath.Path:
        return self._folder / str(step)

    def _digests(self, step: int, index: int) -> epath.Path:
        """Carries the claim's nonce, so that what an earlier attempt left is never taken for this one's."""
        return self._folder / DIGESTS / f"{self._nonce}.{step}.{index}.json"


@contextlib.contextmanager
def _storage(doing: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Turns an exception of `kind`, or of a disk or a store, raised while `doing` into a StorageError that names it.

    Any kind by default: tensorstore's failures come as ValueError, RuntimeError and bare Exception. What the system
    said of a disk is storage's in any of them.
    """
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        if not _said_by_the_system(error) and not isinstance(error, kind) and not faults.is_from_store(error):
            raise
        raise StorageError(_sentence(doing, error)) from error


def _sentence(doing: str, error: Exception) -> str:
    """What failed, and why. What the system said is all that there is to know; libraries put names of files before it
    and places in their code behind it."""
    said = _said_by_the_system(error)
    if not said:
        return f"{doing} failed: {first_line(error)}"
    hint = "; free space there, or lower train.checkpoint.keep" if faults.is_full(OSError(said)) else ""
    return f"{said}: {doing} failed{hint}"


def _again(doing: str, act: Callable[[], T], kind: type[Exception] = Exception) -> T:
    """What `act` returns, tried again while it raises what storage does. Raises StorageError."""

    def attempt() -> T:
        with _storage(doing, kind):
            return act()

    return again(attempt)


def _await(read: Callable[[], T | None], what: str) -> T:
    """What `read` returns, once it is not None. Raises StorageError after TIMEOUT_S."""
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


def _is_empty(folder: epath.Path) -> bool:
    return folder.is_dir() and next(folder.iterdir(), None) is None


def _plain(files: Mapping[str, Entry]) -> dict[str, list[Any]]:
    return {name: [entry.size, entry.sha256] for name, entry in files.items()}


def _merge(parts: list[dict[str, list[Any]]]) -> dict[str, Entry]:
    return {name: Entry(*entry) for part in parts for name, entry in part.items()}


def _some(things: list[str]) -> str:
    """The first few of a list, and how many more there are."""
    more = f" and {len(things) - SHOWN} more" if len(things) > SHOWN else ""
    return ", ".join(things[:SHOWN]) + more


def _said_by_the_system(error: BaseException | None) -> str:
    """`No space left on device` and the like, of an error or what it came from: tensorstore says it after all paths."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if found := next((words for words in OF_THE_SYSTEM if words in str(error)), ""):
            return found
        seen.append(error)
        error = error.__cause__ or error.__context__
    return ""


def _silent(text: str) -> None:
    """Discards a note: process 0 writes those of the gang."""
