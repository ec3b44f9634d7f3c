"""Kill and stop a training at random moments: python -m tests.kills --seed 1 --count 200.

The events of one run folder follow each other: KILL, TERM, STOP, INT or SEGV for a process
(`child`), the agent of another host (`agent`), host 0's (`leader`), all of them (`all`) or
`launcher run` itself, at a step, in a save, in a stop, or while everything starts. Each start goes
on from what the one before has left; the last one finishes, and the losses of all starts together
are those of an undisturbed run, to the bit. What is true comes from the folder of checkpoints. One
JSON line for each event: what was drawn, what was found, and what is `wrong`, which is empty when
all is right. (`python -m tests.gang.kills` judges steps, seconds and restarts of SIGKILL alone.)
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
from tests.gang.runs import (
    Result,
    Running,
    descendant_pids,
    digits_block,
    living_pids,
    make_job,
    run_job,
)

STEPS, EVERY = 150, 6
SERIES = 8  # events of one run folder
SIGNALS = ("KILL", "TERM", "STOP", "INT", "SEGV")
TARGETS = ("child", "agent", "leader", "all", "launcher")
STOP_CAUSES = ("preempted", "interrupted")
MOMENTS = ("step", "step", "save", "save", "stop", "stop", "start")
PAUSE_S = 1.5  # of processes that are stopped, and that nobody may take for lost yet
PATIENCE_S = 600.0
MAX_LAG_S = 3.0  # by which the step on record may be behind: agents send and write it once a second


@dataclasses.dataclass(frozen=True)
class Event:
    """A kill or stop of a run."""

    seed: str
    hosts: int
    target: str
    sends: str
    moment: str
    victim: int  # a rank, of child
    after: int  # steps of this start
    delay_s: float

    @property
    def number(self) -> signal.Signals:
        """The signal."""
        return signal.Signals[f"SIG{self.sends}"]

    @property
    def asks(self) -> bool:
        """Whether it requests a stop, which is answered by a save."""
        return self.sends in ("TERM", "INT") and (self.target != "child" or self.sends == "TERM")

    @property
    def is_pause(self) -> bool:
        """Whether it ends before anyone counts as lost."""
        is_one = self.target in ("agent", "leader", "child") and self.hosts > 1
        return self.sends == "STOP" and not is_one and self.target != "child"


def draw_event(seed: str, hosts: int) -> Event:
    """Draw the event of a seed."""
    rng = random.Random(seed)
    target = rng.choice(TARGETS)
    if target == "agent" and hosts == 1:
        target = "leader"
    chosen, moment = rng.choice(SIGNALS), rng.choice(MOMENTS)
    if chosen == "STOP" and moment != "step" and target in ("child", "agent", "leader"):
        moment = "step"  # else nothing but the grace period ends it
    if moment == "start" and chosen in ("TERM", "INT", "STOP"):
        moment = "step"  # a Python that still imports has no handler
    return Event(
        seed,
        hosts,
        target,
        chosen,
        moment,
        victim=rng.randrange(hosts),
        after=rng.randrange(1, 8),
        delay_s=rng.uniform(0.0, 0.4),
    )


def make_document(hosts: int) -> dict[str, Any]:
    """Return the job, in which each start is one attempt, so that its record is the event's."""
    train = digits_block(steps=STEPS, checkpoint={"every": EVERY, "keep": 3})
    limits = {
        "restarts": {"crash": 0, "in_place": 0},
        "timeouts": {"step": "20s", "save": "1m"},
        "grace": "60s",
    }
    return make_job(train, hosts=hosts, per_host=2 // hosts, **limits)


class Series(RunFiles):
    """A run folder and the events in it."""

    def __init__(self, folder: Path, hosts: int) -> None:
        super().__init__(folder / "run")
        self.folder, self.hosts = folder, hosts
        self._seen: list[tuple[float, int]] = []  # the steps of a start, and when they were seen

    def carry_out(self, event: Event) -> dict[str, Any]:
        """Start the run with an event and return its line."""
        step_before = self.newest()
        with Running(self.folder, make_document(self.hosts)) as running:
            pids = self._strike(event, running)
            saved = self.newest()
            result = running.wait()
            self._until_ended(pids)
        wrong = self._judge(event, result, step_before, saved)
        summary = {key: result.summary[key] for key in ("status", "step", "saved")}
        verdict = {key: result.verdict[key] for key in ("cause", "code", "rank", "step", "message")}
        if not (pids or self.is_done(verdict)):
            wrong.append("the run ended before the event")
        return {
            **dataclasses.asdict(event),
            "saved_then": saved,
            "found": summary,
            "verdict": verdict,
            "wrong": wrong,
        }

    def is_done(self, verdict: Any) -> bool:
        """Check whether the training finished before the event or at its moment."""
        return verdict is not None and verdict["cause"] == "done" and self.newest() == STEPS

    # --- the event --------------------------------------------------------------------------------

    def _strike(self, event: Event, running: Running) -> list[int]:
        """Wait for the moment and send the signal; return the run's pids, none if it was over."""
        poll = running.process.poll
        self._seen = []
        until = time.monotonic() + PATIENCE_S
        begun = self.step() + event.after
        while poll() is None and time.monotonic() < until:
            agents, children = running.agent_pids(), running.rank_pids()
            self._seen.append((time.monotonic(), self.step()))
            is_whole = len(agents) == self.hosts and len(children) == self.hosts
            if is_whole and (event.moment == "start" or self.step() >= begun):
                break
            time.sleep(0.02)
        while (
            event.moment == "save"
            and poll() is None
            and time.monotonic() < until
            and not self.saves()
        ):
            time.sleep(0.002)
        if poll() is not None:
            return []
        pids = [running.process.pid, *descendant_pids(running.process.pid)]
        if event.moment == "stop":
            os.kill(running.process.pid, signal.SIGTERM)
        time.sleep(event.delay_s / (20.0 if event.moment == "save" else 1.0))
        hit = {
            "child": [children[event.victim]],
            "agent": [agents[self.hosts - 1], *self._frozen(event, children, self.hosts - 1)],
            "leader": [agents[0], *self._frozen(event, children, 0)],
            "all": [
                *agents.values(),
                *(children.values() if event.sends in ("KILL", "SEGV", "STOP") else ()),
            ],
            "launcher": [running.process.pid],
        }[event.target]
        _send_signal(hit, event.number)
        if event.sends == "STOP" and event.target != "child":
            self._go_on(event, hit, agents)
        if event.is_pause and event.moment != "stop" and poll() is None:
            os.kill(running.process.pid, signal.SIGTERM)  # it has continued: it is stopped now
        return pids

    def _frozen(self, event: Event, children: dict[int, int], host: int) -> list[int]:
        """Return the processes of a host that is stopped as a whole."""
        return [children[host]] if event.sends == "STOP" else []

    def _go_on(self, event: Event, hit: list[int], agents: dict[int, int]) -> None:
        """Continue what was stopped, after a while or once the gang has given it up."""
        other_agents = [] if event.is_pause else [pid for pid in agents.values() if pid not in hit]
        until = time.monotonic() + (PATIENCE_S if other_agents else PAUSE_S)
        while (not other_agents or living_pids(other_agents)) and time.monotonic() < until:
            time.sleep(0.05)
        _send_signal(hit, signal.SIGCONT)

    def _until_ended(self, pids: list[int]) -> None:
        """Wait for the agents of a killed launcher, which save and write the end."""
        until = time.monotonic() + PATIENCE_S
        while living_pids(pids) and time.monotonic() < until:
            time.sleep(0.05)

    # --- what was found ---------------------------------------------------------------------------

    def _judge(self, event: Event, result: Result, step_before: int, saved: int) -> list[str]:
        """Return what is wrong with the records of an event."""
        verdict, newest = result.verdict, self.newest()
        wrong = []
        if newest < max(step_before, saved):
            wrong.append(
                f"step {max(step_before, saved)} was saved, but now the newest is {newest}"
            )
        if verdict is None:
            return [*wrong, "there is no job result"]
        if self.is_done(verdict):
            return wrong
        wrong += self._verdict_wrong(event, result, verdict)
        wrong += self._summary_wrong(event, result.summary, newest)
        if verdict["cause"] in STOP_CAUSES:
            wrong += self._stop_wrong(event, verdict["message"], newest)
        record = json.loads((self.run / "attempts.jsonl").read_text().splitlines()[-1])
        if record["verdict"]["message"] != verdict["message"]:
            wrong.append(f"the attempt's record says {record['verdict']['message']!r}")
        has_resumed = f"resumed at step {step_before} " in result.stdout
        if step_before and event.moment != "start" and not has_resumed:
            wrong.append(f"it did not resume at step {step_before}")
        return wrong

    def _verdict_wrong(self, event: Event, result: Result, verdict: dict[str, Any]) -> list[str]:
        """Return what is wrong with the job result and the exit code."""
        wrong = []
        causes, rank, words = expected_verdicts(event)
        if (verdict["cause"], verdict["code"]) not in causes:
            wrong.append(f"the cause is {verdict['cause']} ({verdict['code']}), not {causes}")
        if rank is not None and verdict["cause"] not in STOP_CAUSES and verdict["rank"] != rank:
            wrong.append(f"the rank is {verdict['rank']}, not {rank}")
        if verdict["cause"] not in STOP_CAUSES and words not in verdict["message"]:
            wrong.append(f"the message does not say {words!r}")
        if event.target != "launcher" or event.asks or event.is_pause:
            wrong += [f"the exit code is {result.code}"] if result.code != verdict["code"] else []
        return wrong

    def _summary_wrong(self, event: Event, summary: dict[str, Any], newest: int) -> list[str]:
        """Return what is wrong with the steps of the summary."""
        wrong = []
        if (summary["saved"] or 0) != newest:
            wrong.append(f"saved is {summary['saved']}, not {newest}")
        reached = summary["step"] if summary["step"] is not None else 0
        current_step = self._seen[-1][0]
        first = self._seen[0][1]  # of an earlier start
        low = max(
            (step for when, step in self._seen if when < current_step - MAX_LAG_S and step > first),
            default=0,
        )
        high = max(self.step(), newest) + 2
        if event.moment != "start" and not low <= reached <= high:
            wrong.append(f"the step is {reached}, not {low} to {high}")
        return wrong

    def _stop_wrong(self, event: Event, message: str, newest: int) -> list[str]:
        """Return what is wrong with a stop's message about its save."""
        if f"saved at step {newest}" in message or f"step {newest} is saved" in message:
            return []
        if f"nothing new to save after step {newest}" in message:
            return []
        if newest == 0 and ("nothing is saved" in message or "not saved" in message):
            return []
        if (
            "not saved" in message
            and "is saved" not in message
            and event.moment in ("stop", "start")
        ):
            return []  # it names what came between
        return [f"step {newest} is on disk, it says {message!r}"]


def expected_verdicts(event: Event) -> tuple[list[tuple[str, int]], int | None, str]:
    """Return the right causes and codes, the rank, and the words of the message."""
    stopped = ("preempted", 80)
    if event.sends == "INT" and event.asks and event.moment != "stop":
        return [("interrupted", 80)], None, ""
    if event.moment == "stop" or event.asks or event.is_pause:
        # An interrupt during a stop may arrive first at a host that the stop has not reached.
        return [stopped, ("interrupted", 80)] if event.sends == "INT" else [stopped], None, ""
    name = f"SIG{event.sends}"
    if event.target == "child":
        cause = {
            "KILL": ("killed", 137),
            "SEGV": ("killed", 139),
            "STOP": ("hang", 82),
            "INT": ("crash" if event.moment != "start" else "startup", 83),
        }[event.sends]
        words = {"INT": "KeyboardInterrupt", "STOP": ""}.get(event.sends, name)
        return [cause], event.victim, words
    if event.target == "launcher":
        return [stopped], None, ""
    if event.sends == "STOP":
        return [("lost", 81)], 0 if event.target == "leader" else event.hosts - 1, "was lost"
    rank = event.hosts - 1 if event.target == "agent" else 0
    return [("lost", 81)], rank, name


def _send_signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def find_loss_errors(series: Series, undisturbed: dict[int, float]) -> list[str]:
    """Let the run of a series finish; return what is wrong with its losses."""
    result = run_job(series.folder, make_document(series.hosts))
    if result.code != 0:
        return [f"the last start ended with {result.code}: {result.verdict['message']}"]
    other = [step for step, loss in undisturbed.items() if result.losses.get(step) != loss]
    return (
        [f"the losses of {len(other)} steps differ, the first at step {other[0]}"] if other else []
    )


def run_series(
    seed: str, hosts: int, count: int, folder: Path, undisturbed: dict[int, float]
) -> Iterator[dict[str, Any]]:
    """Yield the lines of a series of at most `count` events, and of its end."""
    series = Series(folder, hosts)
    for number in range(count):
        event = draw_event(f"{seed}:{number}", hosts)
        try:
            line = series.carry_out(event)
        except Exception as error:  # a run that cannot be judged is a finding too
            line = {**dataclasses.asdict(event), "wrong": [f"{type(error).__name__}: {error}"]}
        if series.is_done(line.get("verdict")) and not line["wrong"]:
            break  # no event: nothing was hit
        yield line
    yield {
        "seed": seed,
        "hosts": hosts,
        "losses": True,
        "wrong": find_loss_errors(series, undisturbed),
    }


def main(argv: Sequence[str]) -> int:
    """Carry out the events. The exit code is the number of wrong ones, at most 99."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--hosts", type=int, choices=[1, 2], help="[default: in turn]")
    parser.add_argument(
        "--keep", type=Path, help="where the folders of series with something wrong are kept"
    )
    arguments = parser.parse_args(argv)
    counts: Counter[str] = Counter()
    undisturbed: dict[int, dict[int, float]] = {}
    for number in itertools.count():
        remaining = arguments.count - counts["events"]
        if not remaining:
            break
        hosts = arguments.hosts or 2 - number % 2
        with tempfile.TemporaryDirectory(prefix="kills-") as place:
            folder = Path(place)
            if hosts not in undisturbed:
                undisturbed[hosts] = run_job(folder / "undisturbed", make_document(hosts)).losses
            lines = []
            for line in run_series(
                f"{arguments.seed}:{number}",
                hosts,
                min(SERIES, remaining),
                folder / "series",
                undisturbed[hosts],
            ):
                print(json.dumps(line), flush=True)
                lines.append(line)
            counts["events"] += len(lines) - 1
            counts.update("wrong" if line["wrong"] else "right" for line in lines)
            if arguments.keep and any(line["wrong"] for line in lines):
                shutil.copytree(
                    folder, arguments.keep / f"{arguments.seed}-{number}", dirs_exist_ok=True
                )
    print(json.dumps({"seed": arguments.seed, **counts}), file=sys.stderr)
    return min(counts["wrong"], 99)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
