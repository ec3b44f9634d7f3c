"""Kills hosts, agents and processes of a gang that stays: python -m tests.kills --replaced --seed 1

Several events happen to one `launcher run` of three hosts, with or without a spare: SIGKILL for a rank's process
(`process`), for the agent of a host (`agent`) or for all that runs on it (`host`), of one or of two at once, host 0
included: at a step, in a save or an evaluation, or in the restart after the event before, whose end nobody waits for
then (while hosts are replaced, meet, restore or compile). The run has to end at its last step with the losses of an
undisturbed one, to the bit, and may leave no process and no file that the undisturbed one did not. One JSON line for
each event: what was drawn, whom it hit, and `was`, the moment that it hit in truth; the last line of a restart has the
attempts that ended and what is `wrong`, which is empty when all is right.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.gang.run_files import RunFiles
from tests.gang.runs import Running, alive, descendants, digits, environ, job

HOSTS, STEPS, EVERY = 3, 160, 5
SERIES = 12  # events of one run
PATIENCE_S = 600.0
TARGETS = ("process", "agent", "host")
STARTS = ("replace", "init", "restore", "compile")  # moments of the restart after the event before
End = tuple[str, int, int | None]  # of an attempt: cause, code, rank
MOMENTS = ("step", "step", "save", "eval", *STARTS)
PHASES = ("eval", "init", "restore", "compile")  # of a rank, as the agent's metrics have them
PHASE = re.compile(r'^jaxlaunch_phase\{rank="\d+",phase="(\w+)"\} 1\.0$', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Event:
    """What was drawn. `hits` are of (target, host); the host 3 is there where the run has a spare."""

    seed: str
    hits: tuple[tuple[str, int], ...]
    moment: str
    after: int  # steps
    delay_s: float


class Hit(NamedTuple):
    """Who was killed: `ranks` are those that the host held by the newest table; none where nothing ran there."""

    target: str
    host: int
    ranks: list[int]


class Undisturbed(NamedTuple):
    """What a run without events leaves."""

    losses: dict[int, float]
    names: set[str]  # as Series.names


def draw(seed: str, spares: int) -> Event:
    """The event of a seed."""
    rng = random.Random(seed)
    many = 2 if rng.random() < 0.25 else 1
    victims = rng.sample(range(HOSTS + spares), many)
    hits = tuple((rng.choice(TARGETS), victim) for victim in victims)
    return Event(seed, hits, rng.choice(MOMENTS), rng.randrange(1, 8), rng.uniform(0.0, 0.4))


def document(spares: int) -> dict[str, Any]:
    """The job: limits that no series reaches."""
    evaluated = {"source": "synthetic", "examples": 512, "eval_examples": 240, "shape": [8, 8]}
    train = digits(steps=STEPS, batch=24, data=evaluated, eval={"every": 10}, checkpoint={"every": EVERY, "keep": 3})
    limits = {"restarts": {"crash": 50, "in_place": 50}, "timeouts": {"save": "1m"}, "grace": "60s"}
    return job(train, hosts=HOSTS, per_host=1, spares=spares, **limits)


class Series(RunFiles):
    """A run and the events that happen to it."""

    def __init__(self, folder: Path, spares: int) -> None:
        super().__init__(folder / "run")
        self.folder, self.spares = folder, spares
        self._pids: set[int] = set()

    def table(self) -> dict[int, list[int]]:
        """The ranks of each host, as the run folder has them."""
        with contextlib.suppress(OSError, ValueError):
            return {one["host"]: one["ranks"] for one in json.loads((self.run / "agents.json").read_text())}
        return {}

    def names(self) -> set[str]:
        """The files of the run, with `0` for each number in their names, and those for temporary files."""
        places = [self.run, self.folder / "tmp"]
        files = [file.relative_to(self.folder) for place in places for file in place.rglob("*")]
        return {re.sub(r"[0-9a-f]{8,}|\d+", "0", str(file)) for file in files}

    def begin(self) -> Running:
        """Starts the run, with a folder of its own for temporary files."""
        (self.folder / "tmp").mkdir(parents=True)
        return Running(self.folder, document(self.spares), env={"TMPDIR": str(self.folder / "tmp")})

    def lines(self, seed: str, count: int, undisturbed: Undisturbed) -> Iterator[dict[str, Any]]:
        """One run with its events; the line of each, and of the end."""
        events = [draw(f"{seed}:{number}", self.spares) for number in range(count)]
        with self.begin() as running:
            while events and running.process.poll() is None:
                many = 1 + len(list(itertools.takewhile(lambda event: event.moment in STARTS, events[1:])))
                yield from self._carry_out(events[:many], running)
                del events[:many]
            result = running.wait()
        wrong = [] if result.code == 0 else [f"it ended with {result.code}: {result.verdict['message']}"]
        other = [step for step, loss in undisturbed.losses.items() if result.losses.get(step) != loss]
        wrong += [f"the losses of {len(other)} steps differ, the first at step {other[0]}"] if other else []
        left = alive(sorted(self._pids))
        wrong += [f"processes {left} are left"] if left else []
        files = sorted(self.names() - undisturbed.names)
        wrong += [f"files are left: {', '.join(files)}"] if files else []
        causes = Counter(record["cause"] for record in self.records())
        yield {"seed": seed, "spares": self.spares, "losses": True, "ends": causes, "wrong": wrong}

    def _carry_out(self, events: Sequence[Event], running: Running) -> list[dict[str, Any]]:
        """The lines of an event and of those that hit the restart after it; those only that came before the end."""
        lines, before, hits = list[dict[str, Any]](), len(self.records()), list[Hit]()
        for event in events:
            was = self._await(event, running)
            if running.process.poll() is not None:
                break
            began, saved = time.monotonic(), self.newest()
            struck = self._strike(event, running)
            hits += struck
            lines.append({**dataclasses.asdict(event), "was": was, "hit": struck, "saved_then": saved})
            if event is events[0] and any(hit.ranks for hit in struck):
                self._until_judged(before, running)
        if not lines:
            return []
        lines[-1]["until_saved_s"] = self._until_saved(running, saved, began)
        is_over = running.process.poll() is not None
        ended = self.records()[before:]
        lines[-1]["ended"] = [(one["cause"], one["verdict"]["code"], one["rank"]) for one in ended]
        lines[-1]["reached"] = [next(reversed(one["restart"]), None) for one in ended]
        lines[-1]["wrong"] = self._judge(lines[-1]["ended"], hits, is_alone=len(lines) == 1, is_over=is_over)
        if lines[-1]["until_saved_s"] is None and not is_over:
            lines[-1]["wrong"].append(f"nothing was saved after step {saved} within {PATIENCE_S:.0f} s")
        return [{"wrong": [], **line} for line in lines]

    def _await(self, event: Event, running: Running) -> str:
        """Returns at the moment of the event, or when the run has ended; the moment as it was."""
        ended, end, begun, was = running.process.poll, time.monotonic() + PATIENCE_S, self.step() + event.after, "step"
        while ended() is None and time.monotonic() < end:
            is_there = bool(self.table()) and len(running.agents()) == HOSTS + self.spares
            if event.moment == "replace" or (is_there and (event.moment in STARTS or self.step() >= begun)):
                break
            time.sleep(0.02)
        stepped = self.step()
        while event.moment == "save" and ended() is None and not self.saves() and time.monotonic() < end:
            time.sleep(0.002)
        while event.moment in PHASES and ended() is None and time.monotonic() < end:
            was = self._phase(running)
            if was == event.moment or self.step() > stepped + 2 * EVERY:
                break
        share = {"step": 1.0, "replace": 2.0}.get(event.moment, 0.05)
        time.sleep(event.delay_s * share)
        return was if event.moment in PHASES else event.moment

    def _phase(self, running: Running) -> str:
        """The phase of a rank, by the first agent that answers."""
        for place in range(len(self.table())):
            if (found := PHASE.search(running.scrape(place))) is not None:
                return found[1]
        return ""

    def _strike(self, event: Event, running: Running) -> list[Hit]:
        """Kills; whom."""
        table, agents = self.table(), running.agents()
        self._pids |= set(descendants(running.process.pid))
        pids = {host: _pids(target, agents.get(host)) for target, host in event.hits}
        for pid in itertools.chain.from_iterable(pids.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [Hit(target, host, table.get(host, []) if pids[host] else []) for target, host in event.hits]

    def _until_judged(self, before: int, running: Running) -> None:
        """Waits until an attempt has ended; not for ever, as it may have been killed while nothing ran there."""
        end = time.monotonic() + PATIENCE_S / 10
        while len(self.records()) == before and running.process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)

    def _until_saved(self, running: Running, saved: int, began: float) -> float | None:
        """Seconds until a later step is on storage; None where the run ends first."""
        while running.process.poll() is None and time.monotonic() < began + PATIENCE_S:
            if self.newest() > saved + EVERY:  # the next may have been under way
                return round(time.monotonic() - began, 2)
            time.sleep(0.05)
        return None

    def _judge(self, found: Sequence[End], hits: Sequence[Hit], *, is_alone: bool, is_over: bool) -> list[str]:
        """What is wrong with the attempts that ended, in words. `is_alone`: nothing hit the restart after it."""
        right: set[End] = set()
        for hit in hits:
            for rank in hit.ranks:
                right |= {("killed", 137, rank)} if hit.target != "agent" else set()
                right |= {("lost", 81, rank)} if hit.target != "process" else set()
        ends = [one for one in found if one[0] != "done"]
        if is_alone:
            wrong = [f"{one} ended it, not {sorted(right)}" for one in ends if one not in right]
        else:  # ranks may have moved since the table was read
            wrong = [f"{one} ended it" for one in ends if one[0] not in ("killed", "lost")]
        if right and not found and not is_over:
            wrong.append(f"no attempt ended, of {sorted(right)}")
        if len(ends) > len(hits):
            wrong.append(f"{len(ends)} attempts ended of {len(hits)} kills")
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
    undisturbed = dict[int, Undisturbed]()
    for number in itertools.count():
        left = given.count - found["events"]
        if left <= 0:
            break
        spares = number % 2 if given.spares is None else given.spares
        with tempfile.TemporaryDirectory(prefix="kills-") as place:
            folder = Path(place)
            if spares not in undisturbed:
                undisturbed[spares] = _undisturbed(folder / "undisturbed", spares)
            lines = []
            for line in Series(folder / "series", spares).lines(
                f"{given.seed}:{number}", min(SERIES, left), undisturbed[spares]
            ):
                print(json.dumps(line), flush=True)
                lines.append(line)
            found["events"] += max(1, len(lines) - 1)
            found.update("wrong" if line["wrong"] else "right" for line in lines)
            if given.keep and any(line["wrong"] for line in lines):
                with contextlib.suppress(shutil.Error):  # a socket that is left
                    shutil.copytree(folder, given.keep / f"{given.seed}-{number}", dirs_exist_ok=True, symlinks=True)
    print(json.dumps({"seed": given.seed, **found}), file=sys.stderr)
    return min(found["wrong"], 99)


def _undisturbed(folder: Path, spares: int) -> Undisturbed:
    series = Series(folder, spares)
    with series.begin() as running:
        result = running.wait()
    assert result.code == 0, result.stderr
    return Undisturbed(result.losses, series.names())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
