"""Invariants of the gang over random event sequences, without I/O and clock."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.gang import config
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.launcher.agent.gang.protocol import Hello
from jaxlaunch.launcher.agent.leader import gang as actions
from jaxlaunch.launcher.agent.leader.gang import KILL_TIMEOUT_S, Action, Gang, Stage
from jaxlaunch.records.summary import AttemptRecord
from jaxlaunch.records.verdict import Verdict

RANKS = 2
STEPPING = Status(phase="step", step=3, stepped=True, trainer=True)
TIMEOUTS = {"rendezvous": 60.0, "replace": 30.0, "save": 20.0}


def read_config(hosts: int, **fields: Any) -> Config:
    fields |= {"timeouts_s": TIMEOUTS, "crash_limit": 0, "hold_s": 90.0}
    job = AgentJob("t", ("true",), processes_per_host=RANKS, **fields)
    environ = {contract.LEADER: "127.0.0.1:0", contract.HOSTS: str(hosts), contract.INDEX: "0"}
    return config.read_config({**environ, contract.JOB: job.to_json(), contract.UID: "uid"})


CONFIGS = [
    read_config(3, in_place_limit=0),
    read_config(3, in_place_limit=3),
    read_config(1, in_place_limit=1, deadline_s=300.0),
    read_config(3, in_place_limit=2, replaces=True, preempted_limit=3),
    read_config(4, in_place_limit=3, replaces=True, sizes=(3,)),
    read_config(4, in_place_limit=2, replaces=True, sizes=(2, 3, 4)),
]
HELLO = Hello.from_config(CONFIGS[0], 9400)
STATUSES = [
    dataclasses.replace(STEPPING, step=4),
    dataclasses.replace(STEPPING, step=9, committed=9, first_committed=6),
    dataclasses.replace(
        STEPPING, stopped={"saved": True, "step": 9}, exit=contract.PREEMPTED, committed=9
    ),
    dataclasses.replace(STEPPING, done=True, phase="done", exit=0),
    dataclasses.replace(STEPPING, exit=-9),
]
EVENTS = [
    {"kind": "error", "error": {"type": "ValueError", "message": "boom"}},
    {"kind": "exit", "exit": -9},
    {"kind": "exit", "exit": 1, "text": "Connection closed by peer"},
    {"kind": "hang", "hang": {"phase": "step", "limit_s": 5.0, "elapsed_s": 5.0, "first_rank": 1}},
    {"kind": "left"},
]
EXCESS = {"host": 1, "used_bytes": 9, "limit_bytes": 5}
# How often each event is chosen.
CHOICES = (
    ["join"] * 5 + ["rejoin", "misfit"] + ["lose"] * 2 + ["beat"] * 4 + ["event"] * 2 + ["stacks"]
    + ["gone"] * 3 + ["all gone"] * 2 + ["stop", "evict", "kill"] + ["tick"] * 4 + ["wait"] * 3
)  # fmt: skip


class Simulation:
    """Feeds a gang with events, answers its actions as the server does, and checks each action."""

    def __init__(self, place: Config, present: int, covered: Counter[str]) -> None:
        self.place, self.covered = place, covered
        self.now, self.pods = 100.0, Counter[int]()
        deadline_at = None if place.job.deadline_s is None else self.now + place.job.deadline_s
        self.gang = Gang(place, HELLO, [], self.now, deadline_at)
        # What each connected host was told last, and hosts that were told to leave.
        self.told: dict[int, str] = {}
        self.running: set[int] = set()
        self.judged_at = -math.inf
        self.verdicts: dict[int, list[Verdict]] = {}
        self.messages: dict[int, list[Any]] = {}
        self.tables: dict[int, str] = {}
        self.pending: list[Action] = []
        self.end: actions.Finish | None = None
        for host in range(min(present, place.hosts)):
            self.join(host)

    # --- events -----------------------------------------------------------------------------------

    def join(self, host: int, **changes: Any) -> None:
        changes = {"host": host, "pod": f"pod {host}-{self.pods[host]}", **changes}
        hello = dataclasses.replace(HELLO, **changes)
        reason = self.gang.check_hello(hello)
        if reason is not None:
            self.gang.on_host_refused(hello, reason, self.now)
        else:
            self.forget(host)
            self.gang.on_host_joined(hello, self.now)
            self.told[host] = "nothing"
        self.act()

    def lose(self, host: int) -> None:
        if host in self.told:
            self.forget(host)
            self.gang.on_host_lost(host, "connection closed", self.now)
            self.act()

    def send(self, host: int, kind: str, /, **fields: Any) -> None:
        if host in self.told:
            self.gang.members.record_message(host, self.now)
            message = {"type": kind, "attempt": self.gang.attempt_number, **fields}
            self.gang.take_message(host, message, self.now)
            self.act()

    def report_gone(self, host: int) -> None:
        if self.told.get(host) == "verdict":
            self.running.discard(host)
            self.send(host, "gone")

    def beat(self, host: int, status: Status) -> None:
        ranks = self.gang.attempt.ranks.ranks_by_host.get(host)
        if host in self.told and self.gang.attempt.number == self.gang.attempt_number:
            self.gang.members.record_message(host, self.now)
            changes = {} if ranks is None else {f"{ranks[0]}-{ranks[-1]}": status.to_wire()}
            self.gang.take_beat(host, self.gang.attempt_number, changes, self.now)
            self.act()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.gang.on_tick(self.now)
        self.act()

    def apply(self, choice: str, host: int, variant: int) -> None:
        """Apply a random event, if the host can send it now."""
        ranks = self.gang.members.table.ranks_of(host)
        if choice in ("join", "rejoin", "misfit"):
            # A pod that was lost is followed by another; so is one that is still connected, if it
            # "rejoins".
            self.pods[host] += host not in self.told or (choice == "rejoin" and variant % 2)
            misfit: dict[str, Any] = {"spec": "another"} if variant % 2 else {"generation": 7}
            self.join(host, **(misfit if choice == "misfit" else {}))
        elif choice == "lose":
            self.lose(host)
        elif choice == "beat":
            self.beat(host, STATUSES[variant % len(STATUSES)])
        elif choice in ("event", "stacks") and ranks:
            self.send_from_rank(choice, host, ranks[variant % RANKS], variant)
        elif choice in ("gone", "all gone"):
            for gone_host in [host] if choice == "gone" else list(self.told):
                self.report_gone(gone_host)
        elif choice in ("stop", "evict"):
            self.send(host, "stop", excess=EXCESS if choice == "evict" else None)
        elif choice == "kill":
            self.send(host, "kill")
        elif choice in ("tick", "wait"):
            self.tick(0.2 if choice == "tick" else (1.0, 5.0, 15.0, 40.0)[variant % 4])

    def send_from_rank(self, kind: str, host: int, rank: int, variant: int) -> None:
        if kind == "event":
            status = STATUSES[variant % 2].to_wire()
            self.send(host, "event", rank=rank, status=status, **EVENTS[variant % len(EVENTS)])
        else:
            self.send(host, "stacks", rank=rank, status=STATUSES[0].to_wire(), text="")

    # --- actions ----------------------------------------------------------------------------------

    def act(self) -> None:
        gang = self.gang
        assert set(gang.members.hellos) == set(gang.members.last_message_at)
        while gang.actions:
            action = gang.actions.pop(0)
            is_allowed = isinstance(action, (actions.Say, actions.Send, actions.Disconnect))
            assert self.end is None or is_allowed, "the gang acts after its end"
            self.perform(action)
        assert set(self.told) == set(gang.members.hellos)
        self.covered[gang.stage.name] += 1

    def deliver_message(self, action: actions.Send) -> None:
        for host in action.hosts:
            self.tell(host, action.kind)
        if action.kind == "verdict" and action.hosts:
            attempt, verdict = action.fields["attempt"], action.fields["verdict"]
            self.messages.setdefault(attempt, []).append(verdict)

    def perform(self, action: Action) -> None:
        gang, members = self.gang, self.gang.members
        number, table = gang.attempt_number, members.table
        self.covered[type(action).__name__] += 1
        if isinstance(action, actions.Send):
            self.deliver_message(action)
        elif isinstance(action, actions.SendStart):
            assert len(set(table.hosts)) == len(table), "a host holds two places"
            for host in action.hosts:
                self.tell(host, "start")
                self.running |= {host} & set(table.hosts)
            first_table = self.tables.setdefault(number, table.to_wire())
            assert first_table == table.to_wire(), "hosts of an attempt know different tables"
        elif isinstance(action, actions.Disconnect):
            self.forget(action.host)
        elif isinstance(action, actions.StartAttempt):
            assert gang.stage is Stage.RUN and members.next_size >= len(table)
            present_hosts = set(members.present_hosts)
            assert set(table.hosts) <= present_hosts, "an absent host holds ranks"
            assert 0 in table and len(table) in self.place.gang_sizes
            is_killed = not self.running or self.now > self.judged_at + KILL_TIMEOUT_S
            assert is_killed, "processes of two attempts run at once"
            assert self.tables.keys() <= self.verdicts.keys(), "an attempt has no verdict"
            self.running.clear()
        elif isinstance(action, actions.JudgeAttempt):
            self.judged_at = self.now
            self.verdicts.setdefault(number, []).append(action.verdict)
            assert len(self.verdicts[number]) == 1, "an attempt has two verdicts"
        elif isinstance(action, actions.RecordAttempt):
            assert [action.verdict] == self.verdicts[number]
            recorded = [record.attempt for record in gang.records]
            assert number not in recorded, "an attempt is recorded twice"
            gang.on_attempt_recorded(self.record(action.verdict), self.now)
        elif isinstance(action, actions.WriteEnd):
            gang.on_end_written(self.now)
        elif isinstance(action, actions.Finish):
            self.end = action
            have_left = set(self.told.values()) <= {"leave"}
            assert action.leaves_alone or have_left, "a member does not know that it may leave"

    def tell(self, host: int, kind: str) -> None:
        assert host in self.told, "a message is sent to an absent host"
        assert self.told[host] != "leave", f"a host that was told to leave is sent {kind}"
        if kind in ("start", "verdict", "leave"):
            self.told[host] = kind

    def forget(self, host: int) -> None:
        self.told.pop(host, None)
        self.running.discard(host)

    def record(self, verdict: Verdict) -> AttemptRecord:
        gang, ranks = self.gang, self.gang.attempt.ranks
        steps = ranks.first_committed, gang.attempt.last_committed
        seconds = {"step": 1.0} if ranks.by_rank else {"rendezvous": 1.0}
        place = ("uid", 0, gang.attempt_number, verdict.cause, verdict.rank)
        return AttemptRecord(*place, *steps, seconds, verdict, 1.0, self.now)

    def settle(self) -> None:
        """Let all deadlines pass while nobody answers. Nobody may wait for ever then."""
        # A stage has one deadline; GATHER after a lost attempt, its KILL and LEAVE are the longest
        # chain of them.
        for _ in range(40):
            self.tick(15.0)
        gang = self.gang
        if gang.stage is Stage.RUN:
            started = {host for host, kind in self.told.items() if kind == "start"}
            assert set(gang.members.present_hosts) <= started
        else:
            assert self.end is not None, f"the gang stays in {gang.stage.name}"
        for number, messages in self.messages.items():
            verdict = self.verdicts[number][0].to_json()
            assert messages[0] == verdict, "hosts were told another verdict"
            assert messages.count(messages[0]) == len(messages), "hosts were told two verdicts"


def decode(sequence: bytes) -> Iterator[tuple[str, int, int]]:
    for kind, host, variant in zip(sequence[::3], sequence[1::3], sequence[2::3], strict=False):
        yield CHOICES[kind % len(CHOICES)], host % 4, variant


@pytest.mark.parametrize("place", CONFIGS, ids=range(len(CONFIGS)))
def test_invariants_hold_over_random_event_sequences(place: Config) -> None:
    @settings(
        max_examples=250,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 4), st.binary(min_size=6, max_size=120))
    def check(present: int, sequence: bytes) -> None:
        simulation = Simulation(place, present, covered)
        for choice, host, variant in decode(sequence):
            simulation.apply(choice, host % place.hosts, variant)
        simulation.settle()
        covered["alone"] += simulation.end is not None and simulation.end.leaves_alone
        covered["grown"] += len({len(table.split(",")) for table in simulation.tables.values()}) > 1
        covered["restarts"] += max(simulation.tables, default=0) > 1

    covered: Counter[str] = Counter()
    check()
    # A gang that replaces hosts has too many restarts for a hold in these sequences.
    stages = set(Stage) - ({Stage.HOLD} if place.job.replaces else set())
    assert all(covered[stage.name] for stage in stages) and covered["Finish"], covered
    assert covered["restarts"] >= (place.job.in_place_limit > 0), covered
    if place.job.replaces:
        assert covered["AwaitHosts"] and covered["alone"] and covered["Disconnect"], covered
