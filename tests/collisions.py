"""Jobs in folders of files with colliding names: `python -m tests.collisions [NAME ...]`.

It prints a table in which each name has its own folder and each mode a run. The suite runs all
names in one folder.
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

MODULES = [
    "trainer",
    "launcher",
    "jaxlaunch",
    "agent",
    "contract",
    "isolated",
    "task",
    "plugin",
    "random",
    "queue",
    "types",
    "logging",
    "typing",
    "io",
    "json",
    "signal",
    "platform",
    "select",
    "socket",
    "subprocess",
    "threading",
    "inspect",
    "functools",
    "re",
    "enum",
    "dataclasses",
    "collections",
    "contextlib",
    "traceback",
    "copy",
    "tokenize",
    "os",
    "sys",
    "time",
    "math",
    "site",
    "code",
    "string",
    "struct",
    "tempfile",
    "pathlib",
    "abc",
    "warnings",
    "ast",
    "linecache",
    "runpy",
    "importlib",
    "zipfile",
    "hashlib",
    "uuid",
    "email",
    "http",
    "asyncio",
    "concurrent",
    "sitecustomize",
    "usercustomize",
    "numpy",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "grain",
    "yaml",
    "click",
    "pydantic",
    "kubernetes",
    "etils",
    "absl",
    "safetensors",
]
PACKAGES = [
    "trainer",
    "launcher",
    "jaxlaunch",
    "jax",
    "flax",
    "optax",
    "grain",
    "pydantic",
    "numpy",
    "tests",
    "utils",
    "models",
    "data",
]
# Names that no installed package has: a task of the user's imports their files.
USERS_OWN = [
    "agent",
    "contract",
    "data",
    "isolated",
    "launcher",
    "models",
    "plugin",
    "task",
    "trainer",
    "utils",
]
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
MODES = ("command", "train", "train with own task", "train with workdir", "train with code")


def make_folder(folder: Path, modules: Iterable[str] = (), packages: Iterable[str] = ()) -> Path:
    """Write a file or package of each name, and a program and a task that import them all."""
    folder.mkdir(parents=True)
    names = imported_names({*modules, *packages})
    for name in modules:
        (folder / f"{name}.py").write_text("WHOSE = 'mine'\n")
    for name in packages:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("WHOSE = 'mine'\n")
    (folder / "program_of_mine.py").write_text(PROGRAM.format(names=names))
    (folder / "task_of_mine.py").write_text(TASK.format(names=users_names(names)))
    return folder


def make_all(folder: Path) -> Path:
    """Write a folder with every name, as a package where it may be either."""
    # Both forms of a name are not possible.
    packages = set(PACKAGES) - {"jax", "jaxlaunch", "pydantic"}
    return make_folder(folder, set(MODULES) - packages, packages)


def imported_names(names: Iterable[str]) -> list[str]:
    """Return the names that the program imports: others are imported before it, or not at all."""
    return sorted(set(names) - {"sitecustomize", "usercustomize"})


def users_names(names: Iterable[str]) -> list[str]:
    """Return the names that a task imports and whose files are the user's."""
    return sorted(set(names) & set(USERS_OWN))


def make_job(mode: str, folder: Path) -> dict[str, Any]:
    """Return the job of a mode; its file is next to the folder, its working folder `cwd`."""
    base: dict[str, Any] = {"name": mode.replace(" ", "-"), "accelerator": {"type": "cpu"}}
    if mode.startswith("command"):
        base["command"] = ["python", str(folder / "program_of_mine.py")]
    else:
        task = (
            {"task": "task_of_mine:Mine"}
            if mode != "train" and mode != "train with workdir"
            else {}
        )
        base["train"] = BUILT_IN | task
    if mode.endswith("with code"):
        base["code"] = folder.name
    if mode.endswith("with workdir"):
        base["workdir"] = folder.name
    return base


def run_job(
    mode: str, folder: Path, document: Mapping[str, Any] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a job, started in the folder itself or next to it if the job names the folder."""
    beside = mode.endswith(("with workdir", "with code"))
    file = folder.parent / f"{mode.replace(' ', '-')}.yaml"
    file.write_text(yaml.safe_dump(dict(document or make_job(mode, folder))))
    return run_launcher(
        folder.parent if beside else folder, "run", str(file), "--run-dir", f"{file}.run"
    )


def run_launcher(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command in a folder."""
    command = [str(Path(sys.executable).parent / "launcher"), *arguments]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env={**environ, **QUICK_COMPILES}, capture_output=True, text=True
    )


def parse_origins(text: str) -> list[str]:
    """Return what the program or the task printed about each name."""
    return [line.partition("SAW ")[2] for line in text.splitlines() if "SAW " in line]


def run_without_launcher(folder: Path) -> tuple[bool, list[str]]:
    """Run the program by `python` alone; return whether it succeeds, and its output."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(folder / "program_of_mine.py")]
    result = subprocess.run(command, env=environ, capture_output=True, text=True)
    return result.returncode == 0, parse_origins(result.stdout)


def find_fault(mode: str, folder: Path, names: Iterable[str]) -> str | None:
    """Return what is wrong with a run of the folder, or None."""
    result = run_job(mode, folder)
    origins = parse_origins(result.stdout + result.stderr)
    if mode.startswith("command"):
        right = (result.returncode == 0, origins) == run_without_launcher(folder)
    else:
        has_own_task = "own task" in mode or mode.endswith("with code")
        expected = [f"{name} mine" for name in users_names(names)] if has_own_task else []
        right = (
            result.returncode == 0
            and f"step {STEPS}/{STEPS}" in result.stdout
            and origins == expected
        )
    if right:
        return None
    return (
        f"exit {result.returncode}, saw {origins}\n{result.stdout[-2000:]}{result.stderr[-4000:]}"
    )


def main(names: list[str]) -> int:
    """Print a row for each name; return the number of runs that failed."""
    wrong = 0
    every = [
        (name, kind)
        for kind, kind_names in (("module", MODULES), ("package", PACKAGES))
        for name in kind_names
    ]
    for name, kind in every:
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = make_folder(Path(place) / "proj", **{f"{kind}s": [name]})
            faults = {way: find_fault(way, folder, [name]) for way in MODES}
        row = ["ok" if fault is None else "WRONG" for fault in faults.values()]
        print(f"{name}{'/' if kind == 'package' else '.py'}", *row, sep=" | ", flush=True)
        for way, problem in faults.items():
            if problem:
                wrong += 1
                print(f"  {way}: {problem}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
