"""Jobs in folders of files whose names something else has too: `python -m tests.collisions [NAME ...]` prints a table.

Each name has a folder of its own there, and each way to run a job a run. The suite runs all names
in one folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.compiled import QUICK_COMPILES

MODULES = """
    trainer launcher jaxlaunch agent contract isolated task plugin
    random queue types logging typing io json signal platform select socket subprocess threading inspect functools re
    enum dataclasses collections contextlib traceback copy tokenize os sys time math site code string struct tempfile
    pathlib abc warnings ast linecache runpy importlib zipfile hashlib uuid email http asyncio concurrent
    sitecustomize usercustomize
    numpy jax jaxlib flax optax grain yaml click pydantic kubernetes etils absl safetensors
    """.split()
PACKAGES = (
    "trainer launcher jaxlaunch jax flax optax grain pydantic numpy tests utils models data".split()
)
# Names that no installed package has: a task of the user's imports their files.
OWN = "agent contract data isolated launcher models plugin task trainer utils".split()
STEPS = 3
BUILT_IN = {
    "task": "classify",
    "data": {"source": "tfds", "name": "digits"},
    "model": {"kind": "mlp", "layers": 1, "width": 8},
    "steps": STEPS,
    "batch": 64,
}
TASK = """
import sys
from jaxlaunch.trainer.tasks.classify import Classify

for name in {names!r}:
    exec(f"import {{name}} as module")
    print("SAW", name, getattr(module, "WHOSE", "the library's"), flush=True)

class Mine(Classify):
    pass
"""
PROGRAM = """
for name in {names!r}:
    try:
        print("SAW", name, getattr(__import__(name), "WHOSE", "the library's"))
    except BaseException as error:
        print("SAW", name, type(error).__name__)
"""
WAYS = ("command", "train", "train with own task", "train with workdir", "train with code")


def make(folder: Path, modules: Iterable[str] = (), packages: Iterable[str] = ()) -> Path:
    """A folder with a file, or a package, of each name, a program and a task that import them all."""
    folder.mkdir(parents=True)
    names = imported({*modules, *packages})
    for name in modules:
        (folder / f"{name}.py").write_text("WHOSE = 'mine'\n")
    for name in packages:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("WHOSE = 'mine'\n")
    (folder / "program_of_mine.py").write_text(PROGRAM.format(names=names))
    (folder / "task_of_mine.py").write_text(TASK.format(names=own(names)))
    return folder


def make_all(folder: Path) -> Path:
    """A folder with every one of the names, as a package where it may be either."""
    # Both forms of a name are not possible.
    packages = set(PACKAGES) - {"jax", "jaxlaunch", "pydantic"}
    return make(folder, set(MODULES) - packages, packages)


def imported(names: Iterable[str]) -> list[str]:
    """Those that the program imports: the others are run before it, or not."""
    return sorted(set(names) - {"sitecustomize", "usercustomize"})


def own(names: Iterable[str]) -> list[str]:
    """Return the names that a task imports, and whose files are the user's."""
    return sorted(set(names) & set(OWN))


def job(way: str, folder: Path) -> dict[str, Any]:
    """The job of a way to run; its file is beside the folder, its working folder `cwd`."""
    base: dict[str, Any] = {"name": way.replace(" ", "-"), "accelerator": {"type": "cpu"}}
    if way.startswith("command"):
        base["command"] = ["python", str(folder / "program_of_mine.py")]
    else:
        task = (
            {"task": "task_of_mine:Mine"} if way != "train" and way != "train with workdir" else {}
        )
        base["train"] = BUILT_IN | task
    if way.endswith("with code"):
        base["code"] = folder.name
    if way.endswith("with workdir"):
        base["workdir"] = folder.name
    return base


def run(
    way: str, folder: Path, document: Mapping[str, Any] | None = None
) -> subprocess.CompletedProcess[str]:
    """The run of a job, started in the folder itself, or beside it where the job says which folder it is."""
    beside = way.endswith(("with workdir", "with code"))
    file = folder.parent / f"{way.replace(' ', '-')}.yaml"
    file.write_text(yaml.safe_dump(dict(document or job(way, folder))))
    return launcher(
        folder.parent if beside else folder, "run", str(file), "--run-dir", f"{file}.run"
    )


def launcher(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed command, in a folder."""
    command = [str(Path(sys.executable).parent / "launcher"), *arguments]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env={**environ, **QUICK_COMPILES}, capture_output=True, text=True
    )


def seen(text: str) -> list[str]:
    """What the program or the task said of what it got by each name."""
    return [line.partition("SAW ")[2] for line in text.splitlines() if "SAW " in line]


def without_us(folder: Path) -> tuple[bool, list[str]]:
    """Whether the program that `python` alone runs succeeds, and what it says."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(folder / "program_of_mine.py")]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True)
    return ended.returncode == 0, seen(ended.stdout)


def fault(way: str, folder: Path, names: Iterable[str]) -> str | None:
    """What is wrong with a run of the folder; None where it did what it should."""
    ended = run(way, folder)
    said = seen(ended.stdout + ended.stderr)
    if way.startswith("command"):
        right = (ended.returncode == 0, said) == without_us(folder)
    else:
        has_own_task = "own task" in way or way.endswith("with code")
        wanted = [f"{name} mine" for name in own(names)] if has_own_task else []
        right = ended.returncode == 0 and f"step {STEPS}/{STEPS}" in ended.stdout and said == wanted
    if right:
        return None
    return f"exit {ended.returncode}, saw {said}\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}"


def main(names: list[str]) -> int:
    """Prints a row for each name; returns how many runs went wrong."""
    wrong = 0
    every = [
        (name, kind)
        for kind, named in (("module", MODULES), ("package", PACKAGES))
        for name in named
    ]
    for name, kind in every:
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = make(Path(place) / "proj", **{f"{kind}s": [name]})
            found = {way: fault(way, folder, [name]) for way in WAYS}
        row = ["ok" if said is None else "WRONG" for said in found.values()]
        print(f"{name}{'/' if kind == 'package' else '.py'}", *row, sep=" | ", flush=True)
        for way, said in found.items():
            if said:
                wrong += 1
                print(f"  {way}: {said}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
