"""Start `launcher run` as a user would, and read the files of its run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests import forkserver
from tests.compiled import QUICK_COMPILES, SITE, quick_start_env
from tests.forkserver import ForkedProcess
from tests.gang.run_files import read_json_lines

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# The machine is shared: this is long enough never to be the reason.
PATIENCE_S = 1200
LAUNCHER = (sys.executable, "-m", "jaxlaunch.launcher.cli.main")
USUAL_COMPILES = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}  # as users have them


def user_cache_env(folder: Path) -> dict[str, str | None]:
    """Return variables of a run that keeps its programs in this folder, as a user's run does."""
    return {
        "JAX_COMPILATION_CACHE_DIR": None,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": None,
        "JAX_SHARE_BINARY_BETWEEN_HOSTS": "0",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
        "XDG_CACHE_HOME": str(folder),
    }


def digits_block(**train: Any) -> dict[str, Any]:
    """Return a small classification train block for 8 devices with some keys replaced."""
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


def make_job(
    train: Mapping[str, Any] | None = None, *, hosts: int = 1, per_host: int = 2, **keys: Any
) -> dict[str, Any]:
    """Return a CPU job of `hosts` × `per_host` devices; with a train block, no restarts in place.

    An agent that may restart its ranks keeps a standby process for each, whose imports take time.
    """
    document: dict[str, Any] = {
        "name": "t",
        "hosts": hosts,
        "accelerator": {"type": "cpu", "per_host": per_host},
    }
    training = {} if train is None else {"train": dict(train), "restarts": {"in_place": 0}}
    return document | training | keys


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
        return read_json_lines(self.folder / "metrics.jsonl")

    @property
    def losses(self) -> dict[int, float]:
        """Training loss by step."""
        return {line["step"]: line["loss"] for line in self.metrics if "loss" in line}

    def example_ids(self) -> dict[int, list[int]]:
        """Return example ids by step, over all processes in the order of their rows."""
        ids: dict[int, list[int]] = {}
        for file in sorted((self.folder / "examples").glob("*.jsonl")):
            for line in read_json_lines(file):
                ids.setdefault(line["step"], []).extend(line["ids"])
        return ids


class Running:
    """A running `launcher run`. Leaving the block kills its processes.

    Its programs compile quickly (unless `env` has USUAL_COMPILES), and once for all processes.
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
        path = os.pathsep.join([SITE, str(HERE), str(ROOT)])
        self._streams = [(folder / name).open("w+") for name in ("stdout", "stderr")]
        variables = {**os.environ, **quick_start_env(), "PYTHONPATH": path, **(env or {})}
        set_variables = {name: value for name, value in variables.items() if value is not None}
        arguments = ["run", str(file), "--run-dir", str(self.folder), *args]
        stdout, stderr = (stream.fileno() for stream in self._streams)
        self.process: subprocess.Popen[bytes] | ForkedProcess
        # Variables of the interpreter and the loader have no effect on a program that runs already.
        if prefix or any(name.startswith(("PYTHON", "LD_")) for name in env or {}):
            self.process = subprocess.Popen(
                [*prefix, *LAUNCHER, *arguments],
                stdout=stdout,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                env=set_variables,
                start_new_session=True,
            )
        else:
            self.process = forkserver.start_program(
                forkserver.LAUNCHER,
                arguments,
                cwd=Path.cwd(),
                env=set_variables,
                stdout=stdout,
                stderr=stderr,
            )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            kill_processes(self.pids())
        self.process.wait()
        for stream in self._streams:
            stream.close()

    def read_output(self) -> tuple[str, str]:
        return self._read(0), self._read(1)

    def _read(self, index: int) -> str:
        return Path(self._streams[index].name).read_text()

    def wait(self, patience_s: float = PATIENCE_S) -> Result:
        self.process.wait(patience_s)
        return Result(self.process.returncode, *self.read_output(), self.folder)

    def wait_until(self, description: str, condition: Callable[[], Any]) -> Any:
        """Wait until `condition()` is true and return it. Fail if the run ends first."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if (result := condition()) or self.process.poll() is not None:
                break
            time.sleep(0.02)
        assert result, (
            f"{description} never happened; exit {self.process.poll()}\n"
            f"{''.join(self.read_output())[-4000:]}"
        )
        return result

    def wait_for_file(self, path: Path) -> None:
        self.wait_until(f"the file {path.name}", path.exists)

    def wait_for_step(self, step: int) -> None:
        """Wait until `step` is in metrics.jsonl."""

        def is_logged() -> bool:
            file = self.folder / "metrics.jsonl"
            return file.exists() and any(
                f'"step": {step},' in line for line in file.read_text().splitlines()
            )

        self.wait_until(f"step {step}", is_logged)

    def pids(self) -> list[int]:
        """Return the pids of the launcher, its agents and their children."""
        return [self.process.pid, *descendant_pids(self.process.pid)]

    def rank_pids(self) -> dict[int, int]:
        """Return the pid of each rank's process. Standby processes have no attempt."""
        pids = {}
        for pid in self.pids():
            variables = read_environ(pid)
            if "JAXLAUNCH_ATTEMPT" in variables and "JAX_PROCESS_ID" in variables:
                pids[int(variables["JAX_PROCESS_ID"])] = pid
        return pids

    def scrape(self, host: int = 0) -> str:
        """Return the metrics of a host's agent, or an empty text if none answers."""
        try:
            address = json.loads((self.folder / "agents.json").read_text())[host]["address"]
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
                return str(answer.read().decode())
        except (OSError, ValueError, LookupError):
            return ""

    def agent_pids(self) -> dict[int, int]:
        """Return the pid of each host's agent."""
        return {
            int(variables["JOB_COMPLETION_INDEX"]): pid
            for pid in descendant_pids(self.process.pid)
            if "JOB_COMPLETION_INDEX" in (variables := read_environ(pid))
            and "JAXLAUNCH_UID" in variables  # which the program of a tracker has not
            and "JAXLAUNCH_PROGRESS_FD" not in variables
        }

    def kill(self) -> None:
        """Kill the launcher, its agents and their children, and wait until all have ended."""
        pids = self.pids()
        kill_processes(pids)
        self.process.wait()
        wait_until_gone(pids)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


def run_job(
    folder: Path, document: Mapping[str, Any], *args: str, env: Mapping[str, str] | None = None
) -> Result:
    """Run a job to its end."""
    with Running(folder, document, *args, env=env) as running:
        return running.wait()


def run_launcher(
    *arguments: object, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command of the launcher in a process of its own."""
    return subprocess.run(
        [*LAUNCHER, *map(str, arguments)],
        env={**os.environ, **QUICK_COMPILES, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        **options,
    )


def fault_env(marks: Path, kind: str, at: str, **fault: Any) -> dict[str, str]:
    """Return the variable that describes a fault to faulty.py, and make the folder of its marks."""
    marks.mkdir(parents=True, exist_ok=True)
    return {"FAULT": json.dumps({"kind": kind, "at": at, "mark": str(marks), **fault})}


def train_each_command(folder: Path, blocks: Mapping[str, Any]) -> list[str]:
    """Return a command that trains the blocks one after the other in one start of the processes.

    The run folder of block NAME is `folder`/NAME, without a checkpoint and a summary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "blocks.json").write_text(json.dumps(blocks))
    return ["python", str(HERE / "train_each.py"), str(folder / "blocks.json"), str(folder)]


def assert_success(result: Result) -> Result:
    """Return the result of a run that must have succeeded."""
    assert result.code == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result


def read_environ(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in raw.split("\0") if "=" in pair)


def descendant_pids(pid: int) -> list[int]:
    """Return the pids below `pid`, parents first."""
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in _child_pids(task)
        ]
    except OSError:
        return []
    return children + [descendant for child in children for descendant in descendant_pids(child)]


def _child_pids(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:
        return []


def kill_processes(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def living_pids(pids: list[int]) -> list[int]:
    """Return the pids that still run (no zombies)."""
    return [pid for pid in pids if _process_state(pid) not in ("", "Z", "X")]


def wait_until_gone(pids: list[int]) -> None:
    """Wait until none of `pids` runs any more."""
    end = time.monotonic() + PATIENCE_S
    while living_pids(pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert not living_pids(pids), (
        f"still running: {[read_environ(pid) for pid in living_pids(pids)]}"
    )


def _process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
