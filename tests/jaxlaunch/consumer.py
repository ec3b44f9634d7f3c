"""A user's typed code that needs every public name. mypy --strict reads it; nothing runs it."""

from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import jaxlaunch
from jaxlaunch import Batch, Loss, Sample, Source, Split, Task, TrainSpec


class Squares(Source):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.float32(index), "y": np.float32(index**2)}

    def fingerprint(self) -> str:
        return "squares"


class Curve(Task):
    def model(self, spec: TrainSpec, rngs: nnx.Rngs) -> nnx.Module:
        if spec.seed:
            return jaxlaunch.Linen(linen.Dense(1), jnp.zeros((1, 1)), rngs=rngs)
        return jaxlaunch.Haiku(
            hk.transform(lambda x: hk.Linear(1)(x)), jnp.zeros((1, 1)), rngs=rngs
        )

    def loss(self, model: Callable[[jax.Array], jax.Array], batch: Batch, rng: jax.Array) -> Loss:
        error_B = (model(batch["x"]) - batch["y"]) ** 2
        weight = batch["weight"].sum()
        return Loss((error_B * batch["weight"]).sum(), weight, {"rows": (weight, weight)})

    def source(self, spec: TrainSpec, split: Split) -> Source | None:
        return Squares() if split == "train" else jaxlaunch.open_source(spec, split)

    def example(self, raw: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        return {key: np.asarray(value) for key, value in raw.items()}


class Images(jaxlaunch.Classify):
    def loss(self, model: Any, batch: Batch, rng: jax.Array) -> Loss:
        return super().loss(model, batch, rng)


tasks: list[Task] = [Curve(), Images(), jaxlaunch.NextToken(), jaxlaunch.Preference()]
wrong_task: Task = Squares()  # type: ignore[assignment]


class State(dict[str, jax.Array]):
    """A state that is not `dict` itself, so that what `run` returns is seen to be of its type."""


def step(state: State, batch: Batch) -> tuple[State, Mapping[str, Any]]:
    return state, {"loss": batch["x"].mean()}


def train_model() -> State:
    trained_model: State = jaxlaunch.run(
        step, State, Squares(), steps=10, batch=2, mesh={"fsdp": -1}, every=None
    )
    return jaxlaunch.run(step, trained_model, lambda number: {"x": jnp.ones(number)}, steps=20)


def ask_model(run: str) -> str | None:
    jaxlaunch.report(step=1, phase="eval", committed=None, loss=0.5)
    try:
        loaded = jaxlaunch.load(run, step="best", ema=True, mesh={"dp": 1}, note=lambda text: None)
    except (jaxlaunch.UserError, jaxlaunch.TrainerError) as error:
        return str(error)
    if isinstance(loaded, jaxlaunch.TaskModel):
        return (
            f"{loaded.step}: {loaded.evaluate()['loss']:.2f}, "
            f"{loaded.predict(np.zeros((1, 8, 8))).shape}"
        )
    return generate_text(loaded)


def generate_text(model: jaxlaunch.TextModel) -> str | None:
    jaxlaunch.lm_eval_model(model, batch=2)
    first: Sample = model.generate(["def "], stop=["\n"], max_tokens=4, top_p=0.9)[0][0]
    return model.text(first)


def write_files() -> int:
    return jaxlaunch.write_records("train.array_record", ({"x": np.ones(3)} for _ in range(4)))


@jaxlaunch.job(hosts=2, accelerator="cpu")
def double(number: int) -> int:
    return 2 * number


def run_jobs() -> jaxlaunch.Handle:
    job = jaxlaunch.Job(name="x", accelerator="cpu", command=["true"])
    try:
        code: int = double(job.validate()["devices"])
        return job.run(on_line=print) if code else job.submit(namespace="team")
    except jaxlaunch.JobFailedError as error:
        code = error.exit_code
    except jaxlaunch.WaitTimeoutError:
        pass
    return jaxlaunch.attach("x")


double("two")  # type: ignore[arg-type]
jaxlaunch.load(3)  # type: ignore[arg-type]
generate_text(jaxlaunch.load("lm"))  # type: ignore[arg-type]
jaxlaunch.report(step="one")  # type: ignore[arg-type]
jaxlaunch.run(step, State, epochs=10)  # type: ignore[call-arg]
missing = jaxlaunch.nothing  # type: ignore[attr-defined]
