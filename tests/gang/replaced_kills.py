"""Kills hosts, agents and processes of a gang that stays: python -m tests.kills --replaced --seed 1

Several events happen to one `launcher run` of three hosts, with or without a spare: SIGKILL for a rank's process
(`process`), for the agent of a host (`agent`) or for all that runs on it (`host`), of one or of two at once, host 0
included, at a step, in a save, or while the gang starts again after the event before. The run has to end at its last
step with the losses of an undisturbed one, to the bit. One JSON line for each event: what was drawn, whom it hit, which
attempts ended of it, and what is `wrong`, which is empty when all is right.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.gang.run_files import RunFiles
from tests.gang.runs import Running, alive, descendants, digits, environ, job, launch

HOSTS, STEPS, EVERY = 3, 200, 5
SERIES = 6  # events of one run
PATIENCE_S = 600.0
TARGETS = ("process", "agent", "host")
MOMENTS = ("step", "step", "save", "start")


@dataclasses.dataclass(frozen=True)
class Event:
    """What was drawn. `hits` are of (target, host); the host 3 is there where the run has a spare."""

    seed: str
    hits: tuple[tuple[str, int], ...]
    moment: str
    after: int  # steps
    delay_s: float


def draw(seed: str, spares: int) -> Event:
    """The event of a seed."""
    rng = random.Random(seed)
    many = 2 if rng.random() < 0.25 else 1
    victims = rng.sample(range(HOSTS + spares), many)
    hits = tuple((rng.choice(TARGETS), victim) for victim in victims)
    return Event(seed, hits, rng.choice(MOMENTS), rng.randrange(1, 8), rng.uniform(0.0, 0.4))


def document(spares: int) -> dict[str, Any]:
    """The job: limits that no series reaches."""
    train = digits(steps=STEPS, batch=24, checkpoint={"every": EVERY, "keep": 3})
    limits = {"restarts": {"crash": 50, "in_place": 50}, "timeouts": {"save": "1m"}, "grace": "60s"}
    return job(train, hosts=HOSTS, per_host=1, spares=spares, **limits)


class Series(RunFiles):
    """A run and the events that happen to it."""

    def __init__(self, folder: Path, spares: int) -> None:
        super().__init__(folder / "run")
        self.folder, self.spares = folder, spares
        self._pids: set[int] = set()

    def records(self) -> list[dict[str, Any]]:
        """The attempts that ended."""
        with contextlib.suppress(OSError):
            return [json.loads(line) for line in (self.run / "attempts.jsonl").read_text().splitlines()]
        return []

    def table(self) -> dict[int, list[int]]:
        """The ranks of each host, as the run folder has them."""
        with contextlib.suppress(OSError, ValueError):
            return {one["host"]: one["ranks"] for one in json.loads((self.run / "agents.json").read_text())}
        return {}

    def lines(self, seed: str, count: int, undisturbed: dict[int, float]) -> Iterator[dict[str, Any]]:
        """One run with its events; the line of each, and of the end."""
        with Running(self.folder, document(self.spares)) as running:
            for number in range(count):
                event = draw(f"{seed}:{number}", self.spares)
                line = self._carry_out(event, running)
                if line is None:
                    break
                yield line
            result = running.wait()
        wrong = [] if result.code == 0 else [f"it ended with {result.code}: {result.verdict['message']}"]
        other = [step for step, loss in undisturbed.items() if result.losses.get(step) != loss]
        wrong += [f"the losses of {len(other)} steps differ, the first at step {other[0]}"] if other else []
        left = alive(sorted(self._pids))
        wrong += [f"processes {left} are left"] if left else []
        causes = Counter(record["cause"] for record in self.records())
        yield {"seed": seed, "spares": self.spares, "losses": True, "ends": causes, "wrong": wrong}

    def _carry_out(self, event: Event, running: Running) -> dict[str, Any] | None:
        """Waits for the moment and kills; the line, None where the run was over before."""
        if not self._await(event, running):
            return None
        table, before = self.table(), len(self.records())
        agents = running.agents()
        self._pids |= set(descendants(running.process.pid))
        hit = {host: _pids(target, agents.get(host)) for target, host in event.hits}
        began = time.monotonic()
        for pid in itertools.chain.from_iterable(hit.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        saved = self.newest()
        is_needed = any(table.get(host) and pids for host, pids in hit.items())
        while is_needed and len(self.records()) == before and running.process.poll() is None:
            if time.monotonic() > began + PATIENCE_S / 10:
                break  # killed while nothing ran there
            time.sleep(0.05)
        stepped_s = self._until_saved(running, saved, began)
        ended = self.records()[before:]
        found = [(one["cause"], one["verdict"]["code"], one["rank"]) for one in ended]
        wrong = self._judge(event, table, hit, found, running.process.poll() is not None)
        if stepped_s is None and running.process.poll() is None:
            wrong.append(f"nothing was saved after step {saved} within {PATIENCE_S:.0f} s")
        about = {"table": table, "ended": found, "saved_then": saved, "until_saved_s": stepped_s}
        return {**dataclasses.asdict(event), **about, "wrong": wrong}

    def _await(self, event: Event, running: Running) -> bool:
        """Returns at the moment of the event; whether the run is still under way."""
        begun, end = self.step() + event.after, time.monotonic() + PATIENCE_S
        while running.process.poll() is None and time.monotonic() < end:
            is_begun = event.moment == "start" or self.step() >= begun
            if is_begun and self.table() and len(running.agents()) == HOSTS + self.spares:
                break
            time.sleep(0.02)
        ended = running.process.poll
        while event.moment == "save" and ended() is None and not self.saves() and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(event.delay_s * {"start": 8.0, "save": 0.05}.get(event.moment, 1.0))
        return running.process.poll() is None

    def _until_saved(self, running: Running, saved: int, began: float) -> float | None:
        """Seconds until a later step is on storage; None where the run ends first."""
        while running.process.poll() is None and time.monotonic() < began + PATIENCE_S:
            if self.newest() > saved + EVERY:  # the next may have been under way
                return round(time.monotonic() - began, 2)
            time.sleep(0.05)
        return None

    def _judge(
        self,
        event: Event,
        table: dict[int, list[int]],
        hit: dict[int, list[int]],
        found: list[tuple[str, int, int | None]],
        is_over: bool,
    ) -> list[str]:
        """What is wrong with the attempts that ended, in words."""
        right: set[tuple[str, int, int | None]] = set()
        is_needed = False
        for target, host in event.hits:
            for rank in table.get(host, []) if hit[host] else []:
                is_needed = True
                right |= {("killed", 137, rank)} if target != "agent" else set()
                right |= {("lost", 81, rank)} if target != "process" else set()
        if event.moment == "start":  # ranks may have moved since the table was read
            wrong = [f"{one} ended it" for one in found if one[0] not in ("killed", "lost", "done")]
        else:
            wrong = [f"{one} ended it, not {sorted(right)}" for one in found if one not in right and one[0] != "done"]
        if is_needed and not found and event.moment != "start" and not is_over:
            wrong.append(f"no attempt ended, of {sorted(right)}")
        if len([one for one in found if one[0] != "done"]) > len(event.hits):
            wrong.append(f"{len(found)} attempts ended of {len(event.hits)} kills")
        return wrong


def _pids(target: str, agent: int | None) -> list[int]:
    """Whom a kill hits on a host: the agent, its rank's process, or all that it started, itself first."""
    if agent is None:
        return []
    children = [pid for pid in descendants(agent) if "JAXLAUNCH_PROGRESS_FD" in environ(pid) or _is_program(pid)]
    if target == "process":
        return sorted(children, key=_began)[:1]  # the others are standby processes
    return [agent] if target == "agent" else [agent, *descendants(agent)]


def _is_program(pid: int) -> bool:
    return b"jaxlaunch" in _read(f"/proc/{pid}/cmdline")


def _began(pid: int) -> int:
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[19]) if fields else 0


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def main(argv: Sequence[str]) -> int:
    """Carries out the events; the number of lines with something wrong is the exit code, 99 at most."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills --replaced", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--spares", type=int, choices=[0, 1], help="[default: in turn]")
    parser.add_argument("--keep", type=Path, help="where the folders of series with something wrong are kept")
    given = parser.parse_args(argv)
    found: Counter[str] = Counter()
    undisturbed: dict[int, float] = {}
    for number in itertools.count():
        left = given.count - found["events"]
        if left <= 0:
            break
        spares = number % 2 if given.spares is None else given.spares
        with tempfile.TemporaryDirectory(prefix="kills-") as place:
            folder = Path(place)
            undisturbed = undisturbed or launch(folder / "undisturbed", document(0)).losses
            lines = []
            for line in Series(folder / "series", spares).lines(
                f"{given.seed}:{number}", min(SERIES, left), undisturbed
            ):
                print(json.dumps(line), flush=True)
                lines.append(line)
            found["events"] += max(1, len(lines) - 1)
            found.update("wrong" if line["wrong"] else "right" for line in lines)
            if given.keep and any(line["wrong"] for line in lines):
                shutil.copytree(folder, given.keep / f"{given.seed}-{number}", dirs_exist_ok=True)
    print(json.dumps({"seed": given.seed, **found}), file=sys.stderr)
    return min(found["wrong"], 99)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
