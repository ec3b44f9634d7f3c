"""Kills runs at random moments and judges what their records say: python -m tests.gang.kills --seed 1 --count 200

Each kill is a `launcher run` of its own, with real agents: SIGKILL at a random step, or while
everything still starts, for one rank (`child`), the agent of a host (`agent`), host 0's (`leader`),
every agent with its processes (`gang`) or these and the launcher (`all`, after which the run is
started again). Its restarts are either none, so that the summary is of the kill, or enough to
finish. What is true comes from files that the program writes by itself. One JSON line for each
kill: what was drawn, what was found, and what is `wrong`, which is empty when all is right.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gang.agents import program
from tests.gang.runs import Running, _kill, digits, job

STEPS, EVERY, PACE_S = 60, 10, 0.04
TRAINER_STEPS, TRAINER_EVERY = 400, 50
LATE_S = 3.0  # by which what agents know may be behind: their messages and files come once a second
FRESH_S = 1.0  # by which a commit may be: that is sent, and written, at once
SHARE = 0.02  # of the wall clock that the seconds may miss

# Every rank writes its steps to TRUTH, rank 0 commits; both are reported after they are true. A
# step begins when all ranks have ended the one before, as collectives have it.
PROGRAM = f"""
import mmap, struct
truth = os.environ["TRUTH"]
with open(f"{{truth}}/gang", "r+b") as file:
    gang = mmap.mmap(file.fileno(), 8 * SIZE)
def meet(step):
    struct.pack_into("q", gang, 8 * RANK, ATTEMPT * 1_000_000 + step)
    while min(struct.unpack(f"{{SIZE}}q", gang[:])) < ATTEMPT * 1_000_000 + step:
        time.sleep(0.002)
log = os.open(f"{{truth}}/steps-{{RANK}}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def note(kind, step):
    os.write(log, f"{{kind}} {{ATTEMPT}} {{step}} {{time.time()}}\\n".encode())
saved = max((int(name) for name in os.listdir(f"{{truth}}/saved") if name.isdecimal()), default=0)
note("restored", saved)
say(phase="restore", step=0)
if saved:
    say(restored=saved)
for step in range(saved + 1, {STEPS} + 1):
    meet(step - 1)
    time.sleep({PACE_S})
    note("step", step)
    say(phase="step", step=step)
    if RANK == 0 and step % {EVERY} == 0:
        open(f"{{truth}}/saved/draft", "w").close()
        os.rename(f"{{truth}}/saved/draft", f"{{truth}}/saved/{{step}}")
        note("saved", step)
        say(committed=step)
say(phase="done", step={STEPS})
"""


@dataclasses.dataclass(frozen=True)
class Kill:
    """What was drawn for one kill."""

    seed: str
    hosts: int
    per_host: int
    target: str  # child | agent | leader | gang | all
    victim: int  # a rank, of child; a host, of agent
    at_step: int | None  # of rank 0; None: while everything starts
    delay_s: float  # after that
    recovers: bool
    is_trainer: bool

    @property
    def cause(self) -> tuple[str, int, int]:
        """The cause, the code and the rank of its verdict."""
        if self.target == "child":
            return "killed", 137, self.victim
        return "lost", 81, self.victim * self.per_host if self.target == "agent" else 0


def draw(seed: str, hosts: int | None, is_trainer: bool) -> Kill:
    """The kill of a seed."""
    rng = random.Random(seed)
    hosts = hosts or rng.choice([1, 2])
    per_host = 1 if is_trainer else rng.choice([1, 2])
    target = rng.choice(["child", "agent", "leader", "gang", "all"])
    last = (TRAINER_STEPS - 100) if is_trainer else STEPS - 10
    return Kill(
        seed,
        hosts,
        per_host,
        target,
        victim=rng.randrange(hosts * per_host if target == "child" else hosts),
        at_step=None if rng.random() < 0.15 else rng.randrange(last),
        delay_s=rng.uniform(0.0, 0.5),
        recovers=rng.random() < 0.5,
        is_trainer=is_trainer,
    )


@dataclasses.dataclass
class Place:
    """The folder of one kill: what the program wrote, and what the run did."""

    kill: Kill
    folder: Path

    def __post_init__(self) -> None:
        self.truth, self.run = self.folder / "truth", self.folder / "run"
        (self.truth / "saved").mkdir(parents=True)
        (self.truth / "gang").write_bytes(bytes(8 * self.kill.hosts * self.kill.per_host))
        self.env = {"TRUTH": str(self.truth), "MARKS": str(self.folder)}

    def document(self) -> dict[str, Any]:
        limit = 2 if self.kill.recovers else 0
        keys: dict[str, Any] = {
            "restarts": {"crash": limit, "in_place": limit},
            "timeouts": {"rendezvous": "20s"},
        }
        if self.kill.is_trainer:
            train = digits(steps=TRAINER_STEPS, checkpoint={"every": TRAINER_EVERY, "keep": 3})
            return job(train, hosts=self.kill.hosts, per_host=1, **keys)
        keys["processes_per_host"] = self.kill.per_host
        keys["command"] = list(program(self.folder, PROGRAM))
        return job(hosts=self.kill.hosts, per_host=self.kill.per_host, **keys)

    def notes(
        self, rank: int, kind: str, attempt: int | None = None
    ) -> list[tuple[int, int, float]]:
        """(attempt, step, Unix time) of what a rank noted."""
        with contextlib.suppress(FileNotFoundError):
            lines = [
                line.split() for line in (self.truth / f"steps-{rank}").read_text().splitlines()
            ]
            found = [
                (int(line[1]), int(line[2]), float(line[3])) for line in lines if line[0] == kind
            ]
            return [note for note in found if attempt is None or note[0] == attempt]
        return []

    def step(self) -> int:
        """The newest step of rank 0."""
        if not self.kill.is_trainer:
            return max((step for _, step, _ in self.notes(0, "step")), default=-1)
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(
                json.loads((self.run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
            )
        return -1

    def saved(self) -> int | None:
        """The newest step on storage."""
        if self.kill.is_trainer:
            steps = [
                int(path.parent.name)
                for path in self.run.glob("checkpoints/*/jaxlaunch.manifest.json")
            ]
        else:
            steps = [
                int(path.name) for path in (self.truth / "saved").iterdir() if path.name.isdecimal()
            ]
        return max(steps, default=None)

    def records(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            return [
                json.loads(line) for line in (self.run / "attempts.jsonl").read_text().splitlines()
            ]
        return []


def strike(place: Place, running: Running) -> float | None:
    """Waits for the moment and kills; the Unix time at which, None when the run was over before."""
    kill = place.kill
    if kill.at_step is not None:
        while place.step() < kill.at_step and running.process.poll() is None:
            time.sleep(0.01)
    time.sleep(kill.delay_s * (PACE_S if kill.at_step is not None else 4.0))
    while running.process.poll() is None:
        agents, children = running.agents(), running.children()
        pids = {
            "child": [children[kill.victim]] if kill.victim in children else [],
            "agent": [agents[kill.victim]] if kill.victim in agents else [],
            "leader": [agents[0]] if 0 in agents else [],
        }.get(
            kill.target,
            [agents[host] for host in sorted(agents)] if len(agents) == kill.hosts else [],
        )
        if pids:
            for pid in pids + ([running.process.pid] if kill.target == "all" else []):
                _kill(pid, signal.SIGKILL)
            return time.time()
        time.sleep(0.01)
    return None


def started(pid: int) -> float:
    """When a process started, in Unix time: this one may be held up before it can look at the clock."""
    ticks = int(
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    )  # proc_pid_stat(5): starttime
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def once(kill: Kill, folder: Path) -> dict[str, Any]:
    """Carries out one kill; its line."""
    place = Place(kill, folder)
    with Running(folder, place.document(), env=place.env) as running:
        began = started(running.process.pid)
        at = strike(place, running)
        saved = place.saved()
        if kill.target != "all":
            result = running.wait()
    first = None
    if kill.target == "all" and at is not None:
        first = (
            json.loads((place.run / "summary.json").read_text())
            if (place.run / "summary.json").exists()
            else None
        )
        with Running(folder, place.document(), env=place.env) as running:
            began = started(running.process.pid)
            result = running.wait()
    ended = time.time()
    written = (place.run / "summary.json").stat().st_mtime
    summary, spent = result.summary, sum(result.summary["goodput"]["seconds"].values())
    line = {
        **dataclasses.asdict(kill),
        "killed_at_s": at and round(at - began, 2),
        "saved_then": saved,
        "wall_s": round(ended - began, 2),
        "seconds": round(spent, 2),
        "seconds_off": round((spent - (written - began)) / (written - began), 4),
        "outer_off": round((spent - (ended - began)) / (ended - began), 4),
        "found": {key: summary[key] for key in ("status", "step", "saved", "restarts")},
        "verdict": {
            key: summary["verdict"][key] for key in ("cause", "code", "rank", "step", "message")
        },
        "attempts": [(one["cause"], one["rank"], one["last_committed"]) for one in place.records()],
    }
    wrong = judge(place, at, saved, result.code, summary, line, result.stdout, first)
    return line | {"wrong": wrong}


def judge(
    place: Place,
    at: float | None,
    saved: int | None,
    code: int,
    summary: dict[str, Any],
    line: dict[str, Any],
    stdout: str,
    first: dict[str, Any] | None,
) -> list[str]:
    """What is wrong with the records of a kill, in words."""
    kill, wrong, verdict = place.kill, [], summary["verdict"]

    def expect(what: str, found: Any, *right: Any) -> None:
        if found not in right:
            wrong.append(f"{what} is {found}, not {' or '.join(map(str, right))}")

    expect("exit code", code, verdict["code"])
    if abs(line["seconds_off"]) > SHARE:
        wrong.append(f"the seconds are {line['seconds_off']:.1%} off")
    steps = TRAINER_STEPS if kill.is_trainer else STEPS
    cause, cause_code, rank = kill.cause
    records = [(one["cause"], one["rank"]) for one in place.records()]
    is_over = at is None or kill.recovers or kill.target == "all"
    if is_over:
        expect("cause", verdict["cause"], "done")
        expect("step", summary["step"], steps)
        expect("saved", summary["saved"], steps if kill.is_trainer or steps % EVERY == 0 else None)
    else:
        expect(
            "cause", (verdict["cause"], verdict["code"], verdict["rank"]), (cause, cause_code, rank)
        )
        wrong += _steps_wrong(place, at or 0.0, summary, saved)
    if at is None:
        expect("records", records, [("done", None)])
    elif (
        kill.target == "all"
    ):  # another run: the killed one is on record before it, unless it had written nothing yet
        expect("restarts", summary["restarts"], {})
        expect(
            "records",
            records,
            [("lost", 0), ("done", None)],
            *([[("done", None)]] if first is None else []),
        )
    else:
        expect("restarts", summary["restarts"], {cause: 1} if kill.recovers else {})
        expect("records", records, [(cause, rank), *([("done", None)] if kill.recovers else [])])
    if at is not None and place.records()[0]["cause"] != "done":
        right = _committed(place, at, saved)
        after = (saved or 0) + (
            TRAINER_EVERY if kill.is_trainer else EVERY
        )  # committed while it was being killed
        expect("committed on record", place.records()[0]["last_committed"], *right, after)
    if at is not None and is_over and saved is not None:
        wrong += _resumed_wrong(place, saved, stdout)
    return wrong


def _steps_wrong(place: Place, at: float, summary: dict[str, Any], saved: int | None) -> list[str]:
    """The steps of a summary whose run ended by the kill."""
    kill, wrong = place.kill, []
    known = summary["step"] if summary["step"] is not None else 0
    if kill.is_trainer:
        low, high = (kill.at_step or 0) - 200, place.step() + 2
    else:
        ranks = range(kill.hosts * kill.per_host)
        low = min(
            max((step for _, step, when in place.notes(r, "step") if when < at - LATE_S), default=0)
            for r in ranks
        )
        high = 1 + min(
            max((step for _, step, _ in place.notes(r, "step")), default=0) for r in ranks
        )
    if not low <= known <= high:
        wrong.append(f"step is {known}, not between {low} and {high}")
    if kill.target == "child" and not kill.is_trainer:
        own = max((step for _, step, _ in place.notes(kill.victim, "step")), default=0)
        if (summary["verdict"]["step"] or 0) not in (
            own,
            own - 1,
        ):  # it may die between its note and its report
            wrong.append(f"the verdict's step is {summary['verdict']['step']}, not {own}")
    wrong += [] if kill.is_trainer else _lost_wrong(place, at, summary)
    right = _committed(place, at, place.saved())
    if summary["saved"] not in right:
        wrong.append(f"saved is {summary['saved']}, not {' or '.join(map(str, right))}")
    return wrong


def _lost_wrong(place: Place, at: float, summary: dict[str, Any]) -> list[str]:
    """The seconds of steps that the kill cost: from the last commit on record, or the first step, to the kill."""
    steps, since = place.notes(0, "step"), place.records()[0]["last_committed"]
    if not steps:
        return []
    began = next((when for _, step, when in steps if step == since), steps[0][2])
    lost, most = summary["goodput"]["seconds"]["lost_work"], max(0.0, at - began)
    if not max(0.0, most - LATE_S) <= lost <= most + FRESH_S:
        return [f"the lost work is {lost:.1f} s, not {most:.1f} s"]
    return []


def _committed(place: Place, at: float, newest: int | None) -> tuple[int | None, ...]:
    """What may be on record as committed: the newest step on storage, or the one before if that is just so new."""
    kill = place.kill
    commits = [when for _, step, when in place.notes(0, "saved") if step == newest]
    is_fresh = newest is not None and (kill.is_trainer or commits[-1] > at - FRESH_S)
    before = (newest or 0) - (TRAINER_EVERY if kill.is_trainer else EVERY)
    return (newest, *((before or None,) if is_fresh else ()))


def _resumed_wrong(place: Place, saved: int, stdout: str) -> list[str]:
    """Whether the attempt after the kill went on from what was on storage then, or later."""
    if place.kill.is_trainer:
        resumed = [
            int(text.split("resumed at step ")[1].split()[0])
            for text in stdout.splitlines()
            if "resumed at" in text
        ]
    else:
        resumed = [step for _, step, _ in place.notes(0, "restored")][1:]
    if not resumed or resumed[-1] < saved:
        return [f"step {saved} was saved, but it went on from {resumed}"]
    return []


def main(argv: Sequence[str]) -> int:
    """Carries out the kills; the number of those with something wrong is the exit code, 99 at most."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument(
        "--from", type=int, default=0, dest="first", help="the number of the first kill"
    )
    parser.add_argument("--hosts", type=int, choices=[1, 2], help="[default: drawn]")
    parser.add_argument(
        "--trainer", action="store_true", help="the real trainer, in place of a small program"
    )
    parser.add_argument(
        "--keep", type=Path, help="where the folders of kills with something wrong are kept"
    )
    given = parser.parse_args(argv)
    causes: Counter[str] = Counter()
    for number in range(given.first, given.first + given.count):
        kill = draw(f"{given.seed}:{number}", given.hosts, given.trainer)
        folder = Path(tempfile.mkdtemp(prefix="kill-"))
        try:
            line = once(kill, folder)
        except Exception as error:  # a run that cannot be judged is a finding too
            line = {**dataclasses.asdict(kill), "wrong": [f"{type(error).__name__}: {error}"]}
        print(json.dumps(line), flush=True)
        causes["wrong" if line["wrong"] else "right"] += 1
        if line["wrong"] and given.keep:
            shutil.copytree(folder, given.keep / kill.seed, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"seed": given.seed, **causes}), file=sys.stderr)
    return min(causes["wrong"], 99)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
