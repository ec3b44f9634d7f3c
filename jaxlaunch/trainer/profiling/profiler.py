"""Traces some steps of the loop, at the request of the job or of a person, and reports how they spend their time.

Costs a check for a file per step while nothing is traced. Every rank traces by itself: none waits for another beyond
what its steps do anyway. A failure here is noted, and never ends a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.profiling import breakdown, xplane
from jaxlaunch.trainer.profiling.breakdown import Breakdown
from jaxlaunch.trainer.spec import Profile

KEPT = 10  # traces of a rank; older ones are removed
MAX_BYTES = 1 << 30  # of a trace that is kept
FOLDER, SUMMARY = "profiles", "summary.json"


class Request(NamedTuple):
    """A requested profile: by an agent, which gives it a number, or by the job (None)."""

    number: int | None
    steps: int


class Tracing(NamedTuple):
    """A trace in progress."""

    wanted: Request
    folder: Path
    first: int  # steps that were complete when it began
    until: int


class Profiler:
    """The profiler of one process. `between` is called before every step, by the thread that runs the steps."""

    def __init__(
        self,
        spec: Profile,
        *,
        rank: int,
        run_dir: str | None,
        request: str | None,
        report: Progress,
        settle: Callable[[], None],
        programs: Callable[[], list[str]],
    ) -> None:
        """`request` is the path of the file by which an agent requests a profile; `settle` waits for the dispatched
        steps; `programs` returns the texts of their compiled programs."""
        self._spec, self._rank, self._report = spec, rank, report
        self._request, self._settle, self._programs = request, settle, programs
        self._base = None if run_dir is None or "://" in run_dir else Path(run_dir, FOLDER)
        self._last: int | None = None  # what was complete at the last call, when nothing was traced
        self._tracing: Tracing | None = None
        self._annotation: jax.profiler.StepTraceAnnotation | None = None
        self._readers: list[threading.Thread] = []

    def between(self, step: int) -> None:
        """Begins or ends a trace where one is due; `step` steps are complete or dispatched."""
        if self._tracing is not None:
            self._annotate(None)
            if step >= self._tracing.until:
                self._end(self._tracing, step)
            else:
                self._annotate(step)
        elif self._is_due(step):
            self._begin(step, Request(None, self._spec.steps))
        elif self._request is not None and os.access(self._request, os.F_OK):
            if (wanted := self._take_request(self._request)) is not None:
                self._begin(step, wanted)

    def _is_due(self, step: int) -> bool:
        """Whether the job's own profile begins: once its step is reached, unless this attempt resumed after it."""
        before, self._last = step - 1 if self._last is None else self._last, step
        return self._spec.at is not None and before < self._spec.at <= step

    def pause(self) -> contextlib.AbstractContextManager[Any]:
        """A context that marks time of no step: an evaluation, a save."""
        return jax.profiler.TraceAnnotation(xplane.PAUSE)

    def finish(self, step: int) -> None:
        """Called after the last step: ends the trace in progress, and waits until it is read and reported."""
        if self._tracing is not None:
            self._annotate(None)
            self._end(self._tracing, step)
        for reader in self._readers:
            reader.join()

    # --- the trace ----------------------------------------------------------------------------------------------------

    def _take_request(self, request: str) -> Request | None:
        try:
            with open(request) as file:
                content = json.load(file)
            os.unlink(request)
            return Request(int(content["id"]), int(content["steps"]))
        except (OSError, ValueError, LookupError, TypeError) as fault:
            self._request = None  # not to be read again at every step
            self._report.note(f"rank {self._rank} can no longer be profiled: the request file cannot be read: {fault}")
            return None

    def _begin(self, step: int, wanted: Request) -> None:
        self._settle()  # so that the trace begins with a step
        try:
            folder = self._folder(step)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # a trace of every call of Python is large, and slows what it measures
            jax.profiler.start_trace(folder, profiler_options=options)
        except (OSError, RuntimeError) as fault:
            return self._fail(wanted, step, fault)
        self._tracing = Tracing(wanted, folder, step, step + wanted.steps)
        self._report_state(wanted, "tracing", step=step, steps=wanted.steps)
        self._annotate(step)

    def _annotate(self, step: int | None) -> None:
        """Marks in the trace that `step` begins; None: that the last one ended."""
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        self._annotation = None if step is None else jax.profiler.StepTraceAnnotation(xplane.STEP, step_num=step)
        if self._annotation is not None:
            self._annotation.__enter__()

    def _end(self, tracing: Tracing, step: int) -> None:
        self._tracing = None
        with jax.profiler.StepTraceAnnotation(xplane.STEP, step_num=step - 1):
            self._settle()  # so that the trace ends with a step
        self._report.phase("save", step)
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as fault:
            return self._fail(tracing.wanted, tracing.first, fault)
        reader = threading.Thread(target=self._conclude, args=(tracing, step), name="profile", daemon=True)
        self._readers.append(reader)
        reader.start()

    def _folder(self, step: int) -> Path:
        """An empty folder for a trace; the oldest ones make room. Raises OSError."""
        if self._base is None:
            self._base = Path(tempfile.mkdtemp(prefix="jaxlaunch-profiles-"))
        mine = sorted(self._base.glob(f"step-*/rank-{self._rank}"), key=lambda folder: folder.stat().st_mtime)
        folder = self._base / f"step-{step}" / f"rank-{self._rank}"
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt whose steps are done again
        for old in mine[: max(0, len(mine) + 1 - KEPT)]:
            shutil.rmtree(old, ignore_errors=True)
            with contextlib.suppress(OSError):  # another rank's is there too
                old.parent.rmdir()
        folder.mkdir(parents=True)
        return folder

    # --- the report --------------------------------------------------------------------------------------------------

    def _conclude(self, tracing: Tracing, end: int) -> None:
        """Reads the trace in a thread, while the loop goes on, and reports its breakdown."""
        try:
            found = self._read(tracing, end)
        except Exception as fault:  # whatever it is, the run goes on, and the agent gets an answer
            return self._fail(tracing.wanted, tracing.first, fault)
        steps = f"steps {tracing.first}-{end - 1}" if found.steps > 1 else f"step {tracing.first}"
        if self._rank == 0:
            self._report.note(f"profile of {steps}: {breakdown.line(found)}; {tracing.folder}")
            head = f"profile of {steps} on {found.devices} devices of rank 0, in {tracing.folder}"
            print("\n".join([head, *breakdown.table(found)]), flush=True)
        summary, table = self._summary(tracing, found), breakdown.table(found)
        self._report_state(tracing.wanted, "done", folder=str(tracing.folder), summary=summary, table=table)

    def _read(self, tracing: Tracing, end: int) -> Breakdown:
        files = sorted(tracing.folder.rglob("*.xplane.pb"))
        if not files:
            raise OSError(f"no trace was written to {tracing.folder}")
        trace = xplane.read(files[-1], breakdown.of_programs(self._programs()))
        if not trace.steps:
            raise ValueError("the trace holds no step")
        window = min(start for start, _ in trace.steps), max(stop for _, stop in trace.steps)
        found = breakdown.of(trace.ops, window, trace.pauses, end - tracing.first)
        text = json.dumps(self._summary(tracing, found), indent=2)
        (tracing.folder / SUMMARY).write_text(text + "\n")
        if sum(file.stat().st_size for file in tracing.folder.rglob("*")) > MAX_BYTES:
            shutil.rmtree(tracing.folder / "plugins")
            self._report.note(f"the trace of rank {self._rank} at step {tracing.first} was too large to keep")
        return found

    def _summary(self, tracing: Tracing, found: Breakdown) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "first_step": tracing.first,
            "device": jax.local_devices()[0].device_kind,
            **found.to_json(),
        }

    def _fail(self, wanted: Request, step: int, fault: Exception) -> None:
        text = f"no profile at step {step} of rank {self._rank}: {fault}"
        print(text, flush=True)
        self._report.note(text)
        self._report_state(wanted, "failed", fault=str(fault)[:1000])

    def _report_state(self, wanted: Request, state: str, **values: Any) -> None:
        if wanted.number is not None:
            self._report.profile({"id": wanted.number, "state": state, **values})
