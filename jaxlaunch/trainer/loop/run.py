"""Implementation of `jaxlaunch.run`, which trains with a program's own step function.

Under an agent, the process joins the other ranks first, and a run that ends early exits the process
with an exit code, like the built-in trainer. Without an agent it raises an exception.
"""

from __future__ import annotations

import dataclasses
import gc
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from jaxlaunch import contract, reporting
from jaxlaunch.trainer import spec, user_code
from jaxlaunch.trainer.checkpoint import storage
from jaxlaunch.trainer.data.pipeline import Prefetcher
from jaxlaunch.trainer.errors import (
    CheckpointError,
    DataError,
    NotFiniteError,
    SpecError,
    Stopped,
    TrainerError,
)
from jaxlaunch.trainer.loop.driver import Loop
from jaxlaunch.trainer.loop.training import RunContext, Settings, Training, describe_saved
from jaxlaunch.trainer.loop.user_program import (
    LOSS_SUFFIX,
    NamedArrays,
    ProgramBatches,
    ProgramState,
    ProgramStep,
    Tree,
    check_metrics,
)
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.start import distributed, preflight
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.start.process import (
    describe_exit,
    exit_code,
    exit_process,
    print_error,
    requested_exit_code,
)
from jaxlaunch.trainer.step.executable import check_jit

# Part of JAX's message if a program used JAX before it joined.
JAX_USED_MESSAGE = "jax.distributed.initialize() must be called before"


def run(step: Any, state: Any, data: Any = None, **options: Any) -> Tree:
    """Return the state after the last step; see jaxlaunch.run. A rank exits on errors."""
    # The reporter is None without an agent, and in a process that a rank's program started.
    reporter = reporting.become_program()
    is_rank = reporter is not None
    stop = Stop()
    progress = Progress(None if reporter is None else reporter.fd)
    loop: Loop[NamedArrays] | None = None
    try:
        progress.report_hello()
        progress.report_phase("init", 0)
        run_options = RunOptions(**options)
        if is_rank:
            _join_gang(progress)
            stop.forward_early_signal()
            context = RunContext.from_environ()
        else:
            # Without an agent, the run folder is `runs/SCRIPT`.
            script = getattr(sys.modules.get("__main__"), "__file__", None)
            name = "notebook" if script is None else Path(script).stem
            context = RunContext(run_dir=os.path.join("runs", name), uid=f"local-{os.getpid()}")
        training = UserTraining(step, state, data, run_options, context, progress)
        loop = Loop(training, context, stop, progress)
        final_state = training.state.to_tree(loop.run())
        progress.close()
        return final_state
    # Under an agent, every exception has an exit code, also KeyboardInterrupt and SystemExit.
    except BaseException as error:
        if loop is not None and not isinstance(error, Stopped):
            loop.end_saves(process_continues=not is_rank)
        if is_rank:
            _exit_with_code(error, loop is not None and loop.has_stepped, progress)
        if isinstance(error, Stopped):
            print(f"jaxlaunch.run: {error}", file=sys.stderr)
            raise SystemExit(contract.PREEMPTED) from None
        raise
    finally:
        stop.restore_handler()
        gc.enable()


def _join_gang(progress: Progress) -> None:
    """Join the other ranks, unless the program has already done so.

    Raises SpecError if the devices are not those of the job.
    """
    check_jit()
    if not jax.distributed.is_initialized():
        preflight.check_driver()
        preflight.check_name()
        try:
            distributed.initialize()
            progress.report_joined()
        except RuntimeError as error:
            if JAX_USED_MESSAGE not in str(error):
                raise
            if os.environ.get(contract.NUM_PROCESSES) != "1":
                raise SpecError(
                    "jaxlaunch.run: the program used JAX before it joined the other processes; "
                    "give the state as a function that makes it, run(step, make_state, …), or "
                    "begin with jax.distributed.initialize()"
                ) from None
    preflight.check_devices()


def _exit_with_code(error: BaseException, has_stepped: bool, progress: Progress) -> NoReturn:
    """Report the error that ends a run, with the line that raised it, and exit with its code."""
    if (requested_code := requested_exit_code(error)) is not None:
        exit_process(requested_code, progress)
    code, location = exit_code(error, has_stepped=has_stepped), ""
    if not isinstance(error, TrainerError):
        message, line = user_code.describe_error(error)
        location = describe_exit(error) or (f"{message} ({line})" if line else "")
    if not isinstance(error, Stopped):
        print_error(error, code)
    progress.report_error(error, code, location)
    exit_process(code, progress)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options of jaxlaunch.run, which documents them. Raises SpecError for invalid ones."""

    steps: int
    every: int | None = 500
    log_every: int = 10
    keep: int = 3
    batch: int | None = None
    shuffle: bool = True
    seed: int = 0
    evaluate: Callable[[Any], Mapping[str, float]] | None = None
    mesh: Mapping[str, int] | None = None
    sharding: Mapping[str, Sequence[str | None]] | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        optional_names = [name for name in ("every", "batch") if getattr(self, name) is not None]
        for name in optional_names:
            if getattr(self, name) == 0:
                raise SpecError(f"jaxlaunch.run({name}=0): must be a whole number above 0, or None")
        for name in ("steps", "log_every", "keep", *optional_names):
            self._check_count(name, 1)
        self._check_count("seed", 0)
        if self.evaluate is not None and not callable(self.evaluate):
            kind = user_code.describe_type(self.evaluate)
            raise SpecError(
                f"jaxlaunch.run(evaluate=…) is {kind}, not a function of the state that returns "
                "a dict of numbers"
            )
        # Raises SpecError if the mesh is invalid.
        _ = self.mesh_axes

    @property
    def mesh_axes(self) -> spec.Mesh:
        """The requested mesh, by default all devices as dp."""
        if self.mesh is None:
            return spec.Mesh(dp=-1)
        return meshes.parse_axes(self.mesh, "run", {"dp": 4, "mp": 2})

    def _check_count(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        try:
            is_valid = not isinstance(value, bool) and operator.index(value) >= minimum
        except TypeError:
            is_valid = False
        if not is_valid:
            raise SpecError(
                f"jaxlaunch.run({name}={value!r}): must be a whole number, at least {minimum}"
            )


class UserTraining(Training[NamedArrays]):
    """The training of a program's own step, data and evaluation.

    The constructor checks them all; it traces the step once.
    """

    def __init__(
        self,
        step: Any,
        state: Any,
        data: Any,
        options: RunOptions,
        context: RunContext,
        progress: Progress,
    ) -> None:
        super().__init__(progress)
        if options.folder is not None:
            self.folder = os.fspath(options.folder)
        elif context.run_folder is not None:
            self.folder = f"{context.run_folder.rstrip('/')}/checkpoints"
        else:
            raise SpecError(
                "jaxlaunch.run: this job has no run folder to keep checkpoints in; give folder="
            )
        self.options = options
        mesh = meshes.build_mesh(options.mesh_axes, note=self.note)
        self.state = ProgramState(state, mesh, options.sharding)
        self.batches = None
        if data is not None:
            self.batches = ProgramBatches(
                data, mesh, batch=options.batch, seed=options.seed, shuffle=options.shuffle
            )
        progress.report_phase("compile", 0)
        abstract_batch = None if self.batches is None else self.batches.abstract
        self.step = ProgramStep(step, self.state, abstract_batch, mesh)
        if self.batches is not None:
            self.batches.check_repeats()
        storage.check_writable(self.folder)
        self.has_evaluation = options.evaluate is not None
        self.settings = Settings(
            steps=options.steps,
            log_every=options.log_every,
            eval_every=options.every,
            save_every=options.every,
            keep=options.keep,
        )
        self.metrics = self.open_metrics(context, 0 if self.batches is None else self.batches.size)

    @property
    def abstract_state(self) -> NamedArrays:
        """The shape, dtype and sharding of each array."""
        return self.state.abstract

    def init_state(self) -> NamedArrays:
        """Return the arrays before the first step."""
        return self.state.init_arrays()

    def to_tree(self, state: NamedArrays) -> dict[str, Any]:
        """Return the arrays as a checkpoint holds them."""
        return {"state": self.state.to_stored(state)}

    def from_tree(self, tree: Mapping[str, Any], meta: Mapping[str, Any], step: int) -> NamedArrays:
        """Return the arrays of a checkpoint."""
        return self.state.from_stored(tree["state"])

    def checkpoint_meta(self) -> dict[str, Any]:
        """Return the facts that decide which examples a step sees, None where they are unknown."""
        unknown = {"batch": None, "seed": None, "shuffle": None, "data": None}
        return {"loop": unknown | ({} if self.batches is None else self.batches.identity)}

    def describe_difference(self, meta: Mapping[str, Any]) -> str:
        """Explain that the built-in training saved a checkpoint; "" if jaxlaunch.run did."""
        return "" if "loop" in meta else "was saved by a training of train:, not by jaxlaunch.run"

    def check_resumed(self, meta: Mapping[str, Any], step: int, is_finished: bool) -> None:
        """Raise SpecError if `step` exceeds the steps of this run.

        Raises CheckpointError or DataError if the batches differ from those of the checkpoint.
        """
        if step > self.options.steps:
            raise SpecError(
                f"jaxlaunch.run(steps={self.options.steps}): step {step} is already saved in "
                f"{self.folder}; raise steps, or give folder="
            )
        for key, current in self.checkpoint_meta()["loop"].items():
            if (recorded := meta["loop"].get(key)) != current:
                kind = DataError if key == "data" else CheckpointError
                raise kind(
                    f"jaxlaunch.run: {key} is {current}, and the checkpoints in {self.folder} were "
                    f"made with {recorded}: a resumed run would not see the same batches; keep it, "
                    "or give folder="
                )

    def compile(self, start: int) -> None:
        """Compile the step, unless all steps are done."""
        if start < self.options.steps:
            self.step.compile()

    def iterate_batches(self, spans: Sequence[range]) -> Prefetcher[Tree] | None:
        """Return prefetched batches of these steps, on the devices; None without data."""
        return None if self.batches is None else self.batches.iterate_batches(spans)

    def train_steps(
        self, state: NamedArrays, batch: Tree | None, span: range
    ) -> tuple[NamedArrays, dict[str, jax.Array]]:
        """Take one step; a span of this training has no more."""
        return self.step(state, batch)

    def not_finite_error(
        self, step: int, metrics: Mapping[str, float], saved: int
    ) -> NotFiniteError:
        """Return an error that names the losses that are not finite."""
        listed = ", ".join(
            f"{name} {value:g}"
            for name, value in metrics.items()
            if name.endswith(LOSS_SUFFIX) and not np.isfinite(value)
        )
        reason = f"Metrics whose names end in {LOSS_SUFFIX} must be finite"
        if (fault := self.describe_wrong_batch(step)) is not None:
            reason = f"Its batch is not: {fault}"
        return NotFiniteError(
            f"{listed} of {self.step.name} in step {step}; {describe_saved(saved)}. {reason}"
        )

    def _find_wrong_batch(self, number: int) -> str | None:
        return None if self.batches is None else self.batches.describe_not_finite(number)

    def hlo_texts(self) -> list[str]:
        """Return the HLO text of the compiled step."""
        return self.step.hlo_texts()

    def evaluate(self, state: NamedArrays, between: Callable[[], None]) -> dict[str, float]:
        """Return the metrics of the program's `evaluate`."""
        evaluate = self.options.evaluate
        if evaluate is None:
            return {}
        name = user_code.describe_function(evaluate)
        with self.state.trace_context():
            means = check_metrics(name, evaluate(self.state.to_tree(state)))
            return {name: float(value) for name, value in jax.device_get(dict(means)).items()}
