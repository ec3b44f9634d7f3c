"""The starts of a run: each keeps its record in starts/K of the run folder, which no later start changes.

summary.json of the run folder is that of the newest start, with a row for every start. job.yaml beside it is the job of
the newest start that trained: the one that the checkpoints are of.
`launcher run` writes the job as it was resolved, and the leader of a JobSet's first pods as they got it, in JSON.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlaunch.records.summary import Start, Summary
from jaxlaunch.runs.layout import JOB, SUMMARY, start_file
from jaxlaunch.runs.run_folder import RunFolder

SECRET = {"env", "args", "eval_args"}  # keys of a job whose values may be tokens: they stay in its own file


class Starts:
    """The rows of a run, the last of which is that of start `uid`, and its files."""

    def __init__(self, folder: RunFolder, uid: str) -> None:
        """Begins a start where `uid` is new here; the record of the one before is in its folder then."""
        found = folder.summary()
        self._folder, self._has_job, self._is_new = folder, False, False
        self.known: int | None = None  # the newest step on storage, by the summary of this start
        self._rows = rows(found) or [
            _row(number, folder.summary(name=start_file(number, SUMMARY))) for number in folder.starts()
        ]
        if self._rows and self._rows[-1].uid == uid:
            self.known = None if found is None else found.saved
            return
        if found is not None and self._rows:
            self._keep(found, self._rows[-1].start)
        self._is_new = True
        last = max((row.start for row in self._rows), default=0)
        self._rows.append(Start(last + 1, uid, started=time.time()))

    @property
    def number(self) -> int:
        """K of this start."""
        return self._rows[-1].start

    @property
    def earlier(self) -> Sequence[Start]:
        """The rows of the starts before this one."""
        return self._rows[:-1]

    @property
    def saved(self) -> int:
        """The newest step that earlier starts saved; 0 where they saved none."""
        kept = [self._folder.summary(name=start_file(row.start, SUMMARY)) for row in self.earlier]
        return max((found.saved or 0 for found in kept if found is not None), default=0)

    @property
    def has_written(self) -> bool:
        """Whether an earlier start trained, with its checkpoints where this one has them."""
        has_moved = any(key.startswith("train.checkpoint") for key in self._rows[-1].changed)
        return not has_moved and any(row.has_trained for row in self.earlier)

    @property
    def compared(self) -> Start | None:
        """The newest start before this one that trained, else the newest; its job is what this one's differs from."""
        return next(reversed([row for row in self.earlier if row.has_trained] or self.earlier), None)

    def keep_job(self, job: Mapping[str, Any]) -> None:
        """Keeps the job of a start whose first pods these are, and in its row what changed."""
        if not self._is_new:
            return
        self._folder.write(self.path(JOB), without_secrets(job))
        before = {} if self.compared is None else self._folder.read(start_file(self.compared.start, JOB))
        changed = dict(changed_keys("", before, without_secrets(job))) if before else {}
        self._rows[-1] = dataclasses.replace(self._rows[-1], changed=changed)
        self._keep_newest_job()

    def begin(self, changed: Mapping[str, Sequence[Any]], saved: int | None = None) -> None:
        """Puts the row of this start on storage, before its agents begin; `saved` is the newest step there."""
        self._rows[-1] = dataclasses.replace(self._rows[-1], changed=changed)
        self._keep_newest_job()
        self.write(Summary(None, step=None, seconds={}, restarts={}, saved=saved))

    def _keep_newest_job(self) -> None:
        """Has the job of this start be the run's, where no start has trained yet."""
        if not any(row.has_trained for row in self.earlier):
            self._folder.copy(self.path(JOB), JOB)

    def write(self, summary: Summary) -> None:
        """Replaces summary.json of the run, and at its end that of the start."""
        self._rows[-1] = self._rows[-1].after(summary)
        if self._rows[-1].has_trained and not self._has_job:
            self._folder.copy(self.path(JOB), JOB)
            self._has_job = True
        if summary.verdict is not None:
            self._folder.write(self.path(SUMMARY), dataclasses.replace(summary, starts=()).to_json())
        self._folder.write(SUMMARY, dataclasses.replace(summary, starts=self._rows).to_json())

    def path(self, name: str) -> str:
        """A file of this start, below the run folder."""
        return start_file(self.number, name)

    def _keep(self, found: Summary, number: int) -> None:
        """Puts the record of the start before into its folder, where a kill prevented it."""
        record, name = dataclasses.replace(found, starts=()), start_file(number, SUMMARY)
        has_begun = found.of is not None or not found.starts  # else it was killed before its agents began
        if has_begun and self._folder.summary(name=name) != record:
            self._folder.write(name, record.to_json())


def changed_keys(path: str, then: Any, now: Any) -> Iterator[tuple[str, list[Any]]]:
    """Each dotted key of two jobs whose values differ, with both, unless they may be secret; lists are values."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*then, *now]):
            yield from changed_keys(f"{path}.{key}" if path else str(key), then.get(key), now.get(key))
    elif then != now:
        yield path, ["…", "…"] if SECRET & set(path.split(".")) else [then, now]


def without_secrets(job: Any) -> Any:
    """The job with "…" in place of values that may be tokens: more people read what pods write than the job's file."""
    if not isinstance(job, Mapping):
        return job
    return {
        key: dict.fromkeys(value, "…") if key in SECRET and isinstance(value, Mapping) else without_secrets(value)
        for key, value in job.items()
    }


def rows(found: Summary | None) -> list[Start]:
    """The starts of a run, given by its summary; none where there is none."""
    if found is None:
        return []
    return list(found.starts) or [_row(1, found)]


def _row(number: int, found: Summary | None) -> Start:
    """The row of a start, by its own summary."""
    if found is None:
        return Start(number, "", 0.0)
    of, last = found.of, found.step or found.saved or None
    first = 1 if of is None else of.first_step
    return Start(
        number,
        "" if of is None else of.uid,
        0.0 if of is None else of.started,
        None if of is None else of.at,
        None if found.verdict is None else found.verdict.code,
        first_step=first if first is not None and last is not None and last >= first else None,
        last_step=last,
    )
