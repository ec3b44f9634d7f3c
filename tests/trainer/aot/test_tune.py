"""Which candidates `launcher tune` considers, and in which order it compiles them."""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import pytest

from jaxlaunch.trainer import tune
from jaxlaunch.trainer.aot.candidates import Candidate, Forecast, TracedModel, enumerate_candidates
from jaxlaunch.trainer.aot.chips import Chips
from jaxlaunch.trainer.plan import with_synthetic_data
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.tasks.lm import NextToken
from tests.trainer.references import FIXTURES

DECODER = {
    "kind": "decoder",
    "layers": 2,
    "width": 64,
    "heads": 4,
    "vocab": 64,
    "length": 32,
    "hidden": 128,
}


def job(**keys: Any) -> TrainSpec:
    return TrainSpec.model_validate(
        {"task": "lm", "model": DECODER, "data": {"source": "synthetic"}, "batch": 16} | keys
    )


@pytest.mark.parametrize("experts", [None, 4])
def test_candidates_divide_devices_batch_heads_and_experts(experts: int | None) -> None:
    model = DECODER | ({} if experts is None else {"experts": experts, "experts_per_token": 2})
    result = list(
        enumerate_candidates(
            job(model=model, mesh={"fsdp": -1}), 8, ("mesh", "remat", "accumulate")
        )
    )
    assert (
        len(result) == len(set(result)) and Candidate.from_spec(job(mesh={"fsdp": -1}), 8) in result
    )
    for item in result:
        dp, fsdp, ep, mp = item.mesh
        assert math.prod(item.mesh) == 8 and 16 % (dp * fsdp * ep * item.accumulate) == 0
        assert 4 % mp == 0 and (experts or 1) % ep == 0
    assert {candidate.mesh[2] for candidate in result} == ({1} if experts is None else {1, 2, 4})
    assert {candidate.remat for candidate in result} == {"none", "full"}


def test_mp_divides_key_heads() -> None:
    result = enumerate_candidates(job(model=DECODER | {"kv_heads": 2}), 8, ("mesh",))
    assert {candidate.mesh[3] for candidate in result} == {1, 2}


def test_unselected_choices_keep_job_values() -> None:
    job_value = job(
        mesh={"dp": 2, "mp": 4}, remat=["mixed"], accumulate=2, precision={"compute": "bfloat16"}
    )
    (only,) = enumerate_candidates(job_value, 8, ())
    assert (
        only.changed_keys(job_value, 8) == {}
        and only.apply_to(job_value).precision == job_value.precision
    )
    (remaining,) = [
        candidate
        for candidate in enumerate_candidates(job_value, 8, ("remat",))
        if candidate.remat == ("mixed",)
    ]
    assert remaining.apply_to(job_value).remat == ["mixed"]
    other_items = [
        candidate.changed_keys(job_value, 8)
        for candidate in enumerate_candidates(job_value, 8, ("mesh",))
    ]
    assert {"train.mesh": {"dp": 8}} in other_items and all(
        change.keys() <= {"train.mesh"} for change in other_items
    )


def test_forecast_learns_from_similar_candidates() -> None:
    traced = TracedModel(
        "v5e",
        1,
        10**8,
        12 * 10**8,
        1e13,
        {"none": (10**9, 2 * 10**9), "full": (10**8, 10**8)},
        2,
        64,
        64,
    )
    forecast = Forecast(traced)
    near = Candidate((8, 1, 1, 1), "none", 1, "auto", "bf16")
    other = Candidate((8, 1, 1, 1), "full", 1, "auto", "bf16")
    previous = {candidate: forecast.predict_seconds(candidate) for candidate in (near, other)}
    assert forecast.predict_seconds(other, 1.0) < previous[other], (
        "what was not tried gets the benefit of the doubt"
    )
    forecast.add_observation(near, 3 * previous[near])
    assert forecast.predict_seconds(near) == pytest.approx(3 * previous[near], rel=0.05)
    assert 2 * previous[other] < forecast.predict_seconds(other) < 3 * previous[other]
    forecast.add_observation(other, previous[other])
    assert (
        forecast.predict_seconds(near)
        > 2 * forecast.predict_seconds(other) * previous[near] / previous[other]
    )


def test_search_finds_near_best_with_few_compilations() -> None:
    """Compare with the compiled results of every candidate, from tests.trainer.aot.exhaustive."""
    for name, recorded in json.loads((FIXTURES / "tune.json").read_text()).items():
        parts = recorded["traced"]
        residuals = {key: tuple(sizes) for key, sizes in parts.pop("residuals").items()}
        forecast, took = Forecast(TracedModel(**parts, residuals=residuals)), {}
        points = {_candidate(point): point["seconds"] for point in recorded["points"]}
        job_value = next(iter(points))
        for _ in range(len(points) // 3):
            chosen = min(
                points.keys() - took.keys(),
                key=lambda candidate: (
                    candidate != job_value,
                    forecast.predict_seconds(candidate, tune.OPTIMISM_DEVIATIONS),
                ),
            )
            took[chosen] = points[chosen]
            forecast.add_observation(chosen, took[chosen])
        assert min(took.values()) <= 1.03 * min(points.values()), name


def test_compiler_failure_of_candidate_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As libtpu 0.0.42.1 did for experts over fsdp 2 and ep 2 of a v5p."""

    def fails(self: jax.stages.Lowered, **options: Any) -> jax.stages.Compiled:
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure (a file)\nand its stack")

    task = NextToken()
    train = with_synthetic_data(job(), task)
    search = tune.Search(train, task, Chips("cpu", 1, 8), ("remat",), is_measured=True)
    monkeypatch.setattr(jax.stages.Lowered, "compile", fails)
    # A failure of the job itself is not the refusal of a candidate.
    with pytest.raises(jax.errors.JaxRuntimeError):
        search.compile_next()
    tried = search.compile_next()
    assert tried is not None
    assert tried["refused"] == "the compiler fails: INTERNAL: RET_CHECK failure (a file)"


def test_measured_candidate_has_modelled_seconds() -> None:
    task = NextToken()
    search = tune.Search(
        with_synthetic_data(job(), task),
        task,
        Chips("cpu", 1, 8),
        ("accumulate",),
        is_measured=True,
    )
    result = [search.compile_next(), search.compile_next()]
    modelled = [
        report["compiled"]["modelled"]["seconds"] for report in result if report is not None
    ]
    assert [len(set(seconds)) for seconds in modelled] == [1, 1], "one number and no range"
    assert 0 < modelled[0][0] < modelled[1][0], "two micro-batches read the weights twice"


def _candidate(point: dict[str, Any]) -> Candidate:
    return Candidate(
        tuple(point["mesh"]),
        point["remat"],
        point["accumulate"],
        point["attention"],
        point["precision"],
    )
