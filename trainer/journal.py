"""What a run leaves in its folder for people: JSON lines, and TensorBoard events where tensorboardX is installed.

Each step stands in a file once, whatever happened in between: a run that resumes at step r drops the lines behind it.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.progress import finite


class Journal:
    """A file of JSON lines, one object a line, each with its `step`. Raises OSError like any file."""

    def __init__(self, path: str, start: int) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        kept = {step: line for step, line in _lines(path) if step <= start}
        if os.path.exists(path):
            with open(f"{path}.tmp", "w") as rewritten:
                rewritten.writelines(kept.values())
            os.replace(f"{path}.tmp", path)
        self._last = max(kept, default=-1)
        self._file = open(path, "a")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line, on its way to the disk when this returns. A step that is there already is not written again."""
        if step > self._last:
            self._last = step
            self._file.write(json.dumps({"step": step, **finite(values)}) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """The lines of `path` with their steps; one that a kill or a bad disk left unreadable is dropped."""
    if not os.path.exists(path):
        return
    with open(path, errors="replace") as file:
        for line in file:
            try:
                step = json.loads(line)["step"]
            except (ValueError, TypeError, KeyError):
                continue
            if isinstance(step, int) and line.endswith("\n"):
                yield step, line


class TensorBoard:
    """Scalars as TensorBoard events."""

    def __init__(self, folder: str, start: int) -> None:
        import tensorboardX

        self._writer = tensorboardX.SummaryWriter(folder, purge_step=start + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def tensorboard_installed() -> bool:
    """Whether the extra `tensorboard` is: installing it is asking for it."""
    return importlib.util.find_spec("tensorboardX") is not None
