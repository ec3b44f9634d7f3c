"""Modules that a job names (`module:Name`) and that are neither beside it nor installed here. Imports none of them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxlaunch.launcher.job.schema import JobSpec

_NAMED = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_][\w.]*")


def notes(job: JobSpec, folder: Path) -> Iterator[str]:
    """A sentence for each key under `train` whose module cannot be found: an image may have it, so it is no error."""
    if job.train is None:
        return
    for path, module in _named(job.train.model_dump(mode="json", exclude_unset=True), "train"):
        if not _is_found(module, folder):
            yield f"{path}: no module {module} is in {folder} or installed here; a run needs it there or in its image"


def _named(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _named(below, f"{path}.{key}")
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _named(below, f"{path}[{index}]")
    elif isinstance(value, str) and (found := _NAMED.fullmatch(value)) is not None:
        yield path, found[1]


def _is_found(module: str, folder: Path) -> bool:
    """Whether there is such a file or package; of an installed one the first name alone, since the rest imports it."""
    beside = folder.joinpath(*module.split("."))
    if beside.is_dir() or beside.with_name(f"{beside.name}.py").is_file():
        return True
    first = module.partition(".")[0]
    is_ours = (folder / first).is_dir() or (folder / f"{first}.py").is_file()
    return not is_ours and importlib.util.find_spec(first) is not None
