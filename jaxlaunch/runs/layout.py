"""Names of the files of a run folder."""

from __future__ import annotations

from pathlib import Path


def start_folder(run: Path, number: int) -> Path:
    """The folder of a start of the run, which is its own: a later start of the same run has another number."""
    return run / "starts" / str(number)


def log_path(folder: Path, rank: int) -> Path:
    """The file of a rank's lines in all attempts of a start, in its folder; older lines are in the same name with .1 at
    its end."""
    return folder / "logs" / f"rank-{rank}.log"
