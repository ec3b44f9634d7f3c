"""A slow task that reads $TRAIN_FILE for each example and $EVAL_FILE for each held-out one."""

from __future__ import annotations

import os
import time
from typing import Any

from etils import epath

from jaxlaunch.trainer.tasks.classify import Classify

PAUSE_S = 0.02  # a step of four examples, read by one thread


class Files:
    """The examples of `source`, each after a read of the file."""

    def __init__(self, source: Any, path: str, pause_s: float) -> None:
        self._source, self._path, self._pause_s = source, epath.Path(path), pause_s

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._pause_s)
        self._path.read_bytes()
        return self._source[index]

    def fingerprint(self) -> str:
        return str(self._source.fingerprint())


class ReadsFiles(Classify):
    def source(self, spec: Any, split: Any) -> Any:
        path = os.environ[f"{split}_FILE".upper()]
        return Files(super().source(spec, split), path, PAUSE_S if split == "train" else 0.0)
