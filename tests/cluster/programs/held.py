"""Classify, whose training waits before its next batch while the file HOLD exists."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from jaxlaunch.trainer.tasks.classify import Classify


class HeldClassify(Classify):
    """Classify on a source that can be held; each process prints the pod in which it reads."""

    def source(self, spec: Any, split: Any) -> Any:
        source = super().source(spec, split)
        print("reads on", socket.gethostname(), flush=True)
        return Source(source) if split == "train" else source


class Source:
    """The same examples, each after a possible wait."""

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
