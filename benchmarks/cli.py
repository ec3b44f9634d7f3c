"""Start-up time of the launcher's commands, relative to that of the bare interpreter."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks.table import Row, emit_rows, format_ms, log_progress, median

ROUNDS = 15
JOB = """name: bench
image: registry.example/train:1
accelerator: {type: cpu, per_host: 8}
train:
  task: lm
  mesh: {dp: 4, mp: 2}
  checkpoint: {path: gs://bucket/bench}
"""


def measure_seconds(command: list[str]) -> float:
    """Return the wall time of `command`, which must succeed."""
    started_at = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started_at


def main() -> None:
    log_progress("cli: --help, validate and render")
    launcher = str(pathlib.Path(sys.executable).with_name("launcher"))
    with tempfile.TemporaryDirectory() as folder:
        job = pathlib.Path(folder, "job.yaml")
        job.write_text(JOB)
        commands = {
            "python -I -c pass": [sys.executable, "-I", "-c", "pass"],
            "launcher --help": [launcher, "--help"],
            "launcher validate": [launcher, "validate", str(job)],
            "launcher render": [launcher, "render", str(job)],
        }
        rounds = [
            {name: measure_seconds(command) for name, command in commands.items()}
            for _ in range(1 + ROUNDS)
        ]
    # The first round fills the disk's cache and is not counted.
    seconds = {name: [times[name] for times in rounds[1:]] for name in commands}
    baseline = median(seconds.pop("python -I -c pass"))
    bounds = {"launcher --help": 12.0, "launcher validate": 25.0, "launcher render": 35.0}
    emit_rows(
        [
            Row(
                f"{name} over python -I -c pass",
                median(times) / baseline,
                bounds[name],
                f"{format_ms(median(times))} over {format_ms(baseline)}; "
                f"medians of {ROUNDS}, interleaved",
            )
            for name, times in seconds.items()
        ]
    )


if __name__ == "__main__":
    main()
