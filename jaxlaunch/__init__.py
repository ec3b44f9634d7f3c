"""What a program of yours may import of jaxlaunch: `load`, `report` and `run`. None imports more until it is called.

Standard library only, Python >= 3.10: the agent brings this file and `report` into images without our packages.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

from jaxlaunch.reporting import report

if TYPE_CHECKING:
    from jaxlaunch.trainer.evaluation.trained import Trained
    from jaxlaunch.trainer.generate.loaded import Loaded

__all__ = ["load", "report", "run"]


def load(run: str, *, step: int | Literal["best"] | None = None, **options: Any) -> Loaded | Trained:
    """The trained model of a run, with its parameters: by default the newest step's.

    Of a language model: `.model`, `.params`, `.tokenizer`, `.generate(…)`, `.logprobs(…)`. `run` is then what
    `launcher sample` takes: the name or folder of a run, a step in its folder of checkpoints, a folder or URL of
    checkpoints, or a Hugging Face folder. `options` are `ema`, `precision`, `mesh` and `note` of
    jaxlaunch.trainer.generate.loaded.load.

    Of any other task, of the name or folder of a run: `.model`, `.params`, `.predict(arrays)`, `.held_out()`,
    `.evaluate()`. `options` are `ema`, `mesh` and `note` of jaxlaunch.trainer.evaluation.trained.load. The job's
    code is imported, from a folder that is added to sys.path.

    Raises jaxlaunch.launcher.errors.UserError where there is no such run, and a TrainerError where its weights cannot
    be used.
    """
    from jaxlaunch.launcher.local import run_folders

    folder, of_folder = run_folders.weights(run)
    chosen = of_folder if step is None else step
    if run_folders.generates_no_text(run):
        from jaxlaunch.trainer.evaluation import trained

        job, train, home = run_folders.training(run)
        if job.code_folder is not None and (code := str(home / job.code_folder)) not in sys.path:
            sys.path.append(code)
        return trained.load(folder, train.model_dump_json(exclude_unset=True), step=chosen, **options)
    from jaxlaunch.trainer.generate import loaded

    return loaded.load(folder, step=chosen, **options)


def run(step: Any, state: Any, data: Any = None, *, steps: int, **options: Any) -> Any:
    """The state after `steps` calls of your step: mesh, checkpoints, exact resume, a stop by SIGTERM, metrics, job
    results and profiles come with it. In a program of `command:`, or alone on this machine's devices.

    `step(state, batch)` returns (state, metrics), and `step(state)` does without `data`. It is compiled once, its state
    donated, over the whole mesh: it sees the global batch. `metrics` is a dict of real scalars; a run whose metric
    named `loss`, or `..._loss`, is not finite ends.

    `state` is a function without arguments that makes it, called under `jax.jit`, or the state itself: any pytree of
    arrays, random keys and flax.nnx modules included. What a step needs and is not in it is lost when a run resumes.

    `data` is a function of the step, `data(0)` first, that returns the global batch: a pytree of arrays with one number
    of rows. Or a dataset with `__len__` and `__getitem__`: of batches, or with `batch=` of examples, each seen once an
    epoch in an order drawn from `seed` (`shuffle=False`: in order).

    The other options: `every=500`, steps between saves and evaluations, None for one at the end; `log_every=10`;
    `keep=3`, newest checkpoints kept; `evaluate`, called with the state, returns a dict of numbers; `mesh`, devices per
    axis, by default {"dp": -1}; `sharding`, rules by the names of arrays, {r".*kernel": ("embed", "hidden")}, else
    every device has a copy but for what `fsdp` splits; `folder`, of the checkpoints, by default that of the run, or
    `runs/SCRIPT/checkpoints` without one.

    Called again, it goes on from the newest checkpoint, and returns the state at once where all steps are done. Raises
    a TrainerError for what you can mend and whatever your functions raise; below an agent the process then ends with a
    code of docs/exit-codes.md, and after SIGTERM with 80.
    """
    try:
        from jaxlaunch.trainer.loop import run as loop
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"jaxlaunch.run needs the trainer, and {error.name} is not installed: pip install 'jaxlaunch[train]'",
            name=error.name,
        ) from None
    return loop.run(step, state, data, steps=steps, **options)
