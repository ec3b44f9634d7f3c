"""The Slurm job of a run, which its batch script records in the run folder."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Sequence

from jaxlaunch.records import codec
from jaxlaunch.runs import layout
from jaxlaunch.runs.run_folder import RunFolder

# The longest wait for squeue, which repeats its request if slurmctld does not answer.
TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True)
class SlurmJob:
    """The job that runs the newest start of a run under Slurm.

    Attributes:
        id: The number of the job.
        uid: The uid of the start.
        is_requeued: Whether the script asked Slurm to start the job again, and it has not started.
        folder: The working folder of `launcher render`.
        words: The arguments of `launcher render`.
    """

    id: str
    uid: str
    is_requeued: bool
    folder: str
    words: Sequence[str]

    def is_queued(self) -> bool:
        """Return whether Slurm will start the job again, as far as this machine can tell."""
        if not self.is_requeued:
            return False
        command = ["squeue", "--noheader", "--format=%T", f"--jobs={self.id}"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            # This machine may have no Slurm.
            return True
        if answer.returncode:
            return "Invalid job id" not in answer.stderr
        return bool(answer.stdout.strip())


def read_job(folder: RunFolder, uid: str | None) -> SlurmJob | None:
    """Return the Slurm job of start `uid`, or None if Slurm does not run this start."""
    try:
        job = codec.read_record(SlurmJob, folder.read_json(layout.SLURM))
    except ValueError:
        return None
    return job if job.uid == uid else None
