"""Profiler that traces some steps of the loop on request, and reports their breakdown.

Without a trace a step only costs a check for a file. Every rank traces independently of the others.
A failure is noted and never ends the run.
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
from jaxlaunch.trainer.profiling import breakdown
from jaxlaunch.trainer.spec import Profile

# Number of traces per rank; older ones are removed.
KEPT_TRACES = 10
# Larger traces are removed after they were summarized.
MAX_BYTES = 1 << 30
FOLDER, SUMMARY = "profiles", "summary.json"


class ActiveTrace(NamedTuple):
    """A trace in progress. It has a number if an agent requested it, and None if the job did."""

    number: int | None
    folder: Path
    first_step: int  # steps that were complete when it began
    stop_step: int


class Profiler:
    """The profiler of one process. The thread of the steps calls `before_step` before each."""

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
        """Create a profiler without a trace.

        An agent requests a profile by the file `request`. `settle` waits for the dispatched steps,
        and `programs` returns the texts of their compiled programs.
        """
        self._spec, self._rank, self._report = spec, rank, report
        self._request, self._settle, self._programs = request, settle, programs
        self._base = None if run_dir is None or "://" in run_dir else Path(run_dir, FOLDER)
        # Complete steps at the last call without a trace.
        self._last_step: int | None = None
        self._tracing: ActiveTrace | None = None
        self._annotation: jax.profiler.StepTraceAnnotation | None = None
        self._readers: list[threading.Thread] = []

    def before_step(self, step: int) -> None:
        """Begin or end a trace if one is due, after `step` complete or dispatched steps."""
        if self._tracing is not None:
            self._annotate_step(None)
            if step >= self._tracing.stop_step:
                self._end_trace(self._tracing, step)
            else:
                self._annotate_step(step)
            return
        # The profile of the job begins at its step, unless this attempt resumed after it.
        last_step, self._last_step = step - 1 if self._last_step is None else self._last_step, step
        if self._spec.at is not None and last_step < self._spec.at <= step:
            self._begin_trace(step, None, self._spec.steps)
        elif self._request is not None and os.access(self._request, os.F_OK):
            try:
                with open(self._request) as file:
                    content = json.load(file)
                os.unlink(self._request)
                number, steps = int(content["id"]), int(content["steps"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                # A broken request must not be read again at every step.
                self._request = None
                reason = f"the request file cannot be read: {error}"
                self._report.report_note(f"rank {self._rank} can no longer be profiled: {reason}")
            else:
                self._begin_trace(step, number, steps)

    def pause_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that excludes its time from the steps, for an evaluation or a save."""
        return jax.profiler.TraceAnnotation(breakdown.PAUSE)

    def finish_trace(self, step: int) -> None:
        """End the trace in progress after the last step, and wait until it has been reported."""
        if self._tracing is not None:
            self._annotate_step(None)
            self._end_trace(self._tracing, step)
        for reader in self._readers:
            reader.join()

    # --- the trace --------------------------------------------------------------------------------

    def _begin_trace(self, step: int, number: int | None, steps: int) -> None:
        # The trace must begin with a step.
        self._settle()
        try:
            folder = self._make_folder(step)
            options = jax.profiler.ProfileOptions()
            # A trace of every Python call is large, and slows the program that it measures.
            options.python_tracer_level = 0
            jax.profiler.start_trace(folder, profiler_options=options)
        except (OSError, RuntimeError) as error:
            self._report_failure(number, step, error)
            return
        self._tracing = ActiveTrace(number, folder, step, step + steps)
        self._report_state(number, "tracing", step=step, steps=steps)
        self._annotate_step(step)

    def _annotate_step(self, step: int | None) -> None:
        """Mark in the trace that the previous step ended, and that `step` begins if given."""
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        self._annotation = None
        if step is not None:
            self._annotation = jax.profiler.StepTraceAnnotation(breakdown.STEP, step_num=step)
            self._annotation.__enter__()

    def _end_trace(self, tracing: ActiveTrace, step: int) -> None:
        self._tracing = None
        with jax.profiler.StepTraceAnnotation(breakdown.STEP, step_num=step - 1):
            # The trace must end with a step.
            self._settle()
        self._report.report_phase("save", step)
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            self._report_failure(tracing.number, tracing.first_step, error)
            return
        reader = threading.Thread(
            target=self._report_trace, args=(tracing, step), name="profile", daemon=True
        )
        self._readers.append(reader)
        reader.start()

    def _make_folder(self, step: int) -> Path:
        """Create an empty folder for a trace, and remove the oldest traces. Raises OSError."""
        if self._base is None:
            self._base = Path(tempfile.mkdtemp(prefix="jaxlaunch-profiles-"))
        traces = sorted(
            self._base.glob(f"step-*/rank-{self._rank}"), key=lambda folder: folder.stat().st_mtime
        )
        folder = self._base / f"step-{step}" / f"rank-{self._rank}"
        # An earlier attempt may have traced the same steps.
        shutil.rmtree(folder, ignore_errors=True)
        for old in traces[: max(0, len(traces) + 1 - KEPT_TRACES)]:
            shutil.rmtree(old, ignore_errors=True)
            # The folder may still hold the trace of another rank.
            with contextlib.suppress(OSError):
                old.parent.rmdir()
        folder.mkdir(parents=True)
        return folder

    # --- the report -------------------------------------------------------------------------------

    def _report_trace(self, tracing: ActiveTrace, end: int) -> None:
        """Read the trace and report its breakdown; runs in a thread while the loop continues."""
        try:
            summary, line, table = self._write_summary(tracing, end)
        except Exception as error:
            # The run continues after any failure, and the agent must get an answer.
            self._report_failure(tracing.number, tracing.first_step, error)
            return
        if self._rank == 0:
            first = tracing.first_step
            steps = f"steps {first}-{end - 1}" if summary["steps"] > 1 else f"step {first}"
            self._report.report_note(f"profile of {steps}: {line}; {tracing.folder}")
            devices = f"{summary['devices']} devices of rank 0"
            head = f"profile of {steps} on {devices}, in {tracing.folder}"
            print("\n".join([head, *table]), flush=True)
        state = {"folder": str(tracing.folder), "summary": summary, "table": table}
        self._report_state(tracing.number, "done", **state)

    def _write_summary(
        self, tracing: ActiveTrace, end: int
    ) -> tuple[dict[str, Any], str, list[str]]:
        """Write the summary of a trace, and return it with a line and a table for the user."""
        files = sorted(tracing.folder.rglob("*.xplane.pb"))
        if not files:
            raise OSError(f"no trace was written to {tracing.folder}")
        trace = breakdown.read_trace(files[-1], breakdown.program_kinds(self._programs()))
        if not trace.steps:
            raise ValueError("the trace holds no step")
        window = min(start for start, _ in trace.steps), max(stop for _, stop in trace.steps)
        parts = breakdown.break_down(trace.ops, window, trace.pauses, end - tracing.first_step)
        summary = {
            "rank": self._rank,
            "first_step": tracing.first_step,
            "device": jax.local_devices()[0].device_kind,
            **parts.to_json(),
        }
        (tracing.folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
        if sum(file.stat().st_size for file in tracing.folder.rglob("*")) > MAX_BYTES:
            shutil.rmtree(tracing.folder / "plugins")
            self._report.report_note(
                f"the trace of rank {self._rank} at step {tracing.first_step} was too large to keep"
            )
        return summary, parts.to_line(), parts.to_table()

    def _report_failure(self, number: int | None, step: int, error: Exception) -> None:
        text = f"no profile at step {step} of rank {self._rank}: {error}"
        print(text, flush=True)
        self._report.report_note(text)
        self._report_state(number, "failed", fault=str(error)[:1000])

    def _report_state(self, number: int | None, state: str, **values: Any) -> None:
        if number is not None:
            self._report.report_profile({"id": number, "state": state, **values})
