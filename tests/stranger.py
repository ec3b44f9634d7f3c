"""A stranger's path, timed: `python -m tests.stranger` follows README and two tutorials in a fresh clone.

Nothing is taken from this checkout but its commits, and nothing from the user but how pip reaches an index (`PIP_…`):
HOME is empty, caches of packages included. Files and commands are those that the pages show. The table has the seconds
to the first line of a curve, to the end of the first run, and of each tutorial after it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import tutorials

ROOT = Path(__file__).parents[1]
TUTORIALS = {"your-script.md": "a script of one's own on two hosts", "your-model.md": "a model and data of one's own"}
CURVE = re.compile(r"\[0\] step \d+/\d+  loss ")


def follow(folder: Path, command: str, home: Path) -> float:
    """Runs a command there and shows its output; the seconds until its first line of a curve. Raises if it fails."""
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG") or key.startswith("PIP_")}
    clean = kept | {"HOME": str(home)}
    started, first = time.monotonic(), 0.0
    with subprocess.Popen(
        ["bash", "-euc", command], cwd=folder, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as program:
        assert program.stdout is not None
        for line in program.stdout:
            print(line, end="", file=sys.stderr)
            if not first and CURVE.search(line):
                first = time.monotonic() - started
    if program.returncode:
        raise SystemExit(f"{command!r} failed with exit code {program.returncode}")
    return first


def main() -> None:
    """Prints a row for each thing that the stranger did."""
    with tempfile.TemporaryDirectory() as folder:
        home, clone, began = Path(folder, "home"), Path(folder, "clone"), time.monotonic()
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        (quickstart,) = (step for step in tutorials.steps((clone / "README.md").read_text()) if "make run" in step.text)
        cloned = time.monotonic() - began
        first = follow(clone, quickstart.text, home)
        row("clone to the first line of a curve", cloned + first)
        row("clone to the end of that run", time.monotonic() - began)
        for page, what in TUTORIALS.items():
            began, work = time.monotonic(), Path(folder, page)
            work.mkdir()
            for step in tutorials.steps((clone / "docs" / page).read_text()):
                if step.file is not None:
                    (work / step.file).write_text(step.text)
                else:
                    follow(work, f". {clone}/.venv/bin/activate\n{step.text}", home)
            row(what, time.monotonic() - began)


def row(what: str, seconds: float) -> None:
    """Prints a row of the table."""
    print(f"| {what} | {seconds:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
