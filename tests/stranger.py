"""A stranger's path, timed: `python -m tests.stranger` follows README and two tutorials in a fresh clone.

`python -m tests.stranger --wheel` has no clone: with each Python of PYTHONS that is here, it installs the wheel into an
environment in an empty folder, follows the pages of WHEEL there, compares what their commands print with what the pages
show, and reads what a missing extra says: without [train], and without [text].

Nothing is taken from this checkout but its commits or the wheel, and nothing from the user but how pip reaches an index
(`PIP_…`): HOME is empty, caches of packages included. Files and commands are those that the pages show. The table has
the seconds to the first line of a curve, to the end of the first run, and of each tutorial after it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import tutorials

ROOT = Path(__file__).parents[1]
TUTORIALS = {"your-script.md": "a script of your own on two hosts", "your-model.md": "a model and data of your own"}
WHEEL = ("quickstart.md", "your-script.md", "your-model.md", "fine-tune.md")
PYTHONS = ("python3.11", "python3.12")
CLONED = re.compile(r"^\s*(make |\. \.venv|.*\bexamples/)", re.MULTILINE)  # what a page has its reader do in a clone
CURVE = re.compile(r"\[0\] step \d+/\d+  loss ")
FIRST = """launcher --version
launcher init first
launcher validate first.yaml
launcher plan first.yaml
launcher run first.yaml train.epochs=2
launcher help quickstart
"""
WITHOUT_TEXT = """
echo '{}' > tokenizer.json
printf '{"text": "%s"}\n' one two three four > rows.jsonl
cat > text.yaml <<END
name: text
accelerator: {type: cpu, per_host: 1}
train:
  task: lm
  model: {kind: decoder, layers: 1, width: 32, heads: 2, vocab: 256, length: 32}
  data: {source: text, path: rows.jsonl, field: text, eval_split: 0, tokenizer: .}
  steps: 1
  optimizer: {lr: 0.1}
END
! launcher run text.yaml
"""


def follow(folder: Path, command: str, home: Path, output: str = "") -> float:
    """Runs a command there and shows its output; the seconds until its first line of a curve.

    Raises if it fails, or does not print the lines of `output`.
    """
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG") or key.startswith("PIP_")}
    clean = kept | {"HOME": str(home)}
    started, first, printed = time.monotonic(), 0.0, []
    with subprocess.Popen(
        ["bash", "-euc", command], cwd=folder, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as program:
        assert program.stdout is not None
        for line in program.stdout:
            print(line, end="", file=sys.stderr)
            printed.append(line)
            if not first and CURVE.search(line):
                first = time.monotonic() - started
    if program.returncode:
        raise SystemExit(f"{command!r} failed with exit code {program.returncode}")
    if lacking := list(tutorials.missing(output, "".join(printed))):
        raise SystemExit(f"{command!r} did not print {lacking}")
    return first


def cloned() -> None:
    """Prints a row for each thing that the stranger did in a clone."""
    with tempfile.TemporaryDirectory() as folder:
        home, clone, began = Path(folder, "home"), Path(folder, "clone"), time.monotonic()
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        (quickstart,) = (step for step in tutorials.steps((clone / "README.md").read_text()) if "make run" in step.text)
        fetched = time.monotonic() - began
        first = follow(clone, quickstart.text, home)
        row("clone to the first line of a curve", fetched + first)
        row("clone to the end of that run", time.monotonic() - began)
        for page, what in TUTORIALS.items():
            began, work = time.monotonic(), Path(folder, page)
            work.mkdir()
            do(clone / "docs" / page, work, home, f". {clone}/.venv/bin/activate\n")
            row(what, time.monotonic() - began)


def do(page: Path, work: Path, home: Path, before: str) -> None:
    """Saves each file that a page shows in `work`, and runs each command after `before`; not what needs a clone."""
    for step in tutorials.steps(page.read_text()):
        if step.file is not None:
            (work / step.file).write_text(step.text)
        elif not CLONED.search(step.text):
            follow(work, f"{before}{step.text}", home, step.output)


def installed(python: str) -> None:
    """Prints a row for each thing that the stranger did with the wheel and this Python."""
    with tempfile.TemporaryDirectory() as folder:
        home, work = Path(folder, "home"), Path(folder, "work")
        home.mkdir(), work.mkdir()
        wheel = built(Path(folder, "dist"))
        activate = ". ../env/bin/activate\n"
        began = time.monotonic()
        follow(work, f"{python} -m venv ../env\n{activate}pip install --quiet '{wheel}'", home)
        missing(work, home, f"{activate}launcher init first; ! launcher run first.yaml", "[train] @ ")
        (work / "first.yaml").unlink()
        row(f"{python}: the bare wheel names [train]", time.monotonic() - began)
        began = time.monotonic()
        follow(work, f"{activate}pip install --quiet '{wheel}[train,cpu]'", home)
        row(f"{python}: pip install", time.monotonic() - began)
        began = time.monotonic()
        first = follow(work, activate + FIRST, home)
        row(f"{python}: launcher init to the first line of a curve", first)
        row(f"{python}: launcher init to the end of that run", time.monotonic() - began)
        for page in WHEEL:
            began, there = time.monotonic(), work / page
            there.mkdir()
            do(ROOT / "docs" / page, there, home, ". ../../env/bin/activate\n")
            row(f"{python}: {page}", time.monotonic() - began)
        missing(work, home, activate + WITHOUT_TEXT, "[text] @ ")


def built(dist: Path) -> Path:
    """The wheel of the newest commit."""
    clone = dist.parent / "source"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", dist]
    subprocess.run([*build, clone], check=True)
    shutil.rmtree(clone)
    return next(dist.glob("*.whl"))


def missing(work: Path, home: Path, command: str, named: str) -> None:
    """Raises unless a command, which lacks an extra, says in one sentence what installs it, without a traceback."""
    said = work / "said.txt"
    follow(work, f"{{ {command}\n}} 2>&1 | tee {said}", home)
    text = said.read_text()
    if named not in text or "Traceback" in text:
        raise SystemExit(f"a missing extra is not told by a command with {named!r}: {text}")


def runs(python: str) -> bool:
    """Whether it is here; pyenv has a script by the name of every Python, which fails for those that are not chosen."""
    return bool(shutil.which(python)) and not subprocess.run([python, "--version"], capture_output=True).returncode


def row(what: str, seconds: float) -> None:
    """Prints a row of the table."""
    print(f"| {what} | {seconds:.0f} s |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", action="store_true", help="install the wheel, without a clone")
    parser.add_argument("--python", action="append", help="with this Python alone")
    given = parser.parse_args()
    if given.wheel:
        for each in given.python or PYTHONS:
            installed(each) if runs(each) else print(f"{each} is not here: nothing is shown with it", file=sys.stderr)
    else:
        cloned()
