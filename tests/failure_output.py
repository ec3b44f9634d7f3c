"""Output of failed runs on a terminal: `python -m tests.failure_output [--checkout FOLDER] [WORD]`.

Runs twenty failures of a job with two ranks, each on a terminal of its own, and prints for each how
many lines the terminal shows, how often it names the cause, and how far from its end the last time
is. `--checkout` runs the launcher of another checkout, to compare both. WORDs choose failures by
their names. A C compiler is needed for the full disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.compiled import SITE, quick_start_env
from tests.gang.runs import HERE, ROOT, digits_block, read_environ
from tests.gang.terminal import Terminal
from tests.storage_faults import Disk, compile_shim

# Wide enough for any line: sentences are counted, not rows.
WIDTH = 4000
# The cause is among the last lines, and is printed at most so often.
LAST_LINES, MAX_TIMES = 5, 2
# The lines of a run that does not fail: the start, the end and where to read on.
MAX_LINES = 40

PREAMBLE = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp
import jaxlaunch
jax.distributed.initialize()
from jax.experimental import multihost_utils
rank = jax.process_index()
def together(value):
    return float(multihost_utils.process_allgather(jnp.float32(value)).sum())
def train(steps):
    for step in range(1, steps + 1):
        together(step)
        jaxlaunch.report(step=step)
        print("step", step, flush=True)
train(3)
"""
AT_ONCE = {"restarts": {"in_place": 0, "crash": 0}}


@dataclasses.dataclass(frozen=True)
class Case:
    """A failure: the program of both ranks, and what the last lines must have.

    Attributes:
        program: Text of the program. None for a job without one.
        cause: Phrase of the cause.
        keys: Further keys of the job.
        is_bare: Whether the program does not begin with PREAMBLE.
        act: Called with the lines on the screen, the folder and the terminal whenever they change.
    """

    program: str | None
    cause: str
    keys: Mapping[str, Any] = dataclasses.field(default_factory=lambda: AT_ONCE)
    is_bare: bool = False
    act: Callable[[list[str], Path, Terminal], object] = lambda lines, folder, terminal: None


def kill_agent(lines: list[str], folder: Path, terminal: Terminal) -> None:
    """Kill the agent of host 1 after the first step."""
    mark = folder / "killed"
    if mark.exists() or not any("step 3" in line for line in lines):
        return
    mark.touch()
    for entry in Path("/proc").iterdir():
        environ = read_environ(int(entry.name)) if entry.name.isdecimal() else {}
        is_agent = "JAXLAUNCH_PARENT" in environ and "JAXLAUNCH_PROGRESS_FD" not in environ
        is_ours = environ.get("JAXLAUNCH_RUN_DIR", "").startswith(str(folder))
        if is_agent and is_ours and environ.get("JOB_COMPLETION_INDEX") == "1":
            os.kill(int(entry.name), signal.SIGKILL)


def fill_disk(lines: list[str], folder: Path, terminal: Terminal) -> None:
    """Let writes to the checkpoints fail once the first of them is complete."""
    control = folder / "disk" / "fault"
    if (folder / "checkpoints" / "5" / "jaxlaunch.manifest.json").exists():
        control.write_text(f"ENOSPC {folder}/checkpoints")


def training(**changes: Any) -> dict[str, Any]:
    """Return the keys of a job with a train block."""
    return {**AT_ONCE, "train": digits_block(**changes)}


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
RAISED = 'raise ValueError("bad batch 17")'
CASES: Mapping[str, Case] = {
    "a rank is killed": Case(f"if rank == 1: {KILLED}\ntrain(9)", "rank 1 was killed by SIGKILL"),
    "rank 0 is killed": Case(f"if rank == 0: {KILLED}\ntrain(9)", "rank 0 was killed by SIGKILL"),
    "a rank raises": Case(f"if rank == 1: {RAISED}\ntrain(9)", "ValueError: bad batch 17"),
    "rank 0 raises": Case(f"if rank == 0: {RAISED}\ntrain(9)", "ValueError: bad batch 17"),
    "every rank raises": Case(RAISED, "ValueError: bad batch 17"),
    "a rank raises in each attempt": Case(
        f"if rank == 1: {RAISED}\ntrain(9)", "ValueError: bad batch 17", {}
    ),
    "an exception has a cause": Case(
        'if rank == 1:\n    try: {}["shard 7"]\n'
        '    except KeyError as error: raise RuntimeError("no such shard") from error\ntrain(9)',
        "RuntimeError: no such shard",
    ),
    "an error of jax": Case(
        "jax.jit(lambda x: x @ jnp.ones(5))(jnp.ones((3, 4)))", "TypeError: dot_general requires"
    ),
    "a worker raises": Case(
        "from concurrent.futures import ThreadPoolExecutor\ndef read(i): return [1][i]\n"
        "if rank == 1: list(ThreadPoolExecutor(2).map(read, range(8)))\ntrain(9)",
        "IndexError: list index out of range",
    ),
    "a module is missing": Case(
        "import nosuchmodule", "ModuleNotFoundError: No module named 'nosuchmodule'", is_bare=True
    ),
    "a syntax error": Case("x = (", "SyntaxError: '(' was never closed", is_bare=True),
    "an exit code": Case(
        'if rank == 1:\n    print("cannot go on", flush=True)\n    sys.exit(3)\ntrain(9)',
        "rank 1's program ended",
    ),
    "an exit without cleaning up": Case(
        "if rank == 1: os._exit(7)\ntrain(9)", "rank 1's program ended with exit code 7"
    ),
    "a segmentation fault": Case(
        "import ctypes\nif rank == 1: ctypes.string_at(8)\ntrain(9)",
        "rank 1 was killed by SIGSEGV",
    ),
    "an abort of rank 0": Case(
        "if rank == 0: os.abort()\ntrain(9)", "rank 0 was killed by SIGABRT"
    ),
    "a rank hangs": Case(
        "if rank == 1: time.sleep(3600)\ntrain(9)",
        "rank 1 makes no progress",
        {**AT_ONCE, "timeouts": {"step": "5s"}},
    ),
    "a rank never steps": Case(
        "import time\ntime.sleep(3600)",
        "has not come to its first step",
        {**AT_ONCE, "timeouts": {"first_step": "4s"}},
        is_bare=True,
    ),
    "an agent is killed": Case(
        "time.sleep(60)", "host 1 (rank 1) was lost", {**AT_ONCE, "hosts": 2}, act=kill_agent
    ),
    "a command is missing": Case(
        None, "pyhton: command not found", {**AT_ONCE, "command": ["pyhton", "train.py"]}
    ),
    "the disk is full": Case(
        None,
        "No space left on device",
        training(
            steps=100_000,
            model={"kind": "mlp", "layers": 2, "width": 512},
            checkpoint={"every": 5, "path": "checkpoints", "keep": 100},
        ),
        act=fill_disk,
    ),
    "the loss is not finite": Case(
        None, "loss nan", training(optimizer={"lr": 1e30, "schedule": {"name": "constant"}})
    ),
    "a file is missing": Case(
        None,
        "nosuchfile.csv",
        training(data={"source": "table", "path": "nosuchfile.csv", "label": "y"}),
    ),
}


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a terminal showed of a failure."""

    lines: list[str]
    code: int
    cause: str

    @property
    def times(self) -> int:
        """How many lines have the cause."""
        return sum(self.cause in line for line in self.lines)

    @property
    def distance(self) -> int | None:
        """The position of its last line from the end, 1 for the last one."""
        places = [number for number, line in enumerate(self.lines[::-1], 1) if self.cause in line]
        return places[0] if places else None

    def find_faults(self) -> list[str]:
        """Return what is wrong with it."""
        faults = []
        if not self.code:
            faults.append("exit 0")
        if self.distance is None or self.distance > LAST_LINES:
            faults.append(f"the cause is not among the last {LAST_LINES} lines")
        if self.times > MAX_TIMES:
            faults.append(f"the cause is printed {self.times} times")
        if len(self.lines) > MAX_LINES:
            faults.append(f"{len(self.lines)} lines")
        return faults


def run_case(name: str, folder: Path, checkout: Path = ROOT) -> Shown:
    """Run a failure in a folder, and return what its terminal showed."""
    case = CASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "name": "t",
        "accelerator": {"type": "cpu", "per_host": 2},
        "processes_per_host": 2,
        **case.keys,
    }
    if "hosts" in case.keys:
        document |= {"accelerator": {"type": "cpu", "per_host": 1}, "processes_per_host": 1}
    env = {**quick_start_env(), "PYTHONPATH": os.pathsep.join(map(str, (SITE, HERE, checkout)))}
    if case.program is not None:
        text = case.program if case.is_bare else PREAMBLE + case.program
        (folder / "train.py").write_text(text)
        document |= {"command": ["python", "train.py"], "code": "."}
    if case.act is fill_disk:
        env |= Disk(folder / "disk", compile_shim(folder)).environ
    terminal = Terminal(folder, document, env=env, width=WIDTH)
    lines = terminal.watch(lambda lines: case.act(lines, folder, terminal)).lines
    return Shown([line for line in lines if line], terminal.process.returncode, case.cause)


def main() -> int:
    """Run the chosen failures; return 1 if the terminal shows one badly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--show", action="store_true", help="print what the terminals showed")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    names = [name for name in CASES if all(word in name for word in options.words)]
    total = failed = 0
    print(f"{'failure':32}{'lines':>6}{'times':>6}{'from the end':>14}")
    with tempfile.TemporaryDirectory() as top:
        for number, name in enumerate(names):
            shown = run_case(name, Path(top) / str(number), options.checkout)
            faults = shown.find_faults()
            total, failed = total + len(shown.lines), failed + bool(faults)
            numbers = f"{len(shown.lines):6}{shown.times:6}{shown.distance or '-':>14}"
            print(f"{name:32}{numbers}  {'; '.join(faults)}", flush=True)
            if options.show:
                print("\n".join(f"    | {line}" for line in shown.lines), flush=True)
    print(f"{len(names)} failures, {total} lines, {failed} badly shown")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
