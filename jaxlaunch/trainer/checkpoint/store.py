"""Saves checkpoints, deletes the oldest, and restores the newest that is undamaged.

A step is committed by its manifest, which is written last. Only committed steps are rotated. The newest ones stay, and
so do the best ones that a save names. Files that another program put into the folder are reported and never removed.

A step that fails verification is never used, counted or deleted: it is renamed after an older step was restored. If the
process was killed between the end of Orbax's save and the manifest, the step cannot be verified. It is used if no other
step can be, and otherwise removed.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from etils import epath

from jaxlaunch.trainer.checkpoint import arrays, manifest
from jaxlaunch.trainer.checkpoint.arrays import STATE, Arrays
from jaxlaunch.trainer.checkpoint.consensus import gather, on_primary
from jaxlaunch.trainer.checkpoint.folder import CheckpointFolder, first_few, remove_step
from jaxlaunch.trainer.checkpoint.manifest import Damaged, Entry, Manifest
from jaxlaunch.trainer.checkpoint.owner import Owner
from jaxlaunch.trainer.checkpoint.storage import retry, storage_error, storage_errors, system_message, wait_for
from jaxlaunch.trainer.errors import CheckpointError, StorageError, first_line

UNVERIFIED = "no manifest (killed while saving?), so its files cannot be verified"

Tree = dict[str, Any]
# State and meta.
Loaded = tuple[Tree, Tree]


class Store:
    """The checkpoints of one run in one folder. Every process makes the same calls in the same order."""

    def __init__(
        self, path: str, *, keep: int, uid: str, take_over: bool = False, note: Callable[[str], None] = print
    ) -> None:
        self._folder = CheckpointFolder(path)
        self._keep = keep
        self._uid = uid
        self._take_over = take_over
        # Only process 0 writes notes.
        self._note = note if jax.process_index() == 0 else lambda text: None
        self._owner = Owner(self._folder.path, uid, renewed=self._look_for_newest)
        self._nonce = ""
        self._arrays = Arrays(self._folder.path)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._committed: int | None = None
        # A committed step that somebody deleted: reset when it is reported, and kept.
        self._gone: int | None = None
        self._seen_gone: int | None = None

    def claim(self) -> None:
        """Claim the folder and remove unfinished saves. Raises CheckpointError when another run owns it."""

        def claim() -> tuple[str, str, list[str]]:
            self._folder.path.mkdir(parents=True, exist_ok=True)
            message = self._owner.claim(self._take_over)
            return secrets.token_hex(4), message, self._folder.clear()

        self._nonce, message, left = on_primary(lambda: retry(f"claiming {self._folder}", claim, OSError))
        if message:
            self._note(message)
        if left:
            self._note(
                f"{self._folder} holds folders named like steps that no run saved; they are ignored: {first_few(left)}"
            )

    def check_free(self, is_due: Callable[[int], bool]) -> None:
        """Raise CheckpointError if a foreign file has the name of a step that `is_due` to be saved."""
        foreign = on_primary(lambda: self._folder.read(self._folder.foreign_steps))
        if due := [name for step, name in foreign if is_due(step)]:
            raise self._folder.in_the_way_error(due)

    def taken(self, step: int) -> str:
        """Return the names of foreign files in the place of a step; "" if it can be saved. Every process calls it."""
        return ", ".join(on_primary(lambda: self._folder.in_the_way(step)))

    def restore(
        self, abstract: Mapping[str, Any], changes: Callable[[Tree], str] = lambda meta: ""
    ) -> tuple[int, Tree, Tree] | None:
        """Restore the newest undamaged step with its state and meta; None in a new folder. See `Restore`."""
        restore = Restore(self._folder, self._arrays, self._owner, self._uid, self._note, abstract, changes)
        if (restored := restore.newest()) is not None:
            self._committed = restored[0]
        return restored

    def steps(self) -> list[int]:
        """Return the committed steps, oldest first. Only `restore` verifies their files."""
        return manifest.committed(self._folder.path)

    # --- saving ---------------------------------------------------------------------------------------------------

    def save(self, step: int, tree: Mapping[str, Any], meta: Mapping[str, Any], besides: Collection[int] = ()) -> None:
        """Start to save, and return when the arrays are copied. A committed step is not saved again.

        The steps in `besides` are kept when old ones are deleted. Waits for the previous save first. Raises
        StorageError or CheckpointError of this save or of the previous one.
        """
        self.wait()
        if step == self._committed:
            return
        # A ValueError here comes from the arrays, not from storage.
        with storage_errors(f"saving step {step} in {self._folder}", OSError):
            if jax.process_index() == 0:
                self._owner.check()
                self._look_for_newest()
                if names := self._folder.in_the_way(step):
                    raise self._folder.in_the_way_error(names)
            self._arrays.save(self._folder.step(step), tree, meta)
        self._pending = self._background.submit(self._commit, step, frozenset(besides))

    def wait(self) -> None:
        """Wait until the last save is committed and old steps are deleted. Raises StorageError or CheckpointError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def committed(self) -> int | None:
        """Return the newest committed step, and note if it was deleted. Raises the error of a failed save."""
        if self._pending is not None and self._pending.done():
            self.wait()
        gone, self._gone = self._gone, None
        if gone is not None:
            self._note(
                f"step {gone} is gone from {self._folder}, which somebody else deleted; training continues, and saves "
                "again when a save is due"
            )
        return self._committed

    def lost(self, step: int) -> bool:
        """Return whether the saved `step` was deleted, and allow it to be saved again. Every process calls it."""
        self.wait()
        is_lost = step == self._committed and on_primary(lambda: self._folder.is_gone(step))
        if is_lost:
            self._committed = None
        return is_lost

    def close(self) -> None:
        """Wait for the last save, then release the folder. Raises the error of the background save."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._arrays.close()
            if jax.process_index() == 0:
                with storage_errors(f"giving {self._folder} up", OSError):
                    self._owner.release()

    def _look_for_newest(self) -> None:
        """Check that the newest committed step still exists, before a save and in a thread every few seconds."""
        step = self._committed
        if step is None or step == self._seen_gone or not self._folder.is_gone(step):
            return
        # A step that is no longer the newest may have been rotated.
        if step == self._committed:
            self._gone = self._seen_gone = step

    # --- in the background, where there are no collectives --------------------------------------------------------

    def _commit(self, step: int, besides: Collection[int]) -> None:
        """Finish a save: wait for Orbax, digest the files, write the manifest, delete old steps."""
        with storage_errors(f"saving step {step} in {self._folder}"):
            try:
                self._arrays.wait()
            except Exception:
                if jax.process_index() == 0:
                    # If the folder was taken over, report that instead of the failure that it causes.
                    self._owner.check()
                raise
            if jax.process_index() == 0:
                entries = self._collect_digests(step)
                self._owner.check()
                manifest.write(self._folder.step(step), Manifest(step, self._uid, entries))
                self._committed = step
                for old in self.steps()[: -self._keep]:
                    if old not in besides and (left := remove_step(self._folder.step(old))):
                        files = first_few(left)
                        self._note(f"step {old} was removed, except for files that no save wrote: {files}")
            else:
                self._leave_digests(step)
                wait_for(lambda: manifest.read(self._folder.step(step)), f"the manifest of step {step}")
                self._committed = step

    def _leave_digests(self, step: int) -> None:
        """Write the digests of this process's files. Process 0, which lists the whole folder, digests all others."""
        folder = self._folder.step(step)
        own = epath.Path(STATE) / f"ocdbt.process_{jax.process_index()}"
        names = manifest.listing(folder / own) if (folder / own).exists() else []
        entries = manifest.digests(folder, [f"{own}/{name}" for name in names])
        path = self._folder.digests(self._nonce, step, jax.process_index())
        path.parent.mkdir(parents=True, exist_ok=True)
        manifest.replace(path, json.dumps(_to_json(entries)).encode())

    def _collect_digests(self, step: int) -> dict[str, Entry]:
        """Return the digests of every file of the step: those from other processes, and of all other files."""
        folder = self._folder.step(step)
        posts = [self._folder.digests(self._nonce, step, process) for process in range(1, jax.process_count())]
        # Each lambda is called before the loop goes on.
        files = _merge_entries(
            [wait_for(lambda: _read_json(digest_path), f"{digest_path}") for digest_path in posts]  # noqa: B023
        )
        names = manifest.listing(folder)
        lost = sorted(set(files) - set(names))
        if lost:
            raise StorageError(f"files of step {step} disappeared after they were written: {first_few(lost)}")
        files |= manifest.digests(folder, (name for name in names if name not in files))
        for post in posts:
            post.unlink()
        return files


class Restore:
    """One restore of the newest undamaged step to a state like `abstract`, by all processes together.

    `changes` describes how the model of a step's meta differs; "" if it cannot tell.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        arrays: Arrays,
        owner: Owner,
        uid: str,
        note: Callable[[str], None],
        abstract: Mapping[str, Any],
        changes: Callable[[Tree], str],
    ) -> None:
        self._folder, self._arrays, self._owner, self._uid, self._note = folder, arrays, owner, uid, note
        self._abstract, self._changes = abstract, changes

    def newest(self) -> tuple[int, Tree, Tree] | None:
        """Restore the newest undamaged step, its state sharded as in `abstract`, and its meta; None in a new folder.

        Raises:
            CheckpointError: There are steps but none is usable, or the state is that of another model.
            StorageError: Storage fails.
        """
        steps, foreign = on_primary(lambda: self._folder.read(self._folder.survey))
        if foreign:
            self._note(f"{self._folder} holds files that are not checkpoints; they are ignored: {', '.join(foreign)}")
        bad: dict[int, str] = {}
        unverified: list[int] = []
        attempts = [(step, self._load_verified) for step in sorted(steps, reverse=True)]
        for step, attempt in attempts:
            outcome = attempt(step)
            if outcome is None:
                unverified.append(step)
                # It is adopted after all others have been tried.
                attempts.append((step, self._adopt))
            elif isinstance(outcome, str):
                bad[step] = outcome
            else:
                unused = {**dict.fromkeys(unverified, UNVERIFIED), **bad}
                newer = {number: fault for number, fault in unused.items() if number > step}
                # The lambda is called before the loop goes on.
                on_primary(lambda: self._set_aside(newer, step))  # noqa: B023
                return step, *outcome
        if bad:
            listed = "; ".join(f"step {step}: {fault}" for step, fault in bad.items())
            raise CheckpointError(
                f"no valid checkpoint in {self._folder}: {listed}. Restore one of these folders from a backup, or set "
                "checkpoint.path to a new folder to start from the first step; nothing was changed"
            )
        return None

    def _load_verified(self, step: int) -> Loaded | str | None:
        """Load state and meta of a step, or describe its damage. Return None if it has no manifest."""
        text, fault, extra = on_primary(lambda: self._folder.read(lambda: self._inspect(step), step))
        if fault:
            return str(fault)
        if text is None:
            return None
        written = Manifest.from_bytes(text.encode())
        share = jax.process_index(), jax.process_count()
        faults = self._folder.read(lambda: manifest.find_damage(self._folder.step(step), written, *share), step)
        if faults := sum(gather(faults), []):
            return first_few(faults)
        if extra:
            files = first_few(extra)
            self._note(f"step {step} holds files that its manifest does not list; they are ignored: {files}")
        return self._folder.read(lambda: self._load(step), step)

    def _inspect(self, step: int) -> tuple[str | None, str, list[str]]:
        """Return the text of the manifest, a fault found without reading arrays, and unlisted files."""
        folder = self._folder.step(step)
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

    def _load(self, step: int) -> Loaded:
        folder = self._folder.step(step)
        if difference := self._arrays.difference(folder, self._abstract):
            reason = self._changes(arrays.meta(folder)) or f"was saved by another model: {difference}"
            raise CheckpointError(
                f"step {step} of {self._folder} {reason}; change it back, or set checkpoint.path to a new folder"
            )
        return self._arrays.load(folder, self._abstract)

    def _adopt(self, step: int) -> Loaded | str | None:
        """Load a step without a manifest and write one, or describe why it cannot be restored."""
        folder = self._folder.step(step)
        error, loaded = "", None
        try:
            self._arrays.probe(folder, jax.process_index(), jax.process_count())
            loaded = self._load(step)
        except CheckpointError:
            raise
        except Exception as raised:
            # Orbax has no exception type for unreadable data.
            if system_message(raised):
                raise storage_error(f"reading step {step} of {self._folder}", raised) from raised
            error = f"no manifest, and it cannot be restored: {first_line(raised)}"
        errors = [error for error in gather(error) if error]
        if errors or loaded is None:
            return errors[0]
        with storage_errors(f"digesting step {step} of {self._folder}"):
            names = on_primary(lambda: manifest.listing(folder))
            entries = manifest.digests(folder, names[jax.process_index() :: jax.process_count()])
        files = _merge_entries(gather(_to_json(entries)))

        def write() -> None:
            self._owner.check()
            manifest.write(folder, Manifest(step, self._uid, files))

        on_primary(write)
        self._note(
            f"step {step} has no manifest (killed while saving?), so its files could not be verified, and no step of "
            f"{self._folder} can be; it can be restored and is used, and a manifest of it as it is was written"
        )
        return loaded

    def _set_aside(self, bad: Mapping[int, str], good: int) -> None:
        self._owner.check()
        is_own = self._folder.step_owners()
        for step, fault in bad.items():
            if not is_own[step]:
                self._note(f"step {step}: {fault}; using step {good} ({step} is left: no run saved it)")
            elif fault == UNVERIFIED:
                left = remove_step(self._folder.step(step))
                rest = f", except for files that no save wrote: {first_few(left)}" if left else ""
                self._note(f"step {step}: {fault}; using step {good} ({step} was removed{rest})")
            else:
                name = self._folder.set_aside(step)
                self._note(f"step {step}: {fault}; using step {good} ({step} is kept as {name})")


def _to_json(files: Mapping[str, Entry]) -> dict[str, list[Any]]:
    return {name: [entry.size, entry.sha256] for name, entry in files.items()}


def _merge_entries(parts: list[dict[str, list[Any]]]) -> dict[str, Entry]:
    return {name: Entry(*entry) for part in parts for name, entry in part.items()}


def _read_json(path: epath.Path) -> dict[str, list[Any]] | None:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
