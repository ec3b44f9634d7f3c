"""Counts over all ranks, kept as their statuses change."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest

from jaxlaunch.launcher.agent.gang.progress import Status, StatusChanges
from jaxlaunch.launcher.agent.leader.rank_statuses import RankStatuses

RANKS = 24
VALUES = {
    "phase": [None, "init", "step", "done"],
    "step": [None, 0, 1, 2, 3],
    "committed": [None, 1, 2],
    "trainer": [False, True],
    "left": [False, True],
    "done": [False, True],
    "jax": [None, "0.10.2", "0.11.2"],
    "exit": [None, 0, 80, -9],
}


def some_status(chance: random.Random, previous: Status) -> Status:
    names = chance.sample(sorted(VALUES), chance.randint(0, 3))
    return dataclasses.replace(previous, **{name: chance.choice(VALUES[name]) for name in names})


def test_incremental_counts_equal_a_full_count() -> None:
    chance = random.Random(7)
    counts, committed = RankStatuses({0: range(RANKS)}), []
    for _ in range(2_000):
        rank, statuses = chance.randrange(RANKS), counts.by_rank
        alike = next(len(list(run)) for _, run in itertools.groupby(statuses[rank:], id))
        counts.set_range(
            range(rank, rank + chance.randint(1, alike)), some_status(chance, statuses[rank])
        )
        committed += [status.committed for status in statuses if status.committed is not None]
        steps = [status.step for status in statuses if status.step is not None]
        assert counts.alive_count == sum(status.exit is None for status in statuses)
        assert counts.unfinished_count == sum(not status.has_finished for status in statuses)
        assert counts.undone_count == sum(not status.done for status in statuses)
        assert counts.unclean_count == sum(not status.has_ended_cleanly for status in statuses)
        assert set(counts.versions) == {status.jax for status in statuses} - {None}
        assert counts.first_step == min(steps, default=None)
        assert counts.last_step == max(steps, default=None)
        assert counts.committed == max(committed, default=None)


def test_status_changes_reproduce_the_statuses_of_a_host() -> None:
    chance = random.Random(8)
    received, changes = RankStatuses({0: range(4), 1: range(4, 12)}), StatusChanges()
    statuses = {rank: Status() for rank in range(4, 12)}
    for turn in range(500):
        if turn % 3:
            status = some_status(chance, statuses[4])
            statuses = dict.fromkeys(statuses, status)
        else:
            rank = chance.choice(sorted(statuses))
            statuses[rank] = some_status(chance, statuses[rank])
        if turn % 5 == 0:  # an event carries the whole status of its rank, outside of a beat
            changes.mark_sent(7, statuses[7])
            received.update({7: statuses[7]})
        received.merge_changes(1, changes.take_changes(statuses))
        assert {rank: received.by_rank[rank] for rank in statuses} == statuses
        assert changes.take_changes(statuses) == {}


HOSTS = 50


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[Status]:
    """Statuses that were changed, each of which made a new one."""
    created: list[Status] = []
    change = Status.with_changes

    def record_change(status: Status, fields: Mapping[str, Any]) -> Status:
        created.append(status)
        return change(status, fields)

    monkeypatch.setattr(Status, "with_changes", record_change)
    return created


def merge_step(statuses: RankStatuses, host: int, step: int) -> None:
    ranks = f"{4 * host}-{4 * host + 3}"
    statuses.merge_changes(host, {ranks: {"phase": "step", "step": step}})


def test_equal_changes_of_many_hosts_share_one_status(created: list[Status]) -> None:
    statuses = RankStatuses({host: range(4 * host, 4 * host + 4) for host in range(HOSTS)})
    for step in range(1, 101):
        for host in range(HOSTS):
            merge_step(statuses, host, step)
    assert len(created) == 100 and len({id(status) for status in statuses.by_rank}) == 1
    with pytest.raises(ValueError, match="step must be"):
        statuses.merge_changes(0, {"0-3": {"step": "x"}})
    assert {status.step for status in statuses.by_rank} == {100}


def test_hosts_at_different_steps_share_statuses(created: list[Status]) -> None:
    chance = random.Random(3)
    statuses = RankStatuses({host: range(4 * host, 4 * host + 4) for host in range(HOSTS)})
    for beat in range(1, 101):
        for host in chance.sample(range(HOSTS), HOSTS):
            merge_step(statuses, host, 20 * beat + chance.randrange(4))
    steps = {status.step for status in statuses.by_rank}
    assert len({id(status) for status in statuses.by_rank}) == len(steps)
    assert len(created) <= 100 * 4 * 4  # from each of four steps to each of four, of 5,000 beats


def test_equal_changes_are_one_entry() -> None:
    changes = StatusChanges()
    statuses = dict.fromkeys(range(8, 16), Status(phase="step", step=1, stepped=True))
    changes.take_changes(statuses)
    stepped = {rank: dataclasses.replace(status, step=2) for rank, status in statuses.items()}
    assert changes.take_changes(stepped) == {"8-15": {"step": 2}}
    stepped[11] = dataclasses.replace(stepped[11], step=3)
    assert changes.take_changes(stepped) == {"11": {"step": 3}}


def test_ranks_that_step_together_are_not_accused_by_the_age_of_their_reports() -> None:
    """Three hosts make 50 steps/s and beat once a second; the fourth makes 25 steps/s."""
    statuses, worst = RankStatuses({host: range(host, host + 1) for host in range(4)}), [0] * 4
    by_newest = 0
    for tick in range(1, 400):
        now = tick * 0.1
        for host in range(4):
            if tick % 10 == 3 * host:
                step = int(now * (25 if host == 3 else 50))
                statuses.set_range(
                    range(host, host + 1), Status(phase="step", step=step, stepped=True)
                )
        foremost, newest = statuses.settled_step(now), statuses.last_step
        for host, status in enumerate(statuses.by_rank):
            if status.step is not None and newest is not None:
                worst[host] = max(worst[host], foremost - status.step)
                by_newest = max(by_newest, newest - status.step if host < 3 else 0)
    assert worst[:3] == [0, 0, 0] and by_newest >= 25
    assert worst[3] == pytest.approx(39 * 25, rel=0.1)


def test_first_steps_accuse_no_rank() -> None:
    statuses = RankStatuses({0: range(1), 1: range(1, 2)})
    assert statuses.settled_step(0.0) == 0
    statuses.update({0: Status(phase="step", step=1), 1: Status(phase="step", step=5)})
    assert statuses.settled_step(0.2) == 0 and statuses.settled_step(1.9) == 5
