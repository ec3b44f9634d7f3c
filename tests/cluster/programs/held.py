"""Classify, whose training waits before its next batch while the file that HOLD names exists."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from jaxlaunch.trainer.tasks.classify import Classify


class Held(Classify):
    """Classify on a source that can be held; a process says in which pod it reads it."""

    def source(self, spec: Any, split: Any) -> Any:
        source = super().source(spec, split)
        print("reads on", socket.gethostname(), flush=True)
        return Source(source) if split == "train" else source


class Source:
    """The same examples, each when there is nothing to wait for."""

    def __init__(self, examples: Any) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        while os.path.exists(os.environ["HOLD"]):
            time.sleep(0.1)
        return self.examples[index]

    def fingerprint(self) -> str:
        return str(self.examples.fingerprint())
