"""Packs the images or the table of a job for `launcher prepare`: `python -m jaxlaunch.trainer.prepare.pack JSON`.

TRAIN_SPEC in, one JSON object on stdout: what was packed, and the data block that reads it. Exits with a code of the
contract; SIGINT and SIGTERM end it with 80, and the next resumes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.prepare import packing
from jaxlaunch.trainer.spec import Images, Table, TrainSpec
from jaxlaunch.trainer.start.process import print_result, read_spec
from jaxlaunch.trainer.text import build


def main() -> int:
    """Packs the data of TRAIN_SPEC as the argument says and prints a report as JSON; returns the exit code."""
    build.die_with(os.getppid())
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: stopped.append(signum))
    asked: dict[str, Any] = json.loads(sys.argv[1])

    def find() -> dict[str, Any]:
        """The report."""
        spec = read_spec(os.environ)[0]
        found = packing.packed(spec, Path(asked["to"]), asked["resize"], lambda: bool(stopped))
        return {**found, "data": _block(spec, Path(asked["to"]), found["files"])}

    return print_result(find)


def _block(spec: TrainSpec, folder: Path, files: dict[str, Any]) -> dict[str, Any]:
    """The data block that reads the folder."""
    if not isinstance(spec.data, Images | Table):
        raise SpecError(f"train.data.source = {spec.data.source} is not packed; images and table are")
    splits = {about["split"] for about in files.values()}
    block = {"source": "array_record", "path": f"{folder}/train-*.array_record"}
    if "eval" in splits:
        block["eval_path"] = f"{folder}/eval-*.array_record"
    given = spec.data.model_dump(mode="json", exclude_unset=True)
    return block | {key: given[key] for key in ("size", "augment") if key in given}


if __name__ == "__main__":
    sys.exit(main())
