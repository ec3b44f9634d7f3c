"""The profiler of the loop: it traces some steps on request, and reports their breakdown.

A job requests a trace in its train block, and an agent by a file. Without a trace, a step only
checks whether that file exists. Every rank traces independently of the others. A failure is noted
and never ends the run.
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
# A larger trace is removed after its summary is written.
MAX_BYTES = 1 << 30
FOLDER, SUMMARY = "profiles", "summary.json"


class ActiveTrace(NamedTuple):
    """A trace in progress.

    Attributes:
        number: The number of an agent's request; None if the job requested the trace.
        folder: The folder of the trace.
        first_step: Steps that were complete when it began.
        stop_step: Complete steps at which it ends.
    """

    number: int | None
    folder: Path
    first_step: int
    stop_step: int


class Profiler:
    """The profiler of one process. The loop calls `before_step` before each dispatch."""

    def __init__(
        self,
        spec: Profile,
        *,
        rank: int,
        run_dir: str | None,
        request: str | None,
        progress: Progress,
        wait_for_steps: Callable[[], None],
        read_programs: Callable[[], list[str]],
    ) -> None:
        """Create a profiler.

        Args:
            spec: The steps that the job requests to trace.
            rank: The rank of this process.
            run_dir: The run folder, in which the traces are written.
            request: The path of the file by which an agent requests a profile.
            progress: The reports to the agent.
            wait_for_steps: Waits until the device has finished all dispatched steps.
            read_programs: Returns the HLO texts of the compiled steps.
        """
        self._spec, self._rank, self._progress = spec, rank, progress
        self._request_file = request
        self._wait_for_steps, self._read_programs = wait_for_steps, read_programs
        self._base = None if run_dir is None or "://" in run_dir else Path(run_dir, FOLDER)
        # The step of the last call of `before_step` outside of a trace.
        self._last_step: int | None = None
        self._active_trace: ActiveTrace | None = None
        self._annotation: jax.profiler.StepTraceAnnotation | None = None
        self._readers: list[threading.Thread] = []

    def before_step(self, step: int) -> None:
        """Begin or end a trace if one is due. `step` steps are complete or dispatched."""
        if self._active_trace is not None:
            self._annotate_step(None)
            if step >= self._active_trace.stop_step:
                self._end_trace(self._active_trace, step)
            else:
                self._annotate_step(step)
            return
        # The profile of the job begins at its step, unless this attempt resumed after it.
        last_step, self._last_step = step - 1 if self._last_step is None else self._last_step, step
        if self._spec.at is not None and last_step < self._spec.at <= step:
            self._begin_trace(step, None, self._spec.steps)
        elif self._request_file is not None and os.access(self._request_file, os.F_OK):
            try:
                with open(self._request_file) as file:
                    content = json.load(file)
                os.unlink(self._request_file)
                number, steps = int(content["id"]), int(content["steps"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                # The file may still exist and would be read again at every step.
                self._request_file = None
                reason = f"the request file cannot be read: {error}"
                self._progress.report_note(f"rank {self._rank} can no longer be profiled: {reason}")
            else:
                self._begin_trace(step, number, steps)

    def pause_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for an evaluation or a save, whose time is not part of the steps."""
        return jax.profiler.TraceAnnotation(breakdown.PAUSE)

    def finish_trace(self, step: int) -> None:
        """End the trace in progress after the last step, and wait until all are reported."""
        if self._active_trace is not None:
            self._annotate_step(None)
            self._end_trace(self._active_trace, step)
        for reader in self._readers:
            reader.join()

    # --- the trace --------------------------------------------------------------------------------

    def _begin_trace(self, step: int, number: int | None, steps: int) -> None:
        # The trace must not have parts of earlier steps.
        self._wait_for_steps()
        try:
            folder = self._make_folder(step)
            options = jax.profiler.ProfileOptions()
            # A trace of every Python call is large, and slows the program that it measures.
            options.python_tracer_level = 0
            jax.profiler.start_trace(folder, profiler_options=options)
        except (OSError, RuntimeError) as error:
            self._report_failure(number, step, error)
            return
        self._active_trace = ActiveTrace(number, folder, step, step + steps)
        self._report_state(number, "tracing", step=step, steps=steps)
        self._annotate_step(step)

    def _annotate_step(self, step: int | None) -> None:
        """End the annotation of the previous step in the trace, and begin that of `step`."""
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        self._annotation = None
        if step is not None:
            self._annotation = jax.profiler.StepTraceAnnotation(breakdown.STEP, step_num=step)
            self._annotation.__enter__()

    def _end_trace(self, trace: ActiveTrace, step: int) -> None:
        self._active_trace = None
        with jax.profiler.StepTraceAnnotation(breakdown.STEP, step_num=step - 1):
            # The wait belongs to the last step, which the device is still running.
            self._wait_for_steps()
        self._progress.report_phase("save", step)
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            self._report_failure(trace.number, trace.first_step, error)
            return
        reader = threading.Thread(
            target=self._report_trace, args=(trace, step), name="profile", daemon=True
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
        for old_folder in traces[: max(0, len(traces) + 1 - KEPT_TRACES)]:
            shutil.rmtree(old_folder, ignore_errors=True)
            # This fails if the folder still holds the trace of another rank.
            with contextlib.suppress(OSError):
                old_folder.parent.rmdir()
        folder.mkdir(parents=True)
        return folder

    # --- the report -------------------------------------------------------------------------------

    def _report_trace(self, trace: ActiveTrace, end_step: int) -> None:
        """Read the trace and report its breakdown, in a thread while the loop continues."""
        try:
            summary, line, table = self._write_summary(trace, end_step)
        except Exception as error:
            # The run continues after any failure, and the agent must get an answer.
            self._report_failure(trace.number, trace.first_step, error)
            return
        if self._rank == 0:
            first = trace.first_step
            steps = f"steps {first}-{end_step - 1}" if summary["steps"] > 1 else f"step {first}"
            self._progress.report_note(f"profile of {steps}: {line}; {trace.folder}")
            devices = f"{summary['devices']} devices of rank 0"
            head = f"profile of {steps} on {devices}, in {trace.folder}"
            print("\n".join([head, *table]), flush=True)
        state = {"folder": str(trace.folder), "summary": summary, "table": table}
        self._report_state(trace.number, "done", **state)

    def _write_summary(
        self, trace: ActiveTrace, end_step: int
    ) -> tuple[dict[str, Any], str, list[str]]:
        """Write the summary of a trace, and return it with a line and a table for the user."""
        files = sorted(trace.folder.rglob("*.xplane.pb"))
        if not files:
            raise OSError(f"no trace was written to {trace.folder}")
        kinds = breakdown.program_kinds(self._read_programs())
        ops, steps, pauses = breakdown.read_trace(files[-1], kinds)
        if not steps:
            raise ValueError("the trace holds no step")
        window = min(start for start, _ in steps), max(stop for _, stop in steps)
        parts = breakdown.break_down(ops, window, pauses, end_step - trace.first_step)
        summary = {
            "rank": self._rank,
            "first_step": trace.first_step,
            "device": jax.local_devices()[0].device_kind,
            **parts.to_json(),
        }
        (trace.folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
        if sum(file.stat().st_size for file in trace.folder.rglob("*")) > MAX_BYTES:
            shutil.rmtree(trace.folder / "plugins")
            self._progress.report_note(
                f"the trace of rank {self._rank} at step {trace.first_step} was too large to keep"
            )
        return summary, parts.to_line(), parts.to_table()

    def _report_failure(self, number: int | None, step: int, error: Exception) -> None:
        text = f"no profile at step {step} of rank {self._rank}: {error}"
        print(text, flush=True)
        self._progress.report_note(text)
        self._report_state(number, "failed", fault=str(error)[:1000])

    def _report_state(self, number: int | None, state: str, **values: Any) -> None:
        if number is not None:
            self._progress.report_profile({"id": number, "state": state, **values})
