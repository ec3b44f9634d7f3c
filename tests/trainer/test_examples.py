"""The examples' models and tasks train and evaluate at a small size."""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlaunch import Classify, contract
from jaxlaunch.launcher.job import load
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.start.process import read_spec
from jaxlaunch.trainer.step.samples import TaskSamples
from jaxlaunch.trainer.train import build_loop
from tests.trainer import tiny

pytestmark = pytest.mark.usefixtures("standard")

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = [
    "train.steps=2",
    "train.log_every=1",
    "train.eval={every: null, batches: 1}",
    "train.batch=16",
]
DIGITS = [*SMALL, "train.epochs=null", "train.mesh={dp: -1}"]
JOBS: dict[str, list[str]] = {
    "mnist": [*SMALL, "train.epochs=null", "train.data.name=digits"],
    "rnn": [*DIGITS, "train.model.width=8"],
    "ensemble": [*DIGITS, "train.model.width=8"],
    "diffusion": [*DIGITS, "train.model.width=8"],
    "large_model": [
        *SMALL,
        "train.data.path=stdlib://json/*.py",
        "train.data.eval_split=0.2",
        "train.model={kind: decoder, layers: 2, width: 32, heads: 8, kv_heads: 4, vocab: 256, "
        "length: 16}",
        "train.accumulate=2",
    ],
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples' modules, as their jobs name them."""
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run folder of an example's job at a small size on eight devices, trained once."""

    @functools.cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        job = load.load_job(EXAMPLES / f"{name}.yaml", JOBS[name])
        assert job.train is not None
        (folder / ".lock").touch()
        (folder / "job.yaml").write_text(
            json.dumps(job.model_dump(mode="json", exclude_unset=True))
        )
        spec, task = read_spec({contract.TRAIN_SPEC: job.train.model_dump_json(exclude_unset=True)})
        build_loop(spec, task, RunContext(run_dir=str(folder)), Stop(), Progress(None)).run()
        return folder

    return run


@pytest.mark.extended
@pytest.mark.parametrize("name", JOBS)
def test_example_trains_and_evaluates(name: str, trained: Callable[[str], Path]) -> None:
    lines = [
        json.loads(line) for line in (trained(name) / "metrics.jsonl").read_text().splitlines()
    ]
    evaluated = json.loads((trained(name) / "eval.jsonl").read_text())
    assert np.isfinite([line["loss"] for line in (*lines, evaluated)]).all()
    assert lines[-1]["step"] == 2 and evaluated["examples"] > 0
    if name == "ensemble":
        assert evaluated["example_gradient"] > 0 and 0 < evaluated["spread"] < 1


def test_task_samples_are_checked_before_first_step(tmp_path: Path) -> None:
    class Told(Classify):
        def __init__(self, shown: Callable[[Any], Any]) -> None:
            self.shown = shown

        def samples(self, model: Any, rng: jax.Array) -> Any:
            return jax.random.randint(rng, (4,), 0, 10)

    data = {"source": "synthetic", "examples": 16, "eval_examples": 16, "shape": [4]}
    keys = {
        "task": "classify",
        "model": {"kind": "mlp", "layers": 1, "width": 8},
        "data": data,
        "batch": 16,
        "steps": 1,
    }
    spec = TrainSpec.model_validate(keys)
    cases: list[tuple[Callable[[Any], Any], str]] = [
        (
            lambda ids: {"ids": ids},
            r"its samples cannot be shown: report\(image=\{'ids'",
        ),
        (lambda ids: [ids], "shown returned .*list.*, not a dict of pictures by name"),
    ]
    for shown, says in cases:
        with pytest.raises(SpecError, match=says):
            tiny.run_to_an_error(
                build_loop(
                    spec, Told(shown), RunContext(run_dir=str(tmp_path)), Stop(), Progress(None)
                )
            )
    assert not (tmp_path / "metrics.jsonl").exists()


def test_task_samples_are_optional() -> None:
    task, spec, step = Classify(), Mock(task="classify"), Mock()
    assert TaskSamples.for_task(spec, task, step) is None
    vars(task)["samples"] = lambda model, rng: {}
    assert TaskSamples.for_task(spec, task, step) is not None
    vars(task)["samples"] = None  # of a class that shows nothing of what the one before it shows
    assert TaskSamples.for_task(spec, task, step) is None


def test_every_example_has_introduction() -> None:
    for name in JOBS:
        message = (
            (EXAMPLES / f"{name}.py")
            if (EXAMPLES / f"{name}.py").exists()
            else EXAMPLES / f"{name}.yaml"
        )
        text = message.read_text()
        why = (
            text.split('"""')[1]
            if message.suffix == ".py"
            else "\n".join(line for line in text.splitlines() if "#" in line)
        )
        assert len(why.split()) >= 100, name


@pytest.mark.extended
def test_diffusion_model_draws_requested_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    diffusion = importlib.import_module("diffusion")
    monkeypatch.setattr(diffusion, "T", 4)

    def noise(x: jax.Array, time_B: jax.Array, label_B: jax.Array) -> jax.Array:
        """Of a network that knows that every image is its class."""
        remaining = jnp.asarray(diffusion.ALPHA_BAR)[time_B][:, None, None, None]
        expected = label_B[:, None, None, None] / 5.0 - 1.0
        return (x - jnp.sqrt(remaining) * expected) / jnp.sqrt(1 - remaining)

    images = jax.jit(lambda key: diffusion.sample(noise, jnp.arange(3), key))(jax.random.key(0))
    assert images.shape == (3, 8, 8) and images.dtype == jnp.uint8
    np.testing.assert_allclose(images[:, 0, 0], (jnp.arange(3) / 5.0) * 127.5, atol=1)


@pytest.mark.extended
def test_samples_are_judged_by_another_classifier(
    trained: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    diffusion = importlib.import_module("diffusion")
    monkeypatch.setattr(diffusion, "T", 4)
    diffusion.judge_samples(
        str(trained("diffusion")), str(trained("mnist")), 24, min_confidence=0.0
    )
    held_out, samples, options = capsys.readouterr().out.splitlines()[-3:]
    for line, start in (
        (held_out, "held out: 100.0% of 16 are"),
        (samples, "samples: 100.0% of 24 are"),
    ):
        assert line.startswith(start)
        counts = re.findall(r"\d+", line.partition("[")[2].partition("]")[0])
        assert len(counts) == 10 and f" {sum(map(int, counts))} are" in line
    assert re.fullmatch(r"samples: \d+\.\d% are of the class that was asked for", options)
