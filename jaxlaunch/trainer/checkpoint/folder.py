"""The folder of a run's checkpoints: which children are steps, and which of them another program made."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from etils import epath

from jaxlaunch.trainer.checkpoint import manifest, own_steps, saved_files
from jaxlaunch.trainer.checkpoint.manifest import STEP, is_remote
from jaxlaunch.trainer.checkpoint.owner import NAME as OWNER
from jaxlaunch.trainer.checkpoint.storage import retry
from jaxlaunch.trainer.errors import CheckpointError

# Where the processes leave their digests for process 0 to collect.
DIGESTS = "jaxlaunch.digests"
DIGESTS_FILE = re.compile(r"[0-9a-f]+\.[0-9]+\.[0-9]+\.json(\.[0-9a-f]{16}\.tmp)?")
# A step that failed verification.
ASIDE = re.compile(r"(0|[1-9][0-9]*)\.bad-[0-9]+")
MAX_LISTED = 3

T = TypeVar("T")


class CheckpointFolder:
    """The folder at `path`. Its methods read storage, and raise what storage raises unless they say otherwise."""

    def __init__(self, path: str) -> None:
        folder = epath.Path(path)
        self.path = folder if is_remote(folder) else folder.expanduser().absolute()

    def __str__(self) -> str:
        return str(self.path)

    def step(self, step: int) -> epath.Path:
        """Return the folder of a step."""
        return self.path / str(step)

    def digests(self, nonce: str, step: int, process: int) -> epath.Path:
        """Return the file of a process's digests; the nonce keeps those of an earlier attempt apart."""
        return self.path / DIGESTS / f"{nonce}.{step}.{process}.json"

    def read(self, act: Callable[[], T], step: int | None = None) -> T:
        """Return what `act` reads of the folder, or of a step, tried again while storage fails. Raises StorageError."""
        if step is None:
            return retry(f"reading {self.path}", act, OSError)
        return retry(f"reading step {step} of {self.path}", act)

    def clear(self) -> list[str]:
        """Remove what a killed save left. Return the children that are named like steps and that another made."""
        foreign = own_steps.clear(self.path)
        if (digests := self.path / DIGESTS).is_dir():
            for file in digests.iterdir():
                if DIGESTS_FILE.fullmatch(file.name):
                    file.unlink()
        return foreign

    def step_owners(self) -> dict[int, bool]:
        """Return for each child that is named like a step whether it is this product's, or an empty folder."""
        children = {int(child.name): child for child in self.path.iterdir() if STEP.fullmatch(child.name)}
        return {step: own_steps.is_own(child) or _is_empty(child) for step, child in children.items()}

    def foreign_steps(self) -> list[tuple[int, str]]:
        """Return steps whose place another has, and its name: also that of an unfinished save without our mark."""
        foreign = [(step, f"{step}") for step, is_own in self.step_owners().items() if not is_own]
        if not is_remote(self.path):
            names = [child.name for child in self.path.iterdir() if own_steps.UNFINISHED.fullmatch(child.name)]
            making = [name for name in names if name.endswith(own_steps.MAKING)]
            foreign += [(int(name.removesuffix(own_steps.MAKING)), name) for name in making]
        return sorted(foreign)

    def in_the_way(self, step: int) -> list[str]:
        """Return the names of what is in the place of a step that is to be saved."""
        unfinished = self.path / f"{step}{own_steps.MAKING}"
        if unfinished.exists() and own_steps.is_begun(unfinished):
            # It is of a save of this process that failed.
            own_steps.remove(unfinished)
        places = [self.step(step)] if is_remote(self.path) else [self.step(step), unfinished]
        return [path.name for path in places if path.exists()]

    def in_the_way_error(self, names: list[str]) -> CheckpointError:
        """Return the error for names in the place of steps."""
        return CheckpointError(
            f"{self.path} holds {first_few(names)}, which no run saved, in the place of checkpoints that this run is "
            "to save; move that elsewhere, or set checkpoint.path to a folder of this run's own"
        )

    def survey(self) -> tuple[list[int], list[str]]:
        """Return the steps in the folder, damaged ones included, and the names of files that are not checkpoints."""
        steps, foreign = [], []
        for child in sorted(self.path.iterdir()):
            if STEP.fullmatch(child.name):
                if not child.is_dir() or own_steps.is_step(child) or _is_empty(child):
                    steps.append(int(child.name))
            elif not (
                child.name.startswith((".", OWNER, DIGESTS, saved_files.INPUTS, saved_files.TOKENIZER))
                or ASIDE.fullmatch(child.name)
                or own_steps.UNFINISHED.fullmatch(child.name)
            ):
                foreign.append(f"{child.name}/" if child.is_dir() else child.name)
        return steps, foreign

    def committed(self) -> list[int]:
        """Return the committed steps, oldest first. They have a manifest; their files are not verified."""
        return manifest.committed(self.path)

    def is_gone(self, step: int) -> bool:
        """Return whether a step that was committed has no manifest any more; False while storage is away."""
        try:
            return not (self.step(step) / manifest.NAME).exists()
        except Exception:
            # A save reports that storage is away.
            return False

    def set_aside(self, step: int) -> str:
        """Rename a damaged step; return its new name."""
        aside: epath.Path = next(path for n in range(1, 1000) if not (path := self.path / f"{step}.bad-{n}").exists())
        own_steps.move(self.step(step), aside)
        return str(aside.name)


def first_few(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def _is_empty(folder: epath.Path) -> bool:
    return folder.is_dir() and next(folder.iterdir(), None) is None
