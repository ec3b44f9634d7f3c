"""Names of the files in a run folder, relative to it.

The program that reads the folder in a pod (launcher/jobs/status/read_run.py) imports nothing of ours and repeats those
that it needs. Its tests write folders by this package.
"""

from __future__ import annotations

from pathlib import Path

# State of the run, written by the leader: records/summary.py.
SUMMARY = "summary.json"
# One line for each attempt that ended: records/attempt.py.
ATTEMPTS = "attempts.jsonl"
# Where the agent of each host answers.
AGENTS = "agents.json"
# The job as it was resolved, of the run and in the folder of each start.
JOB = "job.yaml"
# Held by the launcher and by its agents while they run in the folder.
LOCK = ".lock"
# One folder for each start, named by its number, with its summary, its job and its logs.
STARTS = "starts"
LOGS = "logs"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
EVALS = "eval.jsonl"
SAMPLES = "samples.jsonl"
# jaxlaunch/reporting.py, which works in images without this package, names its own folder "reported".
TENSORBOARD = "tensorboard"
# In the folder of a sweep, whose runs are folders in it.
SWEEP = "sweep.jsonl"


def start_file(number: int, name: str) -> str:
    """Return the path of a file that belongs to one start of the run."""
    return f"{STARTS}/{number}/{name}"


def start_folder(run: Path, number: int) -> Path:
    """Return the folder of a start. A later start of the same run has another one."""
    return run / STARTS / str(number)


def log_path(start: Path, rank: int) -> Path:
    """Return the log of a rank in the folder of a start; older lines are in the same name with .1 at its end."""
    return start / LOGS / f"rank-{rank}.log"
