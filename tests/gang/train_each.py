"""Train every block of a JSON file in one start of the processes: python train_each.py FILE FOLDER.

The losses of block NAME are in FOLDER/NAME/metrics.jsonl.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from pathlib import Path

from jaxlaunch import contract
from jaxlaunch.trainer.loop.driver import Loop
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.start import distributed
from jaxlaunch.trainer.start.process import read_spec
from jaxlaunch.trainer.step.state import TrainState
from jaxlaunch.trainer.train import BuiltInTraining


class UnsavedLoop(Loop[TrainState]):
    """A loop without saves, which would compile for a fifth of such a run's time."""

    def _save(self, done: int, state: TrainState) -> None:
        self._read_metrics()
        self.saved_step = done


def main(file: Path, folder: Path) -> None:
    stop = distributed.Stop()
    distributed.initialize()
    base_context = dataclasses.replace(RunContext.from_environ(), socket=None, profile=None)
    for name, block in json.loads(file.read_text()).items():
        spec, task = read_spec({contract.TRAIN_SPEC: json.dumps(block)})
        context = dataclasses.replace(base_context, run_dir=str(folder / name))
        report = Progress(None)
        UnsavedLoop(BuiltInTraining(spec, task, context, report), context, stop, report).run()
        gc.unfreeze()  # a run freezes what it finds, since its process ends with it
        gc.enable()
        gc.collect()
    distributed.shutdown()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
