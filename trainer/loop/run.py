"""Drives a program's own step: `jaxlaunch.run`, to be read from top to bottom.

What the built-in trainer has comes from the same code: mesh, store and owner of checkpoints, metrics, profiler, the
agreement to stop, exit codes. Below an agent a run that ends early ends the process with its code, as the trainer does;
alone it raises.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from jaxlaunch import contract
from jaxlaunch.trainer import distributed, preflight, user_code
from jaxlaunch.trainer.checkpoint.attempt import Attempt
from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.distributed import Stop
from jaxlaunch.trainer.errors import CheckpointError, DataError, NotFiniteError, SpecError, Stopped, TrainerError
from jaxlaunch.trainer.loop.batches import Batches
from jaxlaunch.trainer.loop.options import Options
from jaxlaunch.trainer.loop.state import Named, State, Tree
from jaxlaunch.trainer.loop.step import LOSS, LoopStep, checked_metrics
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.recorder import Metrics
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.process import exit_code, leave, print_error
from jaxlaunch.trainer.profiling.profiler import Profiler
from jaxlaunch.trainer.spec import Profile
from jaxlaunch.trainer.train import COLLECT_EVERY, READY_S, Place

TOO_LATE = "jax.distributed.initialize() must be called before"  # JAX's words, where a program used JAX before


def run(step: Any, state: Any, data: Any = None, **options: Any) -> Tree:
    """The state after the last step; jaxlaunch.run says how it comes about. Raises TrainerError, and what the program's
    functions raise; below an agent the process ends instead."""
    gang = is_below_agent(os.environ)
    stop = Stop()
    report = Progress(int(os.environ[contract.PROGRESS_FD]) if gang else None)
    loop: Loop | None = None
    try:
        report.hello()
        report.phase("init", 0)
        chosen = Options(**options)
        if gang:
            _join()
            stop.arm()
        loop = Loop(step, state, data, chosen, Place.from_environ() if gang else alone(), stop, report)
        found = loop.run()
        report.close()
        return found
    except BaseException as error:  # every end below an agent has a code
        if loop is not None and not isinstance(error, Stopped):
            loop.wait_for_saves() if loop.is_stepping else loop.release()
        if not gang:
            if isinstance(error, Stopped):
                print(f"jaxlaunch.run: {error}", file=sys.stderr)
                raise SystemExit(contract.PREEMPTED) from None
            raise
        _end(error, loop is not None and loop.is_stepping, report)
    finally:
        stop.forget()
        gc.enable()


def is_below_agent(environ: Mapping[str, str]) -> bool:
    """Whether this process is a rank of a gang: not one that a rank's program has started."""
    return contract.PROGRESS_FD in environ and environ.get(contract.REPORTER) == str(os.getpid())


def alone() -> Place:
    """Where a run without an agent keeps its files: `runs/NAME`, after the script."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    name = "notebook" if script is None else Path(script).stem
    return Place(run_dir=os.path.join("runs", name), uid=f"local-{os.getpid()}")


def _join() -> None:
    """Joins the processes of the gang, unless the program has. Raises SpecError for other devices than the job's."""
    if not jax.distributed.is_initialized():
        preflight.check_driver()
        try:
            distributed.initialize()
        except RuntimeError as error:
            if TOO_LATE not in str(error):
                raise
            if os.environ.get(contract.NUM_PROCESSES) != "1":
                raise SpecError(
                    "jaxlaunch.run: the program used JAX before it joined the other processes; give the state as a "
                    "function that makes it, run(step, make_state, …), or begin with jax.distributed.initialize()"
                ) from None
    preflight.check_devices()


def _end(error: BaseException, has_stepped: bool, report: Progress) -> NoReturn:
    """Reports what ended a run, with the line that raised it, and leaves with its code."""
    code, place = exit_code(error, has_stepped=has_stepped), ""
    if not isinstance(error, TrainerError):
        said, place = user_code.told(error)
        place = f"{said} ({place})" if place else ""
    if code != contract.PREEMPTED:
        print_error(error, code)
    report.error(error, code, place)
    leave(code, report)


class Loop(Attempt[Named]):
    """One attempt at a run of a program's own step: checked before the first compile, then the loop over the steps."""

    def __init__(
        self, step: Any, state: Any, data: Any, options: Options, place: Place, stop: Stop, report: Progress
    ) -> None:
        super().__init__(stop, report)
        self.options = options
        self.done = 0  # steps that were dispatched; the metrics of the last may still be unread
        self.is_stepping = False  # whether this attempt has dispatched a step
        self.evaluated = -1  # the last step that was handed to `evaluate`
        self._pending: tuple[int, dict[str, Any]] | None = None  # a step that was dispatched, and what it found
        self.mesh = meshes.build(options.axes, note=self._note)
        self.state = State(state, self.mesh, options.sharding)
        self.batches = None if data is None else Batches(data, options, self.mesh)
        self.report.phase("compile", 0)
        self.step = LoopStep(step, self.state, None if self.batches is None else self.batches.abstract, self.mesh)
        if self.batches is not None:
            self.batches.check_repeats()
        self.folder = _checkpoints(options, place)
        preflight.check_folder(self.folder)
        self.store = Store(self.folder, keep=options.keep, uid=place.uid, take_over=place.take_over, note=self._note)
        self.metrics = self._metrics(place)
        self.profiler = Profiler(
            Profile(),
            rank=jax.process_index(),
            run_dir=place.run_dir,
            request=place.profile,
            report=report,
            settle=self._read,
            programs=self.step.programs,
        )

    def run(self) -> Tree:
        """The state after the last step. Raises a TrainerError, such as Stopped, and what the program raises."""
        total = self.options.steps
        start, state = self._restore()
        self._leave_if_stopped(start, state)
        if start < total:
            self.report.phase("compile", start)
            self.step.compile()
        self._leave_if_stopped(start, state)
        batches = None if self.batches is None or start == total else self.batches.iterate(start, total)
        gc.freeze()
        gc.disable()  # a collection in one rank's step delays every rank: it runs beside evaluations and saves
        self.metrics.start(start)
        for done in range(start, total + 1):
            self.done = done
            if self._is_due(done):
                self._read()
                self._evaluate(done, state)
                self._save(done, state)
            if done == total:
                break
            if self.stop.poll():
                self._read()
                self._leave(done, state)
            self.profiler.between(done)
            self.report.phase("step", done)
            state = self._step(done, state, batches)
        self.profiler.finish(total)
        self._settle(total)
        self.report.phase("done", total)
        return self.state.tree(state)

    # --- before the loop ----------------------------------------------------------------------------------------------

    def _metrics(self, place: Place) -> Metrics:
        return Metrics(
            rank=jax.process_index(),
            run_dir=place.run_dir,
            socket=place.socket,
            report=self.report,
            total_steps=self.options.steps,
            examples_per_step=0 if self.batches is None else self.batches.size,
        )

    def _restore(self) -> tuple[int, Named]:
        """The step and state of the newest usable checkpoint; 0 and a new state without one."""
        self.report.phase("restore", 0)
        self.store.claim()
        found = self.store.restore({"state": self.state.stored(self.state.abstract)}, self._changes)
        first = 0 if found is None else found[0] + 1
        self.store.check_free(lambda step: step >= first and self._is_due(step))
        if found is None:
            return 0, self.state.init()
        start, tree, meta = found
        self._check_resumed(meta, start)
        self.done = self.saved = self._committed = start
        self.evaluated = meta["evaluated"]
        self.report.restored(start)
        self._note(f"resumed at step {start} of {self.options.steps}")
        return start, self.state.of_stored(tree["state"])

    def _changes(self, meta: Mapping[str, Any]) -> str:
        return "" if "loop" in meta else "was saved by a training of train:, not by jaxlaunch.run"

    def _check_resumed(self, meta: Mapping[str, Any], start: int) -> None:
        """Raises SpecError, DataError or CheckpointError where going on from a checkpoint would not be the same run."""
        if start > self.options.steps:
            raise SpecError(
                f"jaxlaunch.run(steps={self.options.steps}): step {start} is already saved in {self.folder}; raise "
                "steps, or give folder="
            )
        for key, now in self._identity().items():
            if (then := meta["loop"].get(key)) != now:
                kind = DataError if key == "data" else CheckpointError
                raise kind(
                    f"jaxlaunch.run: {key} is {now}, and the checkpoints in {self.folder} were made with {then}: a "
                    f"resumed run would not see the same batches; keep it, or give folder="
                )

    def _identity(self) -> dict[str, Any]:
        return {"batch": None, "seed": None, "shuffle": None, "data": None} | (
            {} if self.batches is None else self.batches.identity
        )

    # --- in the loop --------------------------------------------------------------------------------------------------

    def _step(self, done: int, state: Named, batches: Any) -> Named:
        """Dispatches the step after `done` steps, and reads what the one before has found."""
        timer, batch = self.metrics.timer, None
        if batches is not None:
            with timer.part("data"):
                batch = batches.get(READY_S)
                while batch is None:  # in slices: a signal handler of Python's runs only between them
                    self.report.phase("data", done)
                    batch = batches.get(1.0)
            self.report.phase("step", done)
        state, found = self.step(state, batch)
        self.is_stepping = True
        with timer.part("device"):
            self._read()
        self._pending = (done + 1, found)
        timer.step_done()
        return state

    def _read(self) -> None:
        """Waits for the step dispatched last and records its metrics. Raises NotFiniteError, StorageError."""
        if self._pending is None:
            return
        (step, found), self._pending = self._pending, None
        try:
            is_finite = bool(np.asarray(jax.device_get(found["finite"])))
        except Exception:
            self.report.phase("step", step - 1)  # of the error
            raise
        if not is_finite or step % self.options.log_every == 0 or step == self.options.steps:
            values = {name: float(value) for name, value in jax.device_get(found["metrics"]).items()}
            if not is_finite:
                raise self._not_finite(step, values)
            self.metrics.interval(step, values)
        if step % COLLECT_EVERY == 0:
            gc.collect()
        self._report_commits()

    def _not_finite(self, step: int, values: Mapping[str, float]) -> NotFiniteError:
        bad = {name: value for name, value in values.items() if name.endswith(LOSS) and not np.isfinite(value)}
        said = ", ".join(f"{name} {value:g}" for name, value in bad.items())
        return NotFiniteError(
            f"step {step}: {said} of {self.step.name}; nothing after step {max(self.saved, 0)} is saved. Metrics whose "
            f"names end in {LOSS} must be finite"
        )

    def _is_due(self, done: int) -> bool:
        every = self.options.every
        return done == self.options.steps or (every is not None and done > 0 and done % every == 0)

    def _evaluate(self, done: int, state: Named) -> None:
        evaluate = self.options.evaluate
        if evaluate is None or done <= self.evaluated:
            return
        self.report.phase("eval", done)
        with self.profiler.pause(), self.metrics.timer.part("eval"), self.state.context():
            found = checked_metrics(user_code.named(evaluate), evaluate(self.state.tree(state)))
            means = {name: float(value) for name, value in jax.device_get(dict(found)).items()}
            gc.collect()
        self.evaluated = done
        self.metrics.evaluated(done, means)

    def _save(self, done: int, state: Named) -> None:
        """Starts a save of the state, which the store writes while the loop goes on."""
        if done <= self.saved:
            return
        self.report.phase("save", done)
        with self.profiler.pause(), self.metrics.timer.part("save"):
            began = time.perf_counter()
            self.store.save(
                done, {"state": self.state.stored(state)}, {"loop": self._identity(), "evaluated": self.evaluated}
            )
            self.metrics.saved(done, time.perf_counter() - began)
            gc.collect()
        self.saved = done


def _checkpoints(options: Options, place: Place) -> str:
    """Path or URL of the checkpoint folder. Raises SpecError where there is no run folder to keep them in."""
    if options.folder is not None:
        return os.fspath(options.folder)
    home = os.environ.get(contract.RUN_URL) if is_below_agent(os.environ) else None
    if home is None and (home := place.run_dir) is None:
        raise SpecError("jaxlaunch.run: this job has no run folder to keep checkpoints in; give folder=")
    return f"{home.rstrip('/')}/checkpoints"
