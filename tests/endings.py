"""End programs in every way and compare the verdicts: python -m tests.endings.

Two ranks train together. Then one ends (`first`), and the other works alone for `gap` seconds and
ends too. A row is a kind of job, a way to end, a gap, the first rank, and one or two hosts. Most
rows must be done; the rows of FAULTS have another verdict. Every run is a `launcher run`. Rows wait
side by side: the next one starts when both ranks of the one before have trained. Each row prints a
line of JSON with what is `wrong` with it, empty if nothing is. The default is a covering set;
--all runs the whole product.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gang.run_files import read_json_lines
from tests.gang.runs import Running, digits_block, make_job

# plain: a program that reports nothing; report: with jaxlaunch.report and phase="done"; run:
# jaxlaunch.run; train: the built-in trainer.
KINDS = ("plain", "report", "run", "train")
ENDINGS = ("return", "sys.exit", "os._exit", "shutdown", "atexit", "daemon", "child")
# JAX's shutdown timeout was 10 s once, and its heartbeats take 30 s.
GAPS_S = (0, 12, 40, 120)
LAYOUTS = ((2, 1), (1, 2))
# This many rows wait at the same time.
MAX_WAITING = 24

PROGRAM = """
import atexit, os, subprocess, sys, threading, time
kind, ending, first, gap = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
rank = int(os.environ["JAX_PROCESS_ID"])
import jax, jax.numpy as jnp
import jaxlaunch
if kind == "run":
    def step(state, batch):
        return {"w": state["w"] - 0.1 * batch["x"].mean()}, {"loss": (state["w"] ** 2).sum()}
    def data(number):
        return {"x": jnp.ones((8, 2)) * number}
    kept = jaxlaunch.run(step, lambda: {"w": jnp.ones(2)}, data, steps=3)
elif kind != "alone":
    jax.distributed.initialize()
    from jax.experimental import multihost_utils
    for number in range(1, 4):
        kept = multihost_utils.process_allgather(jnp.ones(2))
        if kind in ("report", "hang"):
            jaxlaunch.report(step=number, committed=number)
    if kind == "report":
        jaxlaunch.report(phase="done")
else:
    kept = jax.jit(lambda x: x @ x)(jnp.ones((8, 8)))
if "MARKS" in os.environ:
    open(f"{os.environ['MARKS']}/trained-{rank}", "w").close()
if rank != first:
    time.sleep(gap)
def work():
    while True:
        time.sleep(0.2)
if ending == "sys.exit":
    sys.exit(0)
elif ending == "os._exit":
    os._exit(0)
elif ending == "shutdown":
    jax.distributed.shutdown()
elif ending == "atexit":
    atexit.register(lambda: 1 / 0)
elif ending == "daemon":
    threading.Thread(target=work, daemon=True).start()
elif ending == "child":
    pipe = int(os.environ["JAXLAUNCH_PROGRESS_FD"])
    subprocess.Popen(["sleep", "3600"], pass_fds=[pipe], start_new_session=True)
elif ending == "raise" or (ending == "late raise" and rank != first):
    raise ValueError("bad batch 17")
elif ending == "early exit 3" and rank == first:
    sys.exit(3)
elif ending == "early os._exit 3" and rank == first:
    os._exit(3)
elif ending == "early kill" and rank == first or ending == "late kill" and rank != first:
    os.kill(os.getpid(), 9)
elif ending == "kill":
    os.kill(os.getpid(), 9)
elif ending == "early collective" and rank != first:
    multihost_utils.process_allgather(jnp.ones(2))
elif ending == "early os._exit collective":
    if rank == first:
        os._exit(0)
    multihost_utils.process_allgather(jnp.ones(2))
elif ending == "late hang" and rank != first:
    work()
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One run and its verdict.

    Attributes:
        kind: One of KINDS, or "alone" (the ranks never join) or "hang" (reports, but not "done").
        ending: One of ENDINGS or of FAULTS.
        gap: Seconds between the ends of the ranks.
        first: Rank that ends first.
        layout: Hosts, and processes of each.
        code: Exit code that is right.
        rank: Rank that is right, or None.
        words: Words of the message.
        shell: Command of a shell, with {python} for the program.
        keys: More keys of the job.
    """

    kind: str
    ending: str
    gap: int = 0
    first: int = 1
    layout: tuple[int, int] = (2, 1)
    code: int = 0
    rank: int | None = None
    words: str = "every process finished"
    shell: str = ""
    keys: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Short description of the row."""
        hosts, processes = self.layout
        where = f"{hosts}x{processes}"
        place = f"{self.kind} {self.ending} {self.gap}s first={self.first} {where}"
        return place + (f" {self.shell}" if self.shell else "")


RAISED = "raised: ValueError: bad batch 17"
NEVER = "the processes never joined"
ENDED = "program ended while other ranks were still running"
TEE = 'bash -c "{python} 2>&1 | tee /dev/null"'
FAULTS = (
    Row("plain", "late raise", 12, 1, code=83, rank=0, words=RAISED),
    Row("report", "late raise", 12, 0, (1, 2), code=83, rank=1, words="bad batch 17"),
    Row("plain", "early exit 3", 12, 0, code=83, rank=0, words="exit code 3"),
    Row("plain", "early exit 3", 12, 1, (1, 2), code=83, rank=1, words="exit code 3"),
    Row("plain", "early os._exit 3", 12, 1, code=83, rank=1, words="exit code 3"),
    Row("report", "early os._exit 3", 12, 0, code=83, rank=0, words="exit code 3"),
    Row("plain", "early kill", 12, 0, code=137, rank=0, words="SIGKILL"),
    Row("report", "early kill", 12, 1, code=137, rank=1, words="SIGKILL"),
    Row("report", "late kill", 12, 1, (1, 2), code=137, rank=0, words="SIGKILL"),
    # A rank that the others need has ended.
    Row("plain", "early collective", 0, 1, code=83, rank=1, words=ENDED),
    Row("plain", "early collective", 0, 0, (1, 2), code=83, rank=0, words=ENDED),
    Row("plain", "early os._exit collective", 0, 1, code=83, rank=1, words=ENDED),
    Row("plain", "early os._exit collective", 0, 0, code=83, rank=0, words=ENDED),
    # The rank that hangs is named, and not the one that has finished.
    Row(
        "hang", "late hang", 0, 0, code=82, rank=1, words="rank 1 in step in work (program.py",
        keys=(("timeouts", {"step": "5s"}),),
    ),
    Row(
        "hang", "late hang", 0, 1, (1, 2), code=82, rank=0, words="; rank 1 had finished",
        keys=(("timeouts", {"step": "5s"}),),
    ),
    # The exit code of a pipeline is that of its last command.
    Row("plain", "raise", shell=TEE, code=83, words=RAISED),
    Row("plain", "raise", layout=(1, 1), shell=TEE, code=83, words=RAISED),
    Row("plain", "kill", layout=(1, 1), shell=TEE, code=83, words="without `set -o pipefail`"),
    Row("report", "raise", layout=(1, 2), shell=TEE, code=83, words="bad batch 17"),
    Row("plain", "raise", shell='sh -c "({python}; exit 1) | tee /dev/null; echo end"', code=83,
        words=RAISED),
    Row("plain", "kill", shell=TEE, code=83, words="without `set -o pipefail`"),
    Row("plain", "return", 12, 1, shell=TEE),
    Row("plain", "os._exit", 12, 0, shell=TEE),
    Row("plain", "raise", shell='bash -c "set -o pipefail; {python} | tee /dev/null || true"'),
    Row("plain", "raise", shell='bash -c "{python} || echo fell back"'),
    Row("plain", "raise", shell='bash -c "{python} > >(tee /dev/null) 2>&1 || true"'),
    Row("plain", "raise", shell='bash -c "set -o pipefail; {python} 2>&1 | tee /dev/null"', code=83,
        words=RAISED),
    # Ranks that have not joined.
    Row("alone", "return", code=64, words=NEVER),
    Row("alone", "os._exit", 12, 0, (1, 2), code=64, words=NEVER),
    Row("alone", "sys.exit", shell='sh -c "{python}; exit $?"', code=64, words=NEVER),
    Row("alone", "return", keys=(("independent", True),)),
)  # fmt: skip


def whole_product() -> Iterator[Row]:
    """Yield every combination of a kind, an ending, a gap, a first rank and a layout."""
    for kind, gap, first, layout in itertools.product(KINDS, GAPS_S, (0, 1), LAYOUTS):
        for ending in ENDINGS if kind != "train" else ("return",):
            yield Row(kind, ending, gap, first, layout)


def covering_set() -> Iterator[Row]:
    """Yield rows with every pair of ending, gap and first rank, and every pair with a kind."""
    for row in whole_product():
        if row.kind == "train":
            yield row
            continue
        index = ENDINGS.index(row.ending) + GAPS_S.index(row.gap) + row.first
        is_kind = KINDS.index(row.kind) == index % 3
        is_layout = LAYOUTS.index(row.layout) == (index // 3 + row.first) % 2
        if is_kind and is_layout:
            yield row


class Runner:
    """Runs rows, of which many wait at the same time."""

    def __init__(self, folder: Path, max_waiting: int = MAX_WAITING) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(max_waiting)

    def judge_rows(self, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
        """Yield a line for each row, in their order."""
        futures = [self._start_row(row, self._folder / str(n)) for n, row in enumerate(rows)]
        for future in futures:
            yield future.result()

    def _start_row(self, row: Row, folder: Path) -> Future[dict[str, Any]]:
        """Start a row, and return when its ranks have trained."""
        marks = folder / "marks"
        marks.mkdir(parents=True)
        env = {"MARKS": str(marks), "ENDING": json.dumps([row.first, row.gap])}
        running = Running(folder, make_document(row, folder), env=env)

        def is_trained() -> bool:
            count = row.layout[0] * row.layout[1]
            return len(list(marks.glob("trained-*"))) == count or running.process.poll() is not None

        running.wait_until("the training", is_trained)
        return self._pool.submit(self._finish_row, row, running)

    def _finish_row(self, row: Row, running: Running) -> dict[str, Any]:
        with running:
            result = running.wait()
        verdict = result.verdict or {}
        wrong = []
        if (result.code, verdict.get("code")) != (row.code, row.code):
            wrong.append(f"exit code {result.code}, verdict {verdict.get('code')}, not {row.code}")
        if row.rank is not None and verdict.get("rank") != row.rank:
            wrong.append(f"rank {verdict.get('rank')}, not {row.rank}")
        if row.words not in verdict.get("message", ""):
            wrong.append(f"the message does not have {row.words!r}")
        if row.kind == "report" and not row.code and result.summary["step"] != 3:
            wrong.append(f"the last report is of step {result.summary['step']}, not 3")
        attempts = len(read_json_lines(running.folder / "attempts.jsonl"))
        if attempts != 1:
            wrong.append(f"{attempts} attempts")
        return {"row": row.name, "message": verdict.get("message"), "wrong": wrong}


def row_command(row: Row, program: Sequence[str]) -> list[str]:
    """Return the command of a row that runs the program, in a shell if the row has one."""
    command = [*program, row.kind, row.ending, str(row.first), str(row.gap)]
    if not row.shell:
        return command
    name, option, text = row.shell.split(" ", 2)
    return [name, option, text.strip('"').format(python=shlex.join(command))]


def make_document(row: Row, folder: Path) -> dict[str, Any]:
    """Return the job of a row, and write its program."""
    hosts, processes = row.layout
    limits = {"restarts": {"crash": 0, "in_place": 0}, **dict(row.keys)}
    if processes > 1:
        limits["processes_per_host"] = processes
    if row.kind == "train":
        block = digits_block(task="ends_late:Late", steps=2, batch=16)
        return make_job(block, hosts=hosts, per_host=processes, **limits)
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = row_command(row, [sys.executable, str(program)])
    return make_job(hosts=hosts, per_host=processes, command=command, **limits)


def main(argv: Sequence[str]) -> int:
    """Run the rows. The exit code is the number of wrong ones, at most 99."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="the whole product")
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    arguments = parser.parse_args(argv)
    rows = [*(whole_product() if arguments.all else covering_set()), *FAULTS]
    rows = [row for row in rows if arguments.only in row.name]
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="endings-") as place:
        for line in Runner(Path(place)).judge_rows(rows):
            print(json.dumps(line), flush=True)
            wrong += bool(line["wrong"])
    print(json.dumps({"rows": len(rows), "wrong": wrong}), file=sys.stderr)
    return min(wrong, 99)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
