"""Saves checkpoints, and deletes the oldest.

A step is committed by its manifest, written last. Only committed steps are rotated, and the newest stays, as do those
that a save names as kept for how good they are. What another program put into the folder is named and left, whatever
its name.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from etils import epath

from jaxlaunch.trainer.checkpoint import manifest, own_steps
from jaxlaunch.trainer.checkpoint.arrays import STATE, Arrays
from jaxlaunch.trainer.checkpoint.consensus import on_primary
from jaxlaunch.trainer.checkpoint.folder import CheckpointFolder, first_few
from jaxlaunch.trainer.checkpoint.manifest import Entry, Manifest
from jaxlaunch.trainer.checkpoint.owner import Owner
from jaxlaunch.trainer.checkpoint.restore import Restore, Tree, merge_entries, plain_entries
from jaxlaunch.trainer.checkpoint.storage import retry, storage_errors, wait_for
from jaxlaunch.trainer.errors import StorageError


class Store:
    """The checkpoints of one run in one folder. Every process makes the same calls in the same order."""

    def __init__(
        self, path: str, *, keep: int, uid: str, take_over: bool = False, note: Callable[[str], None] = print
    ) -> None:
        self._folder = CheckpointFolder(path)
        self._keep = keep
        self._uid = uid
        self._take_over = take_over
        self._note = note if jax.process_index() == 0 else _discard
        self._owner = Owner(self._folder.path, uid, renewed=self._look)
        self._nonce = ""
        self._arrays = Arrays(self._folder.path)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._committed: int | None = None
        # A committed step that somebody deleted: until it is reported, and for good.
        self._gone: int | None = None
        self._seen_gone: int | None = None

    def claim(self) -> None:
        """Take the folder and clear what a killed save left. Raises CheckpointError when another run owns it.

        Notes what is named like a step and is another's: it is left.
        """
        self._nonce, message, left = on_primary(lambda: retry(f"claiming {self._folder}", self._claim, OSError))
        if message:
            self._note(message)
        if left:
            self._note(
                f"{self._folder} holds folders named like steps that no run saved; they are ignored: {first_few(left)}"
            )

    def _claim(self) -> tuple[str, str, list[str]]:
        self._folder.path.mkdir(parents=True, exist_ok=True)
        message = self._owner.claim(self._take_over)
        return secrets.token_hex(4), message, self._folder.clear()

    def check_free(self, is_due: Callable[[int], bool]) -> None:
        """Raise CheckpointError when what is another's has the name of a step that `is_due` to be saved."""
        foreign = on_primary(lambda: self._folder.read(self._folder.foreign_steps))
        if due := [name for step, name in foreign if is_due(step)]:
            raise self._folder.in_the_way_error(due)

    def taken(self, step: int) -> str:
        """Return the name of what is another's where a step would be saved; "" where it can be. Every process asks."""
        return ", ".join(on_primary(lambda: self._folder.in_the_way(step)))

    def restore(
        self, abstract: Mapping[str, Any], changes: Callable[[Tree], str] = lambda meta: ""
    ) -> tuple[int, Tree, Tree] | None:
        """Return the newest undamaged step, its state and its meta; None in a new folder. See `Restore`."""
        found = Restore(self._folder, self._arrays, self._owner, self._uid, self._note, abstract, changes).newest()
        if found is not None:
            self._committed = found[0]
        return found

    def steps(self) -> list[int]:
        """Return the committed steps, oldest first. They have a manifest; only `restore` verifies their files."""
        return self._folder.committed()

    # --- saving ---------------------------------------------------------------------------------------------------

    def save(self, step: int, tree: Mapping[str, Any], meta: Mapping[str, Any], besides: Collection[int] = ()) -> None:
        """Start saving; return when the arrays are copied. A step that is committed already is not saved again.

        The steps `besides` stay when old ones are deleted.
        Waits for the save before. Raises StorageError or CheckpointError, of this save or of the one before.
        """
        self.wait()
        if step == self._committed:
            return
        # A ValueError here is of the arrays' making.
        with storage_errors(f"saving step {step} in {self._folder}", OSError):
            if jax.process_index() == 0:
                self._owner.check()
                self._look()
                if names := self._folder.in_the_way(step):
                    raise self._folder.in_the_way_error(names)
            self._arrays.save(self._folder.step(step), tree, meta)
        self._pending = self._background.submit(self._commit, step, frozenset(besides))

    def wait(self) -> None:
        """Return when the last save is committed and old steps are deleted. Raises StorageError or CheckpointError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def committed(self) -> int | None:
        """Return the newest step that is complete on storage, manifest included. Raises what failed in the background.

        Notes that it is gone again, where that is so.
        """
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
        """Return whether `step`, which was saved, is gone again, so that it can be saved anew. Every process asks."""
        self.wait()
        is_lost = step == self._committed and on_primary(lambda: self._folder.is_gone(step))
        if is_lost:
            self._committed = None
        return is_lost

    def close(self) -> None:
        """Wait for the last save, then release the folder. Raises what went wrong in the background."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._arrays.close()
            if jax.process_index() == 0:
                with storage_errors(f"giving {self._folder} up", OSError):
                    self._owner.release()

    def _look(self) -> None:
        """Look whether the newest committed step is still there, before a save, and in a thread every few seconds."""
        step = self._committed
        if step is None or step == self._seen_gone or not self._folder.is_gone(step):
            return
        # A step that is no longer the newest was rotated.
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
                    # A folder that was taken over fails in many ways: report that.
                    self._owner.check()
                raise
            if jax.process_index() == 0:
                files = self._collect_digests(step)
                self._owner.check()
                manifest.write(self._folder.step(step), Manifest(step, self._uid, files))
                self._committed = step
                self._rotate(besides)
            else:
                self._leave_digests(step)
                wait_for(lambda: manifest.read(self._folder.step(step)), f"the manifest of step {step}")
                self._committed = step

    def _leave_digests(self, step: int) -> None:
        """Write the digests of what this process wrote. The rest is process 0's: only it lists the whole folder."""
        folder = self._folder.step(step)
        own = epath.Path(STATE) / f"ocdbt.process_{jax.process_index()}"
        names = manifest.listing(folder / own) if (folder / own).exists() else []
        entries = manifest.digests(folder, [f"{own}/{name}" for name in names])
        path = self._folder.digests(self._nonce, step, jax.process_index())
        path.parent.mkdir(parents=True, exist_ok=True)
        manifest.replace(path, json.dumps(plain_entries(entries)).encode())

    def _collect_digests(self, step: int) -> dict[str, Entry]:
        """Return the digests of every file of the step: those that other processes left, and of all the rest."""
        folder = self._folder.step(step)
        posts = [self._folder.digests(self._nonce, step, process) for process in range(1, jax.process_count())]
        files = merge_entries([wait_for(lambda: _read_json(post), f"{post}") for post in posts])  # noqa: B023 (at once)
        names = manifest.listing(folder)
        lost = sorted(set(files) - set(names))
        if lost:
            raise StorageError(f"files of step {step} disappeared after they were written: {first_few(lost)}")
        files |= manifest.digests(folder, (name for name in names if name not in files))
        for post in posts:
            post.unlink()
        return files

    def _rotate(self, besides: Collection[int]) -> None:
        for step in self.steps()[: -self._keep]:
            if step not in besides and (left := own_steps.remove(self._folder.step(step))):
                self._note(f"step {step} was removed, except for files that no save wrote: {first_few(left)}")


def _read_json(path: epath.Path) -> dict[str, list[Any]] | None:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def _discard(text: str) -> None:
    """Discard a note: process 0 writes those of the gang."""
