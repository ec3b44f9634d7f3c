"""The training of a program's own step: what the arguments of `jaxlaunch.run` bring to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.checkpoint import writable
from jaxlaunch.trainer.data.prefetch import Prefetcher
from jaxlaunch.trainer.errors import CheckpointError, DataError, NotFiniteError, SpecError
from jaxlaunch.trainer.loop.batches import Batches
from jaxlaunch.trainer.loop.options import Options
from jaxlaunch.trainer.loop.place import Place
from jaxlaunch.trainer.loop.state import Named, State, Tree
from jaxlaunch.trainer.loop.step import LOSS, LoopStep, checked_metrics
from jaxlaunch.trainer.loop.training import Settings, Training
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.recorder import Metrics
from jaxlaunch.trainer.parallel import mesh as meshes


class UserTraining(Training[Named]):
    """A program's state, step, data and evaluation, checked by tracing the step once."""

    def __init__(
        self, step: Any, state: Any, data: Any, options: Options, folder: str, place: Place, report: Progress
    ) -> None:
        super().__init__(report)
        self.options, self.folder = options, folder
        self.mesh = meshes.build(options.axes, note=self.note)
        self.state = State(state, self.mesh, options.sharding)
        self.batches = None if data is None else Batches(data, options, self.mesh)
        report.phase("compile", 0)
        self.step = LoopStep(step, self.state, None if self.batches is None else self.batches.abstract, self.mesh)
        if self.batches is not None:
            self.batches.check_repeats()
        writable.check(self.folder)
        self.evaluates = options.evaluate is not None
        self.settings = Settings(
            steps=options.steps,
            log_every=options.log_every,
            eval_every=options.every,
            save_every=options.every,
            keep=options.keep,
        )
        self.metrics = Metrics(
            rank=jax.process_index(),
            run_dir=place.run_dir,
            socket=place.socket,
            report=report,
            total_steps=options.steps,
            examples_per_step=0 if self.batches is None else self.batches.size,
        )

    @property
    def abstract(self) -> Named:
        """The arrays of the state by name, abstract."""
        return self.state.abstract

    def init(self) -> Named:
        """The state that the program made or gave."""
        return self.state.init()

    def to_tree(self, state: Named) -> dict[str, Any]:
        """The arrays by name; random keys as their numbers."""
        return {"state": self.state.stored(state)}

    def from_tree(self, tree: Mapping[str, Any], meta: Mapping[str, Any], step: int) -> Named:
        """The inverse of `to_tree`."""
        return self.state.of_stored(tree["state"])

    def meta(self) -> dict[str, Any]:
        """What decides which examples a step sees; of a program's own function of the step nothing is known."""
        unknown = {"batch": None, "seed": None, "shuffle": None, "data": None}
        return {"loop": unknown | ({} if self.batches is None else self.batches.identity)}

    def difference(self, meta: Mapping[str, Any]) -> str:
        """That the checkpoint is no loop's; of the program's own arrays a checkpoint says no more than they do."""
        return "" if "loop" in meta else "was saved by a training of train:, not by jaxlaunch.run"

    def check_resumed(self, meta: Mapping[str, Any], step: int, is_finished: bool) -> None:
        """Raises SpecError where all steps are done, DataError or CheckpointError for other batches."""
        if step > self.options.steps:
            raise SpecError(
                f"jaxlaunch.run(steps={self.options.steps}): step {step} is already saved in {self.folder}; raise "
                "steps, or give folder="
            )
        for key, now in self.meta()["loop"].items():
            if (then := meta["loop"].get(key)) != now:
                kind = DataError if key == "data" else CheckpointError
                raise kind(
                    f"jaxlaunch.run: {key} is {now}, and the checkpoints in {self.folder} were made with {then}: a "
                    f"resumed run would not see the same batches; keep it, or give folder="
                )

    def compile(self, start: int) -> None:
        """Compiles the step, unless all are done: a program may call `run` for the state alone."""
        if start < self.options.steps:
            self.step.compile()

    def iterate(self, spans: Sequence[range]) -> Prefetcher[Tree] | None:
        """The batches of these steps, on the devices; None without data."""
        return None if self.batches is None else self.batches.iterate(spans)

    def train(self, state: Named, batch: Tree | None, span: range) -> tuple[Named, dict[str, jax.Array]]:
        """Dispatches the program's step."""
        return self.step(state, batch)

    def not_finite(self, step: int, metrics: Mapping[str, float], saved: int) -> NotFiniteError:
        """Which losses were not. The step has replaced the state, so only what was saved before is good."""
        bad = {name: value for name, value in metrics.items() if name.endswith(LOSS) and not np.isfinite(value)}
        said = ", ".join(f"{name} {value:g}" for name, value in bad.items())
        wrong = self.wrong_batch(step)
        why = f"Metrics whose names end in {LOSS} must be finite" if wrong is None else f"Its batch is not: {wrong}"
        return NotFiniteError(
            f"step {step}: {said} of {self.step.name}; nothing after step {max(saved, 0)} is saved. {why}"
        )

    def _wrong_batch(self, number: int) -> str | None:
        return None if self.batches is None else self.batches.not_finite(number)

    def programs(self) -> list[str]:
        """The HLO text of the compiled step."""
        return self.step.programs()

    def evaluate(self, state: Named, between: Callable[[], None]) -> dict[str, float]:
        """What the program's function finds; it is called once, and nothing is known of what it does within."""
        evaluate = self.options.evaluate
        if evaluate is None:
            return {}
        with self.state.context():
            found = checked_metrics(user_code.named(evaluate), evaluate(self.state.tree(state)))
            return {name: float(value) for name, value in jax.device_get(dict(found)).items()}
