"""Kill runs at random moments and check their records: tests.gang.kills --seed 1 --count 200.

Each kill is a `launcher run` of its own with real agents: SIGKILL at a random step or during the
start, for one rank (`child`), the agent of a host (`agent`), the agent of host 0 (`leader`), every
agent with its processes (`gang`), or these and the launcher (`all`, after which the run is started
again). It may restart either never, so that the summary describes the kill, or often enough to
finish. The truth comes from files that the program writes itself. Each kill prints a line of JSON:
the kill, the records, and what is `wrong` with them (empty if nothing is).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gang.agents import write_program
from tests.gang.run_files import read_json_lines
from tests.gang.runs import Running, digits_block, kill_processes, make_job

STEPS, SAVE_EVERY, PACE_S = 60, 10, 0.04
TRAINER_STEPS, TRAINER_SAVE_EVERY = 400, 50
# By which what agents know may be behind: their messages and files come once a second.
MAX_REPORT_LAG_S = 3.0
MAX_COMMIT_LAG_S = 1.0  # by which a commit may be: that is sent, and written, at once
# Of the wall clock that the seconds may miss: 2 %, with threefold slack for a busy machine.
MAX_CLOCK_ERROR = 0.06

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
    if RANK == 0 and step % {SAVE_EVERY} == 0:
        open(f"{{truth}}/saved/draft", "w").close()
        os.rename(f"{{truth}}/saved/draft", f"{{truth}}/saved/{{step}}")
        note("saved", step)
        say(committed=step)
say(phase="done", step={STEPS})
"""


@dataclasses.dataclass(frozen=True)
class Kill:
    """The properties of one kill."""

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
        """Return the expected cause, code and rank of the verdict."""
        if self.target == "child":
            return "killed", 137, self.victim
        return "lost", 81, self.victim * self.per_host if self.target == "agent" else 0


def draw_kill(seed: str, hosts: int | None, is_trainer: bool) -> Kill:
    """Draw the kill of a seed."""
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
class KillFolder:
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
            train = digits_block(
                steps=TRAINER_STEPS, checkpoint={"every": TRAINER_SAVE_EVERY, "keep": 3}
            )
            return make_job(train, hosts=self.kill.hosts, per_host=1, **keys)
        keys["processes_per_host"] = self.kill.per_host
        keys["command"] = list(write_program(self.folder, PROGRAM))
        return make_job(hosts=self.kill.hosts, per_host=self.kill.per_host, **keys)

    def notes(
        self, rank: int, kind: str, attempt: int | None = None
    ) -> list[tuple[int, int, float]]:
        """Return (attempt, step, Unix time) of a rank's notes of a kind."""
        with contextlib.suppress(FileNotFoundError):
            lines = [
                line.split() for line in (self.truth / f"steps-{rank}").read_text().splitlines()
            ]
            notes = [
                (int(line[1]), int(line[2]), float(line[3])) for line in lines if line[0] == kind
            ]
            return [note for note in notes if attempt is None or note[0] == attempt]
        return []

    def step(self) -> int:
        """Return the newest step of rank 0."""
        if not self.kill.is_trainer:
            return max((step for _, step, _ in self.notes(0, "step")), default=-1)
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(
                json.loads((self.run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
            )
        return -1

    def saved(self) -> int | None:
        """Return the newest step on storage."""
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
            return read_json_lines(self.run / "attempts.jsonl")
        return []


def kill_at_moment(folder: KillFolder, running: Running) -> float | None:
    """Wait for the moment and kill. Return the Unix time, or None if the run ended before."""
    kill = folder.kill
    if kill.at_step is not None:
        while folder.step() < kill.at_step and running.process.poll() is None:
            time.sleep(0.01)
    time.sleep(kill.delay_s * (PACE_S if kill.at_step is not None else 4.0))
    while running.process.poll() is None:
        agents, children = running.agent_pids(), running.rank_pids()
        pids = {
            "child": [children[kill.victim]] if kill.victim in children else [],
            "agent": [agents[kill.victim]] if kill.victim in agents else [],
            "leader": [agents[0]] if 0 in agents else [],
        }.get(
            kill.target,
            [agents[host] for host in sorted(agents)] if len(agents) == kill.hosts else [],
        )
        if pids:
            kill_processes(pids + ([running.process.pid] if kill.target == "all" else []))
            return time.time()
        time.sleep(0.01)
    return None


def process_start_time(pid: int) -> float:
    """Return the Unix time of a process's start, which this process may notice late."""
    # proc_pid_stat(5): starttime.
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def carry_out(kill: Kill, folder: Path) -> dict[str, Any]:
    """Carry out one kill and return its line."""
    files = KillFolder(kill, folder)
    with Running(folder, files.document(), env=files.env) as running:
        started_at = process_start_time(running.process.pid)
        killed_at = kill_at_moment(files, running)
        saved_step = files.saved()
        if kill.target != "all":
            result = running.wait()
    first_summary = None
    if kill.target == "all" and killed_at is not None:
        first_summary = (
            json.loads((files.run / "summary.json").read_text())
            if (files.run / "summary.json").exists()
            else None
        )
        with Running(folder, files.document(), env=files.env) as running:
            started_at = process_start_time(running.process.pid)
            result = running.wait()
    ended_at = time.time()
    summary_written_at = (files.run / "summary.json").stat().st_mtime
    summary, total_s = result.summary, sum(result.summary["goodput"]["seconds"].values())
    line = {
        **dataclasses.asdict(kill),
        "killed_at_s": killed_at and round(killed_at - started_at, 2),
        "saved_then": saved_step,
        "wall_s": round(ended_at - started_at, 2),
        "seconds": round(total_s, 2),
        "seconds_off": round(
            (total_s - (summary_written_at - started_at)) / (summary_written_at - started_at), 4
        ),
        "outer_off": round((total_s - (ended_at - started_at)) / (ended_at - started_at), 4),
        "found": {key: summary[key] for key in ("status", "step", "saved", "restarts")},
        "verdict": {
            key: summary["verdict"][key] for key in ("cause", "code", "rank", "step", "message")
        },
        "attempts": [
            (attempt["cause"], attempt["rank"], attempt["last_committed"])
            for attempt in files.records()
        ],
    }
    wrong = find_errors(
        files, killed_at, saved_step, result.code, summary, line, result.stdout, first_summary
    )
    return line | {"wrong": wrong}


def find_errors(
    folder: KillFolder,
    killed_at: float | None,
    saved_step: int | None,
    code: int,
    summary: dict[str, Any],
    line: dict[str, Any],
    stdout: str,
    first_summary: dict[str, Any] | None,
) -> list[str]:
    """Return what is wrong with the records of a kill."""
    kill, errors, verdict = folder.kill, [], summary["verdict"]

    def expect(name: str, value: Any, *expected: Any) -> None:
        if value not in expected:
            errors.append(f"{name} is {value}, not {' or '.join(map(str, expected))}")

    expect("exit code", code, verdict["code"])
    if abs(line["seconds_off"]) > MAX_CLOCK_ERROR:
        errors.append(f"the seconds are {line['seconds_off']:.1%} off")
    steps = TRAINER_STEPS if kill.is_trainer else STEPS
    cause, cause_code, rank = kill.cause
    records = [(attempt["cause"], attempt["rank"]) for attempt in folder.records()]
    is_finished = killed_at is None or kill.recovers or kill.target == "all"
    if is_finished:
        expect("cause", verdict["cause"], "done")
        expect("step", summary["step"], steps)
        expect(
            "saved", summary["saved"], steps if kill.is_trainer or steps % SAVE_EVERY == 0 else None
        )
    else:
        expect(
            "cause", (verdict["cause"], verdict["code"], verdict["rank"]), (cause, cause_code, rank)
        )
        errors += _find_step_errors(folder, killed_at or 0.0, summary, saved_step)
    if killed_at is None:
        expect("records", records, [("done", None)])
    elif (
        kill.target == "all"
    ):  # another run: the killed one is on record before it, unless it had written nothing yet
        expect("restarts", summary["restarts"], {})
        expect(
            "records",
            records,
            [("lost", 0), ("done", None)],
            *([[("done", None)]] if first_summary is None else []),
        )
    else:
        expect("restarts", summary["restarts"], {cause: 1} if kill.recovers else {})
        expect("records", records, [(cause, rank), *([("done", None)] if kill.recovers else [])])
    if killed_at is not None and folder.records()[0]["cause"] != "done":
        committed = _possible_commits(folder, killed_at, saved_step)
        # Committed while it was being killed.
        next_save = (saved_step or 0) + (TRAINER_SAVE_EVERY if kill.is_trainer else SAVE_EVERY)
        expect("committed on record", folder.records()[0]["last_committed"], *committed, next_save)
    if killed_at is not None and is_finished and saved_step is not None:
        errors += _find_resume_errors(folder, saved_step, stdout)
    return errors


def _find_step_errors(
    folder: KillFolder, killed_at: float, summary: dict[str, Any], saved_step: int | None
) -> list[str]:
    """Check the steps in the summary of a run that the kill ended."""
    kill, errors = folder.kill, []
    summary_step = summary["step"] if summary["step"] is not None else 0
    if kill.is_trainer:
        low, high = (kill.at_step or 0) - 200, folder.step() + 2
    else:
        ranks = range(kill.hosts * kill.per_host)
        low = min(
            max(
                (
                    step
                    for _, step, when in folder.notes(r, "step")
                    if when < killed_at - MAX_REPORT_LAG_S
                ),
                default=0,
            )
            for r in ranks
        )
        high = 1 + min(
            max((step for _, step, _ in folder.notes(r, "step")), default=0) for r in ranks
        )
    if not low <= summary_step <= high:
        errors.append(f"step is {summary_step}, not between {low} and {high}")
    if kill.target == "child" and not kill.is_trainer:
        victim_step = max((step for _, step, _ in folder.notes(kill.victim, "step")), default=0)
        if (summary["verdict"]["step"] or 0) not in (
            victim_step,
            victim_step - 1,
        ):  # it may die between its note and its report
            errors.append(f"the verdict's step is {summary['verdict']['step']}, not {victim_step}")
    errors += [] if kill.is_trainer else _find_lost_work_errors(folder, killed_at, summary)
    committed = _possible_commits(folder, killed_at, folder.saved())
    if summary["saved"] not in committed:
        errors.append(f"saved is {summary['saved']}, not {' or '.join(map(str, committed))}")
    return errors


def _find_lost_work_errors(
    folder: KillFolder, killed_at: float, summary: dict[str, Any]
) -> list[str]:
    """Check the lost work: from the last recorded commit, or the first step, to the kill."""
    steps, committed = folder.notes(0, "step"), folder.records()[0]["last_committed"]
    if not steps:
        return []
    started_at = next((when for _, step, when in steps if step == committed), steps[0][2])
    lost_s = summary["goodput"]["seconds"]["lost_work"]
    expected_s = max(0.0, killed_at - started_at)
    if not max(0.0, expected_s - MAX_REPORT_LAG_S) <= lost_s <= expected_s + MAX_COMMIT_LAG_S:
        return [f"the lost work is {lost_s:.1f} s, not {expected_s:.1f} s"]
    return []


def _possible_commits(
    folder: KillFolder, killed_at: float, newest: int | None
) -> tuple[int | None, ...]:
    """Return the possible last commits: the newest step, and the previous one if it is fresh."""
    kill = folder.kill
    commits = [when for _, step, when in folder.notes(0, "saved") if step == newest]
    is_fresh = newest is not None and (
        kill.is_trainer or commits[-1] > killed_at - MAX_COMMIT_LAG_S
    )
    previous_save = (newest or 0) - (TRAINER_SAVE_EVERY if kill.is_trainer else SAVE_EVERY)
    return (newest, *((previous_save or None,) if is_fresh else ()))


def _find_resume_errors(folder: KillFolder, saved_step: int, stdout: str) -> list[str]:
    """Check that the attempt after the kill resumed from what was on storage, or later."""
    if folder.kill.is_trainer:
        resumed_steps = [
            int(text.split("resumed at step ")[1].split()[0])
            for text in stdout.splitlines()
            if "resumed at" in text
        ]
    else:
        resumed_steps = [step for _, step, _ in folder.notes(0, "restored")][1:]
    if not resumed_steps or resumed_steps[-1] < saved_step:
        return [f"step {saved_step} was saved, but it went on from {resumed_steps}"]
    return []


def main(argv: Sequence[str]) -> int:
    """Carry out the kills. The exit code is the number of wrong ones, at most 99."""
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
    arguments = parser.parse_args(argv)
    causes: Counter[str] = Counter()
    for number in range(arguments.first, arguments.first + arguments.count):
        kill = draw_kill(f"{arguments.seed}:{number}", arguments.hosts, arguments.trainer)
        folder = Path(tempfile.mkdtemp(prefix="kill-"))
        try:
            line = carry_out(kill, folder)
        except Exception as error:  # a run that cannot be judged is a finding too
            line = {**dataclasses.asdict(kill), "wrong": [f"{type(error).__name__}: {error}"]}
        print(json.dumps(line), flush=True)
        causes["wrong" if line["wrong"] else "right"] += 1
        if line["wrong"] and arguments.keep:
            shutil.copytree(folder, arguments.keep / kill.seed, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"seed": arguments.seed, **causes}), file=sys.stderr)
    return min(causes["wrong"], 99)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
