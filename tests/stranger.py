"""A stranger's path, timed: `python -m tests.stranger` follows README and two tutorials in a fresh clone.

Nothing is taken from this checkout but its commits; files and commands are those that the pages show. Printed are the
seconds to the first line of a curve, to the end of the first run, and of each tutorial after it.
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


def follow(folder: Path, command: str) -> float:
    """Runs a command there and shows its output; the seconds until its first line of a curve. Raises if it fails."""
    clean = {key: os.environ[key] for key in ("HOME", "PATH", "LANG") if key in os.environ}
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
    """Prints a line for each thing that the stranger did."""
    with tempfile.TemporaryDirectory() as home:
        clone, work, began = Path(home, "clone"), Path(home, "work"), time.monotonic()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        (quickstart,) = (step for step in tutorials.steps((clone / "README.md").read_text()) if "make run" in step.text)
        cloned = time.monotonic() - began
        first = follow(clone, quickstart.text)
        print(f"clone to the first curve: {cloned + first:.0f} s, to its end: {time.monotonic() - began:.0f} s")
        for page, what in TUTORIALS.items():
            began, folder = time.monotonic(), work / page
            folder.mkdir(parents=True)
            for step in tutorials.steps((clone / "docs" / page).read_text()):
                if step.file is not None:
                    (folder / step.file).write_text(step.text)
                else:
                    follow(folder, f". {clone}/.venv/bin/activate\n{step.text}")
            print(f"{what}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
