"""Writes the end of an attempt whose host 0 was lost, from what another host knows of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.records import checked
from jaxlaunch.records.attempt import Record, furthest
from jaxlaunch.records.summary import Of, Summary
from jaxlaunch.records.verdict import Verdict
from jaxlaunch.runs import history, unfinished
from jaxlaunch.runs.run_folder import RunFolder
from jaxlaunch.runs.starts import Starts

FRESH_S = 30.0  # a host 0 that lives writes its summary every ten seconds


@dataclasses.dataclass(frozen=True)
class Reported:
    """What another host knows of the attempt when host 0 is lost."""

    attempt: int  # the last that host 0 started on this host; 0: none yet
    started: float  # in Unix time: of this host's agent
    last: Of | None = None  # of host 0's last report; None: it never reported
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of the run, as in that report

    @classmethod
    def of(cls, gang: Mapping[str, Any], attempt: int, started: float) -> Reported:
        """From host 0's last report, `gang`; empty where there was none."""
        if "of" not in gang:
            return cls(attempt, started)
        return cls(attempt, started, checked.read(Of, gang["of"]), gang["seconds"])


def record_lost_leader(
    folder: RunFolder, config: Config, reported: Reported, statuses: Sequence[Status], verdict: Verdict
) -> None:
    """Writes the end of the attempt in place of host 0, which was lost, from what another host knows of it.

    That is host 0's last report; the last summary in `folder`, if it is of the same attempt; and the statuses of this
    host's own processes. The folder may be this host's copy, without what host 0 wrote since the pods started. Nothing
    is written where this host never joined a host 0 that still writes summaries, nor where the end is on record.
    """
    found = folder.summary(config.uid)
    has_joined = reported.attempt > 0 or reported.last is not None
    if not has_joined and found is not None and found.of is not None:
        if _is_fresh(found) and found.of.generation == config.generation:
            return
        if found.of.generation != config.generation:
            unfinished.settle(folder, config.uid)  # host 0 would have done it
    records = folder.records(config.uid)
    if has_joined and records and records[-1].attempt >= reported.attempt > 0:
        # Host 0 went on without this host, which was held up, and has put the end of the attempt on record; or nobody
        # took its place.
        if config.job.replaces and found is not None and found.verdict is None and not _is_fresh(found):
            Starts(folder, config.uid).write(dataclasses.replace(found, verdict=verdict))
        return
    found, of = _last_known(folder, config, reported, records)
    firsts = [status.first_committed for status in statuses if status.first_committed is not None]
    lasts = [status.committed for status in statuses if status.first_committed is not None]
    of = dataclasses.replace(
        of,
        first_committed=_least(of.first_committed, *firsts),
        last_committed=furthest(of.last_committed, *lasts),
    )
    own = _least(*(status.step for status in statuses))
    step = found.step if own is None else own
    record = unfinished.close(of, dataclasses.replace(verdict, step=step))
    end = record.verdict
    folder.append(record)
    before = records[-1].attempt if records else 0
    is_known = reported.last is None or before == of.attempt - 1  # the attempts before this one have their records here
    records.append(record)
    ended = dataclasses.replace(
        found,
        verdict=None if config.job.replaces and has_joined else end,  # another host 0 goes on
        step=step,
        seconds=history.carried(records, time.time(), config.started) if is_known else _of_run(reported, record),
        restarts=history.restarts_by_cause(records),
        saved=furthest(found.saved, *(status.committed for status in statuses)),
        of=of,
    )
    Starts(folder, config.uid).write(ended)


def _last_known(folder: RunFolder, config: Config, reported: Reported, records: Sequence[Record]) -> tuple[Summary, Of]:
    """The attempt that host 0 was in: its seconds as host 0 said last, and its summary where there is one."""
    last = reported.last
    number = max(reported.attempt, 0 if last is None else last.attempt, records[-1].attempt + 1 if records else 1)
    found, of = unfinished.find(folder, config.uid, records) or (None, None)
    if found is None or of is None or (of.generation, of.attempt) != (config.generation, number):
        now = time.time()
        waited = {"rendezvous": max(0.0, now - reported.started)} if last is None else {}  # it was all there was
        of = Of(config.uid, config.generation, number, reported.started, at=now, seconds=waited)
        found = Summary(None, step=None, seconds={}, restarts={})
    if last is not None and last.attempt == number:
        of = dataclasses.replace(
            of,
            started=last.started,
            at=last.at,
            seconds=last.seconds,
            unsafe_s=last.unsafe_s,
            first_committed=_least(of.first_committed, last.first_committed),
            last_committed=furthest(of.last_committed, last.last_committed),
            first_step=of.first_step or last.first_step,
            judged=of.judged or last.judged,
            restart=of.restart or last.restart,
        )
    return found, of


def _of_run(reported: Reported, record: Record) -> dict[str, float]:
    """The seconds of the run by cause: as host 0 said last, with the lost work of the attempt that it was in."""
    seconds = dict(reported.seconds)
    if reported.last is not None and reported.last.attempt == record.attempt:
        for cause, spent in record.seconds.items():
            seconds[cause] = seconds.get(cause, 0.0) + spent - reported.last.seconds.get(cause, 0.0)
    return seconds


def _is_fresh(found: Summary) -> bool:
    """Whether the host 0 that wrote a summary lives."""
    return found.verdict is None and found.of is not None and abs(time.time() - found.of.at) < FRESH_S


def _least(*steps: int | None) -> int | None:
    return min((step for step in steps if step is not None), default=None)
