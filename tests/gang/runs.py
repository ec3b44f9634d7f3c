"""Starts `launcher run` as a user would, and reads what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.compiled import SITE, quick_starts

HERE = Path(__file__).parent
PATIENCE_S = 1200  # the machine is shared: long enough never to be the reason

USUAL_COMPILES = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}  # as users have them


def own_cache(folder: Path) -> dict[str, str | None]:
    """Variables of a run that keeps its programs as a user's does, in this cache folder, and not the tests' own."""
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent)])
    unset = dict.fromkeys(
        ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    )
    return {
        **unset,
        "JAX_SHARE_BINARY_BETWEEN_HOSTS": "0",
        "PYTHONPATH": path,
        "XDG_CACHE_HOME": str(folder),
    }


def digits(**train: Any) -> dict[str, Any]:
    """A small classification job over 8 devices; keys of the train block may be replaced."""
    block: dict[str, Any] = {
        "task": "classify",
        "model": {"kind": "mlp", "layers": 1, "width": 32},
        "data": {"source": "synthetic", "examples": 512, "eval_examples": 64, "shape": [8, 8]},
        "mesh": {"dp": -1},
        "batch": 16,
        "steps": 20,
        "log_every": 1,
        "optimizer": {"lr": 1e-2, "schedule": {"name": "constant"}},
        "eval": {"every": None},
        "checkpoint": {"every": None},
    }
    return block | train


def job(
    train: Mapping[str, Any] | None = None, *, hosts: int = 1, per_host: int = 2, **keys: Any
) -> dict[str, Any]:
    """A CPU job of `hosts` × `per_host` devices; with a train block, one whose `restarts` are not in place.

    An agent that may restart its ranks keeps a standby process for each, which imports beside the
    training.
    """
    document: dict[str, Any] = {
        "name": "t",
        "hosts": hosts,
        "accelerator": {"type": "cpu", "per_host": per_host},
    }
    trains = {} if train is None else {"train": dict(train), "restarts": {"in_place": 0}}
    return document | trains | keys


@dataclasses.dataclass
class Result:
    """A run that ended."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def verdict(self) -> dict[str, Any]:
        return self.summary["verdict"]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]

    @property
    def losses(self) -> dict[int, float]:
        """Training loss by step."""
        return {line["step"]: line["loss"] for line in self.metrics if "loss" in line}

    def ids(self) -> dict[int, list[int]]:
        """Example ids by step, over all processes in order of their rows."""
        found: dict[int, list[int]] = {}
        for file in sorted((self.folder / "examples").glob("*.jsonl")):
            for line in map(json.loads, file.read_text().splitlines()):
                found.setdefault(line["step"], []).extend(line["ids"])
        return found


class Running:
    """A `launcher run` under way, whose programs compile quickly unless `env` has USUAL_COMPILES, and once for all
    processes.

    Leaving the block kills what is left of it.
    """

    def __init__(
        self,
        folder: Path,
        document: Mapping[str, Any],
        *args: str,
        env: Mapping[str, str | None] | None = None,
        prefix: Sequence[str] = (),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder / "run"
        file = folder / "job.yaml"
        file.write_text(yaml.safe_dump(dict(document), sort_keys=False))
        path = os.pathsep.join([SITE, str(HERE), str(HERE.parent.parent)])
        self._streams = [(folder / name).open("w+") for name in ("stdout", "stderr")]
        variables = {**os.environ, **quick_starts(), "PYTHONPATH": path, **(env or {})}
        launcher = [*prefix, sys.executable, "-m", "jaxlaunch.launcher.cli.main"]
        self.process = subprocess.Popen(
            [*launcher, "run", str(file), "--run-dir", str(self.folder), *args],
            stdout=self._streams[0],
            stderr=self._streams[1],
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in variables.items() if value is not None},
            start_new_session=True,
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for pid in self.tree():
                _kill(pid, signal.SIGKILL)
        self.process.wait()
        for stream in self._streams:
            stream.close()

    def text(self) -> tuple[str, str]:
        return self._read(0), self._read(1)

    def _read(self, index: int) -> str:
        return Path(self._streams[index].name).read_text()

    def wait(self, patience_s: float = PATIENCE_S) -> Result:
        self.process.wait(patience_s)
        return Result(self.process.returncode, *self.text(), self.folder)

    def until(self, what: str, happened: Callable[[], Any]) -> Any:
        """Waits until `happened()` is true and returns it; fails when the run ends first or never gets there."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if (answer := happened()) or self.process.poll() is not None:
                break
            time.sleep(0.02)
        assert answer, (
            f"{what} never happened; exit {self.process.poll()}\n{''.join(self.text())[-4000:]}"
        )
        return answer

    def until_file(self, path: Path) -> None:
        self.until(f"the file {path.name}", path.exists)

    def until_step(self, step: int) -> None:
        """Waits until `step` is in metrics.jsonl."""

        def seen() -> bool:
            file = self.folder / "metrics.jsonl"
            return file.exists() and any(
                f'"step": {step},' in line for line in file.read_text().splitlines()
            )

        self.until(f"step {step}", seen)

    def tree(self) -> list[int]:
        """Pids of the launcher, its agents and their children."""
        return [self.process.pid, *descendants(self.process.pid)]

    def children(self) -> dict[int, int]:
        """Pid of the process of each rank, from its environment; an interpreter kept in reserve has no attempt."""
        found = {}
        for pid in self.tree():
            variables = environ(pid)
            if "JAXLAUNCH_ATTEMPT" in variables and "JAX_PROCESS_ID" in variables:
                found[int(variables["JAX_PROCESS_ID"])] = pid
        return found

    def scrape(self, host: int = 0) -> str:
        """The metrics of a host's agent; empty while there is nobody to ask."""
        try:
            address = json.loads((self.folder / "agents.json").read_text())[host]["address"]
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
                return str(answer.read().decode())
        except (OSError, ValueError, LookupError):
            return ""

    def agents(self) -> dict[int, int]:
        """Pid of the agent of each host."""
        return {
            int(variables["JOB_COMPLETION_INDEX"]): pid
            for pid in descendants(self.process.pid)
            if "JOB_COMPLETION_INDEX" in (variables := environ(pid))
            and "JAXLAUNCH_UID" in variables  # which the program of a tracker has not
            and "JAXLAUNCH_PROGRESS_FD" not in variables
        }

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


def launch(
    folder: Path, document: Mapping[str, Any], *args: str, env: Mapping[str, str] | None = None
) -> Result:
    """Runs a job to its end."""
    with Running(folder, document, *args, env=env) as running:
        return running.wait()


def each(folder: Path, blocks: Mapping[str, Any]) -> list[str]:
    """The command that trains train blocks one after the other in one start of the processes; the run folder of block
    NAME is `folder`/NAME, without a checkpoint and a summary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "blocks.json").write_text(json.dumps(blocks))
    return ["python", str(HERE / "train_each.py"), str(folder / "blocks.json"), str(folder)]


def succeed(result: Result) -> Result:
    """The result, of a run that ended well."""
    assert result.code == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result


def environ(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in raw.split("\0") if "=" in pair)


def descendants(pid: int) -> list[int]:
    """Pids below `pid`, parents first."""
    try:
        below = [
            int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _children(task)
        ]
    except OSError:
        return []
    return below + [deeper for child in below for deeper in descendants(child)]


def _children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:
        return []


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def alive(pids: list[int]) -> list[int]:
    """Those of `pids` that still run (a zombie does not, nor one that is dead)."""
    return [pid for pid in pids if _state(pid) not in ("", "Z", "X")]


def until_gone(pids: list[int]) -> None:
    """Waits until none of `pids` runs any more; fails when one stays."""
    end = time.monotonic() + PATIENCE_S
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(pids), f"still running: {[environ(pid) for pid in alive(pids)]}"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
