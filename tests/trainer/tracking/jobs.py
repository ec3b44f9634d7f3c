"""A real job that is killed in four ways, for what its tracker's store holds of it: see stores.py, `--job`.

Two hosts with a process each: each process and each agent is killed once. After the agent of host 1 the gang continues
with one host, and grows again when `launcher run` has started another agent.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.compiled import SITE
from tests.gang.runs import HERE, Running, digits, environ, succeed

STEPS = 400
ROOT = HERE.parents[1]

Lines = dict[str, dict[int, list[dict[str, Any]]]]  # by journal and step


def rows(folder: Path, journal: str) -> list[dict[str, Any]]:
    """The lines of a journal."""
    return [json.loads(line) for line in (folder / f"{journal}.jsonl").read_text().splitlines()]


def lines(folder: Path) -> Lines:
    """The lines of both journals as they are now, of each step one."""
    return {name: {row["step"]: [row] for row in rows(folder, name)} for name in ("metrics", "eval")}


def ranks(running: Running) -> dict[int, int]:
    """The process of each rank: the one with an attempt; after a restart in place the older of two without."""
    found = dict[int, int]()
    for pid in sorted(running.tree(), reverse=True):
        variables = environ(pid)
        if "JAX_PROCESS_ID" in variables:
            found[int(variables["JAX_PROCESS_ID"])] = pid
    return found | running.children()


class Followed:
    """Every line that there ever was: of a step that was trained again a tracker may have the one or the other."""

    def __init__(self, folder: Path) -> None:
        self.found: Lines = {"metrics": {}, "eval": {}}
        self._folder, self._is_over = folder, threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        known = set[tuple[str, bytes]]()
        while not self._is_over.wait(0.02):
            self._read(known)
        self._read(known)

    def _read(self, known: set[tuple[str, bytes]]) -> None:
        for name, found in self.found.items():
            path = self._folder / f"{name}.jsonl"
            for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
                if (name, line) not in known and line.startswith(b"{"):
                    known.add((name, line))
                    row = json.loads(line)
                    found.setdefault(row["step"], []).append(row)

    def has(self, step: int) -> bool:
        """Whether a step of the training is logged."""
        return max(self.found["metrics"], default=0) >= step

    def close(self) -> None:
        """Reads what was written last."""
        self._is_over.set()
        self._thread.join()


def shrink(running: Running) -> None:
    """Kills the agent of host 1, and lets the next one begin once the gang trains without it."""
    killed = running.agents()[1]
    os.kill(killed, signal.SIGKILL)
    running.until("another agent", lambda: running.agents().get(1, killed) != killed)
    other = running.agents()[1]
    os.kill(other, signal.SIGSTOP)
    running.until("a gang of one", lambda: "on 1 host\n" in running.text()[1])
    os.kill(other, signal.SIGCONT)


def trained(name: str, folder: Path, packages: Path) -> tuple[Path, Lines, str]:
    """Trains the job to its end under this tracker: its run folder, every line that there was, and what happened."""
    train = digits(steps=STEPS, model={"kind": "mlp", "layers": 4, "width": 512}, batch=64)
    train |= {"eval": {"every": 50}, "checkpoint": {"every": 20}}
    document = {
        "name": "t",
        "hosts": {"min": 1, "max": 2},
        "accelerator": {"type": "cpu", "per_host": 1},
        "tracker": name,
        "restarts": {"in_place": 9, "crash": 9},
        "timeouts": {"replace": "1s"},
        "train": train,
    }
    path = os.pathsep.join([SITE, str(HERE), str(ROOT), str(packages)])
    with Running(folder, document, env={"PYTHONPATH": path}) as running:
        followed = Followed(running.folder)
        try:
            for step, kill in KILLS:
                running.until(f"step {step}", partial(followed.has, step))
                kill(running)
            result = succeed(running.wait())
        finally:
            followed.close()
    sizes = re.findall(r"starting attempt .* on (\d+) hosts?", result.stderr)
    causes = [each["cause"] for each in rows(result.folder, "attempts")]
    last = lines(result.folder)
    for journal, of in followed.found.items():
        assert sorted(of) == sorted(last[journal]), journal
    again = sum(len(of) > 1 for steps in followed.found.values() for of in steps.values())
    count = sum(map(len, last.values()))
    told = f"hosts {', '.join(sizes)}; attempts ended by {', '.join(causes)}; {again} of {count} lines written again"
    return result.folder, followed.found, told


KILLS: Sequence[tuple[int, Callable[[Running], None]]] = (  # once this step is logged
    (40, lambda running: os.kill(ranks(running)[0], signal.SIGKILL)),
    (110, lambda running: os.kill(ranks(running)[1], signal.SIGKILL)),
    (180, shrink),
    (260, lambda running: os.kill(running.agents()[0], signal.SIGKILL)),
)
