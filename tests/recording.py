"""Record what README shows: `python -m tests.recording FOLDER` trains, and writes docs/pictures.

Three hosts on this machine train a language model for ten minutes or more, in FOLDER. Rank 2 is
killed (SIGKILL) twice. The pictures are the page of the run as `launcher report` writes it, from
its top to the table of causes, with logarithmic values. A second command with the same FOLDER takes
the pictures of the same run again.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from jaxlaunch import contract
from jaxlaunch.launcher.agent.host import process_tree
from tests.launcher.report import browser

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
HOSTS, KILLED_RANK = 3, 2
# A rank is killed at these steps, between two checkpoints.
KILL_STEPS = (110, 1310)
JOB = (
    f"hosts={HOSTS}",
    "accelerator.per_host=1",
    f"train.mesh={{dp: {HOSTS}}}",
    "train.precision=fp32",
    "train.remat=none",
    "train.accumulate=1",
    "train.batch=48",
    "train.steps=2400",
    "train.eval.every=400",
    "train.checkpoint.every=100",
)
LAUNCHER = Path(sys.prefix) / "bin" / "launcher"


def record_run(folder: Path) -> None:
    """Run the job in `folder`, and kill a rank at each of the steps."""
    command = [LAUNCHER, "run", ROOT / "examples" / "lm.yaml", *JOB]
    kill_steps = list(KILL_STEPS)
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            print(line, end="", flush=True)
            match = re.match(r"\[0\] step (\d+)/", line)
            if match and kill_steps and int(match[1]) >= kill_steps[0]:
                del kill_steps[0]
                os.kill(_find_rank(launcher.pid), signal.SIGKILL)
    assert launcher.returncode == 0, launcher.returncode


def _find_rank(launcher: int) -> int:
    """Return the process of the rank to kill, a child of one of the launcher's agents."""
    agents = process_tree.find_children(launcher)
    processes = [pid for agent in agents for pid in process_tree.find_children(agent)]
    marker = f"{contract.PROCESS_ID}={KILLED_RANK}"
    return next(pid for pid in processes if process_tree.has_variable(pid, marker))


def take_pictures(url: str, page: browser.Page) -> None:
    """Write a run's page as README and docs/seeing-runs.md show it: light, dark, 400 px wide."""
    labels = "[...document.querySelectorAll('label')]"
    box = f"{labels}.find((label) => label.textContent === ' Logarithmic values').firstChild"
    for name, width, is_dark in (
        ("run", 1180, False),
        ("run-dark", 1180, True),
        ("run-narrow", 400, False),
    ):
        page.open(url, width, is_dark)
        page.value(f"{box}.click()")
        end = page.value("document.getElementById('the-causes').getBoundingClientRect().top")
        (PICTURES / f"{name}.png").write_bytes(page.picture(width, most=int(end)))


def main(folder: Path) -> None:
    """Train once, and write all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "runs" / "lm").exists():
        record_run(folder)
    subprocess.run([LAUNCHER, "report", "lm"], cwd=folder, check=True)
    with browser.page() as page:
        take_pictures((folder / "lm.html").as_uri(), page)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
