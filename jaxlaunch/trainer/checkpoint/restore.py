"""The newest undamaged step of a folder, loaded by all processes together.

What fails verification is never trained on, never counted and never deleted: it is renamed once an older step was
restored. A step that Orbax finished and that was killed before its manifest was written cannot be verified: it is used
where no other can be, and else removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxlaunch.trainer.checkpoint import arrays, manifest, own_steps
from jaxlaunch.trainer.checkpoint.arrays import Arrays
from jaxlaunch.trainer.checkpoint.consensus import gather, on_primary
from jaxlaunch.trainer.checkpoint.folder import CheckpointFolder, first_few
from jaxlaunch.trainer.checkpoint.manifest import Damaged, Entry, Manifest
from jaxlaunch.trainer.checkpoint.owner import Owner
from jaxlaunch.trainer.checkpoint.storage import storage_error, storage_errors, system_message
from jaxlaunch.trainer.errors import CheckpointError, first_line

UNVERIFIED = "no manifest (killed while saving?), so its files cannot be verified"

Tree = dict[str, Any]
Loaded = tuple[Tree, Tree]  # state and meta


class Restore:
    """One restore of a state like `abstract`.

    `changes` tells of the meta of another model's step how that differs, in words; "" where it cannot.
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
        """Return the newest undamaged step, its state sharded as in `abstract`, and its meta; None in a new folder.

        Raises:
            CheckpointError: There are steps and none is usable, or the state is that of another model.
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
                # It is adopted when all others have been tried.
                attempts.append((step, self._adopt))
            elif isinstance(outcome, str):
                bad[step] = outcome
            else:
                unused = {**dict.fromkeys(unverified, UNVERIFIED), **bad}
                newer = {number: fault for number, fault in unused.items() if number > step}
                on_primary(lambda: self._set_aside(newer, step))  # noqa: B023 (called at once)
                return step, *outcome
        if bad:
            listed = "; ".join(f"step {step}: {fault}" for step, fault in bad.items())
            raise CheckpointError(
                f"no valid checkpoint in {self._folder}: {listed}. Restore one of these folders from a backup, or set "
                "checkpoint.path to a new folder to start from the first step; nothing was changed"
            )
        return None

    def _load_verified(self, step: int) -> Loaded | str | None:
        """Return state and meta of a step, or how it is damaged; None where it has no manifest to verify it."""
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
        """Return the manifest's text if there is one, a fault found without reading arrays, and files not listed."""
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
        """Load a step without a manifest, and write one. Return how it is damaged where it cannot be restored."""
        folder = self._folder.step(step)
        error, loaded = "", None
        try:
            self._arrays.probe(folder, jax.process_index(), jax.process_count())
            loaded = self._load(step)
        except CheckpointError:
            raise
        except Exception as raised:
            # Orbax has no type of its own for what it cannot read.
            if system_message(raised):
                raise storage_error(f"reading step {step} of {self._folder}", raised) from raised
            error = f"no manifest, and it cannot be restored: {first_line(raised)}"
        errors = [error for error in gather(error) if error]
        if errors or loaded is None:
            return errors[0]
        with storage_errors(f"digesting step {step} of {self._folder}"):
            names = on_primary(lambda: manifest.listing(folder))
            entries = manifest.digests(folder, names[jax.process_index() :: jax.process_count()])
        files = merge_entries(gather(plain_entries(entries)))

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
                left = own_steps.remove(self._folder.step(step))
                rest = f", except for files that no save wrote: {first_few(left)}" if left else ""
                self._note(f"step {step}: {fault}; using step {good} ({step} was removed{rest})")
            else:
                name = self._folder.set_aside(step)
                self._note(f"step {step}: {fault}; using step {good} ({step} is kept as {name})")


def plain_entries(files: Mapping[str, Entry]) -> dict[str, list[Any]]:
    """Return the entries of a manifest as JSON."""
    return {name: [entry.size, entry.sha256] for name, entry in files.items()}


def merge_entries(parts: list[dict[str, list[Any]]]) -> dict[str, Entry]:
    """Return the entries of several processes as one."""
    return {name: Entry(*entry) for part in parts for name, entry in part.items()}
