"""The rows of a prepared corpus as a source; prepares them first where that has not been done.

L length. A row is filled up with zeros, which are a segment of their own, 0, and are no targets.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxlaunch import isolated
from jaxlaunch.trainer.data.source import DataSource
from jaxlaunch.trainer.errors import DataError, SpecError, Stopped, StorageError, TrainerError
from jaxlaunch.trainer.sources.array_record import Records
from jaxlaunch.trainer.spec import Text
from jaxlaunch.trainer.text import build, recipe, shards
from jaxlaunch.trainer.text.recipe import INDEX, Recipe

KINDS: dict[int, type[TrainerError]] = {kind.code: kind for kind in (SpecError, DataError, StorageError, Stopped)}
POLL_S = 0.2
Asked = Callable[[], bool]


def source(data: Text, length: int, split: Literal["train", "eval"]) -> Packed | None:
    """The rows of a split, prepared first if need be; None where nothing is held out."""
    if split == "eval" and data.eval_path is not None:
        return Packed(prepared(data, recipe.of(data, length, held_out=True)), "train")
    made = recipe.of(data, length)
    return Packed(prepared(data, made), split) if split == "train" or made.eval_split else None


def prepared(data: Text, made: Recipe, *, whole: bool = False, is_stopped: Asked = lambda: False) -> Path:
    """The folder of a recipe, complete; with `whole` verified to the byte.

    Raises what `build` raises, and Stopped once `is_stopped`, which is asked from time to time.
    """
    folder = Path(recipe.root(data)).absolute() / made.address
    if not (folder / INDEX).exists():
        _build(made, folder, is_stopped)
    elif (folder / build.MAKING).exists():  # of a process that was killed at the very end
        build.tidy(folder)
    build.check(folder, whole=whole)
    return folder


def _build(made: Recipe, folder: Path, is_stopped: Asked = lambda: False) -> None:
    """In a process of its own: this one holds jax, of which a worker needs nothing."""
    print(f"preparing text: {made.tokenizer}, packing {made.packing}, in {folder}", file=sys.stderr, flush=True)
    command = isolated.command("jaxlaunch.trainer.text.build", str(folder), str(os.getpid()))
    pipe = subprocess.PIPE
    told: str | None = made.to_json()
    said: str | None = None
    with subprocess.Popen(command, env=isolated.inherited(os.environ), stdin=pipe, stdout=pipe, text=True) as child:
        while said is None:
            try:
                said, _ = child.communicate(told, POLL_S)
            except subprocess.TimeoutExpired:
                told = None  # it goes on being written
                if is_stopped():
                    child.terminate()
    code = child.returncode
    if code and is_stopped():
        raise Stopped(build.STOPPED.format(folder))
    if code in KINDS and said:
        raise KINDS[code](json.loads(said.splitlines()[-1])["message"])
    if code < 0:
        raise StorageError(
            f"preparing the text in {folder} was killed ({signal.Signals(-code).name}), as the system does where "
            "memory is short: give it more, or fewer cores; what is complete is kept, and the next start resumes"
        )
    if code:
        raise RuntimeError(f"jaxlaunch.trainer.text.build ended with {code}; its output is above")


class Packed(DataSource):
    """Rows: `tokens` int32 [L + 1], `segments` int32 [L + 1], `mask` float32 [L], `text_bytes` float32."""

    is_light = True  # a row takes a fifth of a millisecond, most of it Python: one thread reads twice as fast as four

    def __init__(self, folder: Path, split: str) -> None:
        index = build.read(folder)
        self._digest = shards.digest(folder / INDEX)[:12]
        self.name = f"text {folder.name} {split}"
        self._length, self._address, self._split = index["length"], index["address"], split
        self._tokenizer = index["tokenizer"]
        names = [name for name, about in sorted(index["files"].items()) if about["split"] == split and about["rows"]]
        if not names:
            raise DataError(
                f"the {split} split of {folder} has no rows: data.eval_split of {index['documents']} documents leaves "
                "it none; change data.eval_split, or name data.eval_path"
            )
        self._records = Records([str(folder / name) for name in names])

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return laid_out(self._records[index], self._length)

    def fingerprint(self) -> str:
        """Split, rows and length, the address, a digest of files, tokenizer and packing, and that of the rows."""
        said = f"text {self._split}, {len(self)} rows of {self._length}, tokenizer {self._tokenizer}"
        return f"{said}, prepared as {self._address}, sha256 {self._digest}"


def laid_out(row: Mapping[str, Any], length: int) -> dict[str, Any]:
    """A row as it is read, as an example of this length, with the keys of `Packed`."""
    count = len(row["tokens"])
    tokens_T, segments_T = np.zeros(length + 1, np.int32), np.zeros(length + 1, np.int32)
    tokens_T[:count] = row["tokens"]
    segments_T[:count] = np.repeat(np.arange(1, len(row["lengths"]) + 1), row["lengths"])
    is_target_L = (segments_T[1:] == segments_T[:-1]) & (segments_T[1:] > 0)
    if "targets" in row:  # of chats, the assistant's
        is_target_L[: count - 1] &= row["targets"][1:].astype(np.bool_)
    return {
        "tokens": tokens_T,
        "segments": segments_T,
        "mask": is_target_L.astype(np.float32),
        "text_bytes": np.float32(row["bytes"]),
    }
