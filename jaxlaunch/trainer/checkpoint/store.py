"""Saves checkpoints, deletes old ones, and restores the newest that is undamaged.

Saving: Orbax copies the arrays to the host and writes them in the background. Then each process
digests its files, and process 0 collects the digests and writes the manifest, which commits the
step. After that, process 0 deletes committed steps except the newest ones and those that the save
names as best. Files of other programs are reported and never removed.

Restoring: all processes verify the files of a step against its manifest, the newest step first. A
step that fails verification is renamed after an older step is restored, and never deleted. A step
without a manifest cannot be verified, because the process was killed between the end of Orbax's
save and the manifest. It is used if no other step can be restored, and otherwise removed.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from etils import epath

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.checkpoint import arrays, manifest
from jaxlaunch.trainer.checkpoint.arrays import STATE, ArrayCheckpointer
from jaxlaunch.trainer.checkpoint.consensus import gather_values, run_on_primary
from jaxlaunch.trainer.checkpoint.folder import CheckpointFolder, remove_step
from jaxlaunch.trainer.checkpoint.manifest import DamagedManifestError, FileDigest, Manifest
from jaxlaunch.trainer.checkpoint.owner import Owner
from jaxlaunch.trainer.checkpoint.storage import (
    retry_storage,
    storage_error,
    storage_errors,
    system_message,
    wait_for,
)
from jaxlaunch.trainer.errors import CheckpointError, StorageError, first_line, list_first

UNVERIFIED = "no manifest (killed while saving?), so its files cannot be verified"

Tree = dict[str, Any]
# State and meta.
LoadedStep = tuple[Tree, Tree]


class Store:
    """The checkpoints of one run in one folder, which all processes save and restore together."""

    def __init__(
        self,
        path: str,
        *,
        keep: int,
        uid: str,
        take_over: bool = False,
        note: Callable[[str], None] = print,
    ) -> None:
        self._folder = CheckpointFolder(path)
        self._keep, self._uid, self._take_over = keep, uid, take_over
        # Only process 0 writes notes.
        self._note = note if jax.process_index() == 0 else lambda text: None
        self._owner = Owner(self._folder.path, uid, on_renewed=self._check_newest_exists)
        self._nonce = ""
        self._checkpointer = ArrayCheckpointer(self._folder.path)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending_save: Future[None] | None = None
        self._committed_step: int | None = None
        # A committed step that was deleted from outside, until it is reported.
        self._deleted_step: int | None = None
        # The same, also after it is reported.
        self._known_deleted_step: int | None = None

    def claim(self) -> None:
        """Claim the folder and remove unfinished saves.

        Raises CheckpointError if another run owns the folder.
        """

        def claim_folder() -> tuple[str, str, list[str]]:
            remote.create_folder(self._folder.path)
            message = self._owner.claim(self._take_over)
            return secrets.token_hex(4), message, self._folder.clear_unfinished()

        self._nonce, message, foreign_names = run_on_primary(
            lambda: retry_storage(f"claiming {self._folder}", claim_folder, OSError)
        )
        if message:
            self._note(message)
        if foreign_names:
            self._note(
                f"{self._folder} holds folders named like steps that no run saved; they are "
                f"ignored: {list_first(foreign_names)}"
            )

    def check_free(self, is_due: Callable[[int], bool]) -> None:
        """Raise CheckpointError if a foreign file blocks the save of a step that `is_due`."""
        foreign_steps = run_on_primary(
            lambda: self._folder.read_with_retries(self._folder.foreign_steps)
        )
        if due_names := [name for step, name in foreign_steps if is_due(step)]:
            raise self._folder.blocking_error(due_names)

    def blocking_names(self, step: int) -> str:
        """Return the names of foreign files that block a save of `step`; "" if there are none."""
        return ", ".join(run_on_primary(lambda: self._folder.blocking_names(step)))

    def restore(
        self, abstract: Mapping[str, Any], describe_change: Callable[[Tree], str] = lambda meta: ""
    ) -> tuple[int, Tree, Tree] | None:
        """Restore the newest undamaged step; see Restore.restore_newest."""
        restore = Restore(
            self._folder,
            self._checkpointer,
            self._owner,
            self._uid,
            self._note,
            abstract,
            describe_change,
        )
        if (restored := restore.restore_newest()) is not None:
            self._committed_step = restored[0]
        return restored

    def committed_steps(self) -> list[int]:
        """Return the committed steps, oldest first. Only `restore` verifies their files."""
        return manifest.committed_steps(self._folder.path)

    # --- saving -----------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        tree: Mapping[str, Any],
        meta: Mapping[str, Any],
        kept_steps: Collection[int] = (),
    ) -> None:
        """Start to save a step, and return when the arrays are copied to the host.

        Does nothing if the step is already committed. Waits for the previous save first. Steps in
        `kept_steps` are not deleted. Raises StorageError or CheckpointError of this save or of the
        previous one.
        """
        self.wait()
        if step == self._committed_step:
            return
        # Only an OSError is a failure of storage here. A ValueError comes from the arrays.
        with storage_errors(f"saving step {step} in {self._folder}", OSError):
            if jax.process_index() == 0:
                self._owner.check_ownership()
                self._check_newest_exists()
                if names := self._folder.blocking_names(step):
                    raise self._folder.blocking_error(names)
            self._checkpointer.save(self._folder.step_folder(step), tree, meta)
        self._pending_save = self._background.submit(self._commit_step, step, frozenset(kept_steps))

    def wait(self) -> None:
        """Wait until the last save is committed. Raises StorageError or CheckpointError."""
        pending, self._pending_save = self._pending_save, None
        if pending is not None:
            pending.result()

    def newest_committed_step(self) -> int | None:
        """Return the newest committed step, and note if it was deleted from outside.

        Raises the error of a save that has failed.
        """
        if self._pending_save is not None and self._pending_save.done():
            self.wait()
        deleted_step, self._deleted_step = self._deleted_step, None
        if deleted_step is not None:
            self._note(
                f"step {deleted_step} is gone from {self._folder}; somebody else deleted it; "
                "training continues, and saves again when a save is due"
            )
        return self._committed_step

    def forget_if_deleted(self, step: int) -> bool:
        """Return whether the saved `step` was deleted, and if so, forget that it was saved."""
        self.wait()
        if step != self._committed_step or not run_on_primary(lambda: self._folder.is_gone(step)):
            return False
        self._committed_step = None
        return True

    def close(self) -> None:
        """Wait for the last save, then release the folder. Raises the error of the save."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._checkpointer.close()
            if jax.process_index() == 0:
                with storage_errors(f"releasing {self._folder}", OSError):
                    self._owner.release()

    def _check_newest_exists(self) -> None:
        """Check that the newest committed step exists, before a save and every few seconds."""
        step = self._committed_step
        if step is None or step == self._known_deleted_step or not self._folder.is_gone(step):
            return
        # A step that is no longer the newest may have been rotated.
        if step == self._committed_step:
            self._deleted_step = self._known_deleted_step = step

    # --- in the background thread, which must not run collectives ---------------------------------

    def _commit_step(self, step: int, kept_steps: Collection[int]) -> None:
        """Finish a save: wait for Orbax, digest the files, write the manifest, delete old steps."""
        with storage_errors(f"saving step {step} in {self._folder}"):
            try:
                self._checkpointer.wait()
            except Exception:
                if jax.process_index() == 0:
                    # If another run took over the folder, that is the cause to report.
                    self._owner.check_ownership()
                raise
            if jax.process_index() != 0:
                self._write_digests(step)
                folder = self._folder.step_folder(step)
                wait_for(lambda: manifest.read_manifest(folder), f"the manifest of step {step}")
                self._committed_step = step
                return
            entries = self._collect_digests(step)
            self._owner.check_ownership()
            step_manifest = Manifest(step, self._uid, entries)
            manifest.write_manifest(self._folder.step_folder(step), step_manifest)
            self._committed_step = step
            for old_step in self.committed_steps()[: -self._keep]:
                if old_step not in kept_steps:
                    foreign_files = remove_step(self._folder.step_folder(old_step))
                    if foreign_files:
                        self._note(
                            f"step {old_step} was removed, except for files that no save wrote: "
                            f"{list_first(foreign_files)}"
                        )

    def _write_digests(self, step: int) -> None:
        """Write the digests of the files that only this process wrote."""
        folder = self._folder.step_folder(step)
        own_folder = epath.Path(STATE) / f"ocdbt.process_{jax.process_index()}"
        names = manifest.list_files(folder / own_folder) if (folder / own_folder).exists() else []
        entries = manifest.digest_files(folder, [f"{own_folder}/{name}" for name in names])
        path = self._folder.digests_file(self._nonce, step, jax.process_index())
        remote.create_folder(path.parent)
        manifest.replace_file(path, json.dumps(_to_json(entries)).encode())

    def _collect_digests(self, step: int) -> dict[str, FileDigest]:
        """Return the digests of all files of a step: those of other processes, and the rest."""
        folder = self._folder.step_folder(step)
        digest_paths = [
            self._folder.digests_file(self._nonce, step, process)
            for process in range(1, jax.process_count())
        ]
        files: dict[str, FileDigest] = {}
        for path in digest_paths:
            files |= _from_json(wait_for(functools.partial(_read_json, path), f"{path}"))
        names = manifest.list_files(folder)
        if missing_files := sorted(set(files) - set(names)):
            raise StorageError(
                f"files of step {step} disappeared after they were written: "
                f"{list_first(missing_files)}"
            )
        files |= manifest.digest_files(folder, (name for name in names if name not in files))
        for path in digest_paths:
            path.unlink()
        return files


class Restore:
    """One restore of the newest undamaged step, by all processes together.

    The state gets the shapes, dtypes and shardings of `abstract`. If those of a step differ,
    `describe_change` explains the difference by the step's meta; "" if it cannot.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        checkpointer: ArrayCheckpointer,
        owner: Owner,
        uid: str,
        note: Callable[[str], None],
        abstract: Mapping[str, Any],
        describe_change: Callable[[Tree], str],
    ) -> None:
        self._folder, self._checkpointer = folder, checkpointer
        self._owner, self._uid, self._note = owner, uid, note
        self._abstract, self._describe_change = abstract, describe_change

    def restore_newest(self) -> tuple[int, Tree, Tree] | None:
        """Return the newest undamaged step, its state and its meta; None if there are no steps.

        Raises CheckpointError if there are steps but none can be used, or if the state is that of
        another model; StorageError if storage fails.
        """
        list_steps = self._folder.list_steps
        steps, foreign_names = run_on_primary(lambda: self._folder.read_with_retries(list_steps))
        if foreign_names:
            self._note(
                f"{self._folder} holds files that are not checkpoints; they are ignored: "
                f"{', '.join(foreign_names)}"
            )
        faults: dict[int, str] = {}
        unverified: list[int] = []
        newest_first = sorted(steps, reverse=True)
        # Steps without a manifest are only tried after all others.
        passes = (self._load_verified, newest_first), (self._adopt_step, unverified)
        for load_step, candidates in passes:
            for step in candidates:
                outcome = load_step(step)
                if outcome is None:
                    unverified.append(step)
                elif isinstance(outcome, str):
                    faults[step] = outcome
                else:
                    unused = {**dict.fromkeys(unverified, UNVERIFIED), **faults}
                    newer_faults = {
                        newer_step: fault
                        for newer_step, fault in unused.items()
                        if newer_step > step
                    }
                    run_on_primary(functools.partial(self._set_aside_steps, newer_faults, step))
                    return step, *outcome
        if faults:
            listed = "; ".join(f"step {step}: {fault}" for step, fault in faults.items())
            raise CheckpointError(
                f"no valid checkpoint in {self._folder}: {listed}. Restore one of these folders "
                "from a backup, or set checkpoint.path to a new folder to start from the first "
                "step; nothing was changed"
            )
        return None

    def _load_verified(self, step: int) -> LoadedStep | str | None:
        """Load state and meta of a step, or describe its damage; None if it has no manifest."""
        manifest_text, fault, unlisted = run_on_primary(
            lambda: self._folder.read_with_retries(lambda: self._inspect_step(step), step)
        )
        if fault:
            return str(fault)
        if manifest_text is None:
            return None
        step_manifest = Manifest.from_bytes(manifest_text.encode())

        def find_damage() -> list[str]:
            folder = self._folder.step_folder(step)
            process, processes = jax.process_index(), jax.process_count()
            return manifest.find_damage(folder, step_manifest, process, processes)

        own_damages = self._folder.read_with_retries(find_damage, step)
        if damages := sum(gather_values(own_damages), []):
            return list_first(damages)
        if unlisted:
            files = list_first(unlisted)
            self._note(
                f"step {step} holds files that its manifest does not list; they are ignored: "
                f"{files}"
            )
        return self._folder.read_with_retries(lambda: self._load_step(step), step)

    def _inspect_step(self, step: int) -> tuple[str | None, str, list[str]]:
        """Return the manifest's text or None, a fault or "", and the files not in the manifest."""
        folder = self._folder.step_folder(step)
        if not manifest.is_folder(folder):
            return None, "is a file, not a folder", []
        names = manifest.list_files(folder)
        try:
            step_manifest = manifest.read_manifest(folder)
        except DamagedManifestError as error:
            return None, str(error), []
        if step_manifest is None:
            return None, "" if names else "the folder is empty", []
        if step_manifest.step != step:
            return None, f"its manifest is that of step {step_manifest.step}", []
        return step_manifest.to_bytes().decode(), "", sorted(set(names) - set(step_manifest.files))

    def _load_step(self, step: int) -> LoadedStep:
        folder = self._folder.step_folder(step)
        if difference := self._checkpointer.find_difference(folder, self._abstract):
            reason = self._describe_change(arrays.read_meta(folder))
            reason = reason or f"was saved by another model: {difference}"
            raise CheckpointError(
                f"step {step} of {self._folder} {reason}; change it back, or set checkpoint.path "
                "to a new folder"
            )
        return self._checkpointer.load(folder, self._abstract)

    def _adopt_step(self, step: int) -> LoadedStep | str | None:
        """Load a step without a manifest and write one, or describe why it cannot be restored."""
        folder = self._folder.step_folder(step)
        failure, loaded = "", None
        try:
            self._checkpointer.probe(folder, jax.process_index(), jax.process_count())
            loaded = self._load_step(step)
        except CheckpointError:
            raise
        except Exception as error:
            # Orbax has no exception type for unreadable data.
            if system_message(error):
                raise storage_error(f"reading step {step} of {self._folder}", error) from error
            failure = f"no manifest, and it cannot be restored: {first_line(error)}"
        failures = [text for text in gather_values(failure) if text]
        if failures or loaded is None:
            return failures[0]
        with storage_errors(f"digesting step {step} of {self._folder}"):
            names = run_on_primary(lambda: manifest.list_files(folder))
            own_names = names[jax.process_index() :: jax.process_count()]
            entries = _to_json(manifest.digest_files(folder, own_names))
        files: dict[str, FileDigest] = {}
        for part in gather_values(entries):
            files |= _from_json(part)

        def write_step_manifest() -> None:
            self._owner.check_ownership()
            manifest.write_manifest(folder, Manifest(step, self._uid, files))

        run_on_primary(write_step_manifest)
        self._note(
            f"step {step} has no manifest (killed while saving?), so its files could not be "
            f"verified, and {self._folder} has no step that can be; it is restored, and a manifest "
            "of its present files was written"
        )
        return loaded

    def _set_aside_steps(self, faults: Mapping[int, str], restored_step: int) -> None:
        self._owner.check_ownership()
        is_own = self._folder.step_ownership()
        for step, fault in faults.items():
            if not is_own[step]:
                outcome = f"{step} is left: no run saved it"
            elif fault == UNVERIFIED:
                outcome = f"{step} was removed"
                if foreign_files := remove_step(self._folder.step_folder(step)):
                    outcome += f", except for files that no save wrote: {list_first(foreign_files)}"
            else:
                outcome = f"{step} is kept as {self._folder.set_aside(step)}"
            self._note(f"step {step}: {fault}; using step {restored_step} ({outcome})")


def _to_json(files: Mapping[str, FileDigest]) -> dict[str, list[Any]]:
    return {name: [entry.size, entry.sha256] for name, entry in files.items()}


def _from_json(entries: Mapping[str, list[Any]]) -> dict[str, FileDigest]:
    return {name: FileDigest(*entry) for name, entry in entries.items()}


def _read_json(path: epath.Path) -> dict[str, list[Any]] | None:
    try:
        result: dict[str, list[Any]] | None = json.loads(path.read_bytes())
        return result
    except FileNotFoundError:
        return None
