"""The public API of jaxlaunch, documented in docs/api.md. All submodules are private.

The module of a name is imported when the name is first used, so `import jaxlaunch` is fast. For
`jaxlaunch.report`, the agent copies this file into images without jaxlaunch, with the other files
that launcher/agent/host/folders.py lists: it needs only the standard library and Python >= 3.10.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any, Literal

from jaxlaunch.reporting import report

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TypeVar

    import jax

    from jaxlaunch.launcher.client.function import job
    from jaxlaunch.launcher.client.handle import Handle, attach
    from jaxlaunch.launcher.client.job import Job
    from jaxlaunch.launcher.errors import JobFailedError, UserError, WaitTimeoutError
    from jaxlaunch.trainer.data.records import write as write_records
    from jaxlaunch.trainer.data.source import Source, Split
    from jaxlaunch.trainer.errors import TrainerError
    from jaxlaunch.trainer.evaluation.task_model import TaskModel
    from jaxlaunch.trainer.generate.generator import Sample
    from jaxlaunch.trainer.generate.harness import model as lm_eval_model
    from jaxlaunch.trainer.generate.text_model import TextModel
    from jaxlaunch.trainer.models.custom import Haiku, Linen
    from jaxlaunch.trainer.sources.open import open_source
    from jaxlaunch.trainer.spec import TrainSpec
    from jaxlaunch.trainer.task import Batch, Loss, Task
    from jaxlaunch.trainer.tasks.classify import Classify
    from jaxlaunch.trainer.tasks.dpo import Preference
    from jaxlaunch.trainer.tasks.lm import NextToken

    State = TypeVar("State")

__all__ = [
    "Batch",
    "Classify",
    "Haiku",
    "Handle",
    "Job",
    "JobFailedError",
    "Linen",
    "Loss",
    "NextToken",
    "Preference",
    "Sample",
    "Source",
    "Split",
    "Task",
    "TaskModel",
    "TextModel",
    "TrainSpec",
    "TrainerError",
    "UserError",
    "WaitTimeoutError",
    "attach",
    "job",
    "lm_eval_model",
    "load",
    "open_source",
    "report",
    "run",
    "write_records",
]

# The module and the attribute of each name that is imported on first use. A test compares them with
# the imports for the type checker above.
_LAZY_IMPORTS = {
    "Batch": "jaxlaunch.trainer.task:Batch",
    "Classify": "jaxlaunch.trainer.tasks.classify:Classify",
    "Haiku": "jaxlaunch.trainer.models.custom:Haiku",
    "Handle": "jaxlaunch.launcher.client.handle:Handle",
    "Job": "jaxlaunch.launcher.client.job:Job",
    "JobFailedError": "jaxlaunch.launcher.errors:JobFailedError",
    "Linen": "jaxlaunch.trainer.models.custom:Linen",
    "Loss": "jaxlaunch.trainer.task:Loss",
    "NextToken": "jaxlaunch.trainer.tasks.lm:NextToken",
    "Preference": "jaxlaunch.trainer.tasks.dpo:Preference",
    "Sample": "jaxlaunch.trainer.generate.generator:Sample",
    "Source": "jaxlaunch.trainer.data.source:Source",
    "Split": "jaxlaunch.trainer.data.source:Split",
    "Task": "jaxlaunch.trainer.task:Task",
    "TaskModel": "jaxlaunch.trainer.evaluation.task_model:TaskModel",
    "TextModel": "jaxlaunch.trainer.generate.text_model:TextModel",
    "TrainSpec": "jaxlaunch.trainer.spec:TrainSpec",
    "TrainerError": "jaxlaunch.trainer.errors:TrainerError",
    "UserError": "jaxlaunch.launcher.errors:UserError",
    "WaitTimeoutError": "jaxlaunch.launcher.errors:WaitTimeoutError",
    "attach": "jaxlaunch.launcher.client.handle:attach",
    "job": "jaxlaunch.launcher.client.function:job",
    "lm_eval_model": "jaxlaunch.trainer.generate.harness:model",
    "open_source": "jaxlaunch.trainer.sources.open:open_source",
    "write_records": "jaxlaunch.trainer.data.records:write",
}


@contextlib.contextmanager
def _explain_missing_package(name: str) -> Iterator[None]:
    """Add the command that installs the extra to the error of an import that lacks a package.

    Args:
        name: The name of the API that needs the import.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        try:
            from jaxlaunch.installation import install_hint
        except ImportError:
            # The agent has copied only the files that `report` needs into this image.
            hint = "install jaxlaunch in this image with the extra train"
        else:
            hint = install_hint("train")
        message = f"jaxlaunch.{name} needs {error.name}, which is not installed here: {hint}"
        raise ModuleNotFoundError(message, name=error.name) from None


# Type checkers must not see this function, because they would then accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LAZY_IMPORTS:
            raise AttributeError(f"module 'jaxlaunch' has no attribute {name!r}")
        module, _, attribute = _LAZY_IMPORTS[name].partition(":")
        with _explain_missing_package(name):
            value = getattr(importlib.import_module(module), attribute)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__


def load(
    run: str,
    *,
    step: int | Literal["best"] | None = None,
    ema: bool = False,
    precision: Literal["fp32", "tf32", "bf16"] | None = None,
    mesh: Mapping[str, int] | jax.sharding.Mesh | None = None,
    note: Callable[[str], None] = print,
) -> TextModel | TaskModel:
    """Load a trained model and put one copy of its weights on the devices.

    **Arguments:**

    - `run`: the name or folder of a run, a step in a folder of checkpoints
      (`runs/lm/checkpoints/35`), a folder or URL of checkpoints, an export, or a Hugging Face
      folder. A custom task needs its run.
    - `step`: the number of a saved step, or `"best"`; by default the newest undamaged one.
    - `ema`: whether to take the moving average of the weights.
    - `precision`: the precision to compute in, for language models only; by default that of the
      training, and fp32 for a Hugging Face folder.
    - `mesh`: devices per axis, such as `{"fsdp": -1}`, or a `jax.sharding.Mesh`; by default that of
      the training if it fits the devices of this machine.
    - `note`: a function that is called with remarks, one sentence each.

    **Returns:**

    A [`TextModel`](#textmodel) for a language model, a [`TaskModel`](#taskmodel) for any other
    task. `isinstance` distinguishes them, also for a type checker. A custom task is imported from
    the job's code, whose folder is added to `sys.path`.

    **Raises:**

    [`UserError`](#usererror) if there is no such run, [`TrainerError`](#trainererror) if its
    weights cannot be used, `TypeError` if `precision` is given for another task,
    `ModuleNotFoundError` without the extra `[train]`.

    **Example:**

    ```python
    import jaxlaunch

    lm = jaxlaunch.load("runs/lm")
    assert isinstance(lm, jaxlaunch.TextModel)
    [[sample]] = lm.generate("def ", max_tokens=8)
    print(lm.text(sample))

    digits = jaxlaunch.load("runs/digits")
    assert isinstance(digits, jaxlaunch.TaskModel)
    print(digits.evaluate()["accuracy"])
    ```
    """
    with _explain_missing_package("load"):
        from jaxlaunch.launcher.local import trainer_process
    folder, folder_step = trainer_process.find_weights(run)
    step = folder_step if step is None else step
    with _explain_missing_package("load"):
        from jaxlaunch.trainer.evaluation import task_model
        from jaxlaunch.trainer.generate import text_model
    # Without a job, a description of inputs next to the weights shows that they are a classifier's.
    has_job = trainer_process.has_job(run)
    inputs = None if has_job else task_model.read_described_inputs(folder)
    if inputs is None and not trainer_process.generates_no_text(run):
        return text_model.load_text_model(
            folder, step=step, ema=ema, precision=precision, mesh=mesh, note=note
        )
    if precision is not None:
        raise TypeError(
            "jaxlaunch.load(precision=…) is for language models only; leave it out: any other task "
            "uses the precision of its training"
        )
    if inputs is not None:
        return task_model.load_without_job(folder, inputs, step=step, ema=ema, mesh=mesh, note=note)
    training = trainer_process.open_training(run)
    code = training.job.code_folder
    if code is not None and (code := str(training.folder / code)) not in sys.path:
        sys.path.append(code)
    spec = training.train.model_dump_json(exclude_unset=True)
    return task_model.load_task_model(folder, spec, step=step, ema=ema, mesh=mesh, note=note)


def run(
    step: Callable[..., tuple[State, Mapping[str, Any]]],
    state: State | Callable[[], State],
    data: Any = None,
    *,
    steps: int,
    every: int | None = 500,
    log_every: int = 10,
    keep: int = 3,
    batch: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    evaluate: Callable[[State], Mapping[str, float]] | None = None,
    mesh: Mapping[str, int] | None = None,
    sharding: Mapping[str, Sequence[str | None]] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> State:
    """Call a step function `steps` times on the whole mesh, with everything that a training needs.

    It adds checkpoints, exact resume, a clean stop on SIGTERM, metrics, job results and profiles.
    Use it in a program that `command:` starts, or without a job on the devices of this machine:
    [your own loop](your-loop.md).

    **Arguments:**

    - `step`: `step(state, batch)`, or `step(state)` without `data`, returns `(state, metrics)`: a
      state of the same arrays, and a dict of real scalars. It is compiled once for the whole mesh,
      with its state donated, and sees the global batch. A metric named `loss`, or `…_loss`, must be
      finite.
    - `state`: a function without arguments that makes the first state, called under `jax.jit`; or
      the state itself. It may be any pytree of arrays, including random keys and `flax.nnx`
      modules. Anything else that a step needs is lost when a run resumes.
    - `data`: a function of the step's number, starting with `data(0)`, that returns the global
      batch, a pytree of arrays `[B, …]`; or a dataset with `__len__` and `__getitem__`, whose items
      are batches or, if `batch` is given, examples.
    - `steps`: the number of steps of the whole run, including those before a restart.
    - `every`: steps between two saves, and between two evaluations; with `None` there is one of
      each, at the end.
    - `log_every`: steps between two lines of metrics.
    - `keep`: how many of the newest checkpoints are kept.
    - `batch`: the number of examples in a global batch, if the items of `data` are examples; each
      is read once per epoch.
    - `shuffle`: whether the examples are read in a random order.
    - `seed`: the seed of that order.
    - `evaluate`: a function of the state that returns a dict of numbers.
    - `mesh`: devices per axis of `dp`, `fsdp`, `ep` and `mp`; by default `{"dp": -1}`, all of them.
    - `sharding`: rules by the names of arrays, `{r".*kernel": ("embed", "hidden")}`. An array
      without a rule is copied to every device, unless `fsdp` splits it.
    - `folder`: the folder of the checkpoints; by default that of the run, or
      `runs/SCRIPT/checkpoints` outside a job.

    **Returns:**

    The state after the last step. If it is called again, it resumes from the newest checkpoint, or
    returns the state immediately if all steps are done.

    **Raises:**

    [`TrainerError`](#trainererror) for errors that you can fix, anything that your functions raise,
    and `ModuleNotFoundError` without the extra `[train]`. In a job the process ends instead, with
    one of the [exit codes](exit-codes.md).

    **Example:**

    ```python
    import jax
    import jax.numpy as jnp
    import jaxlaunch


    def step(state, batch):
        loss = lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
        value, gradient = jax.value_and_grad(loss)(state["w"])
        return {"w": state["w"] - 0.1 * gradient}, {"loss": value}


    def data(number):
        x = jax.random.normal(jax.random.key(number), (64, 8))
        return {"x": x, "y": x.sum(1)}


    state = jaxlaunch.run(step, lambda: {"w": jnp.zeros(8)}, data, steps=20)
    assert state["w"].shape == (8,)
    ```
    """
    with _explain_missing_package("run"):
        from jaxlaunch.trainer.loop import run as loop
    final_state: State = loop.run(
        step,
        state,
        data,
        steps=steps,
        every=every,
        log_every=log_every,
        keep=keep,
        batch=batch,
        shuffle=shuffle,
        seed=seed,
        evaluate=evaluate,
        mesh=mesh,
        sharding=sharding,
        folder=folder,
    )
    return final_state
