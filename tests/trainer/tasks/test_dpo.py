"""Preferences are learned as in the papers, against the model before the training."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx

from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.adapters import frozen_base
from jaxlaunch.trainer.adapters.lora import attach_reference
from jaxlaunch.trainer.data.examples import UnusableExampleError
from jaxlaunch.trainer.errors import CheckpointError, SpecError
from jaxlaunch.trainer.export import export
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.spec import DPO, TrainSpec
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.tasks.dpo import Preference
from jaxlaunch.trainer.train import build_loop
from tests.trainer import references, tiny

EXAMPLES = Path(__file__).parents[3] / "examples"
VOCAB = 6


class Bigram(nnx.Module):
    """Logits of a token by the one before: a model whose gradient is written down in a line."""

    def __init__(self, table_VV: Any) -> None:
        self.table = nnx.Param(jnp.asarray(table_VV, jnp.float32))

    def __call__(self, tokens_BL: Any) -> Any:
        return self.table[...][tokens_BL]


def some_pairs(draw: np.random.Generator, count: int = 5) -> dict[str, np.ndarray]:
    arrays = {
        "tokens": draw.integers(0, VOCAB, (count, 2, 8), np.int32),
        "length": np.full((count, 2), 8, np.int32),
    }
    mask = (draw.random((count, 2, 7)) < 0.6).astype(np.float32)
    return arrays | {"mask": mask, "weight": np.append(np.ones(count - 1), 0).astype(np.float32)}


def log_probability(table_VV: Any, tokens_T: Any, mask_L: Any) -> tuple[float, np.ndarray]:
    """Return that of the tokens that count, each after the one before, and its gradient."""
    shares_VV = table_VV - np.log(np.exp(table_VV).sum(1, keepdims=True))
    total, grad_VV = 0.0, np.zeros_like(table_VV)
    for previous, after, counts in zip(tokens_T, tokens_T[1:], mask_L, strict=False):
        total += counts * shares_VV[previous, after]
        grad_VV[previous] += counts * (np.eye(VOCAB)[after] - np.exp(shares_VV[previous]))
    return total, grad_VV


def by_the_paper(
    config: specs.Dpo, ours_VV: Any, theirs_VV: Any, batch: dict[str, np.ndarray]
) -> tuple[float, np.ndarray]:
    """Return the mean loss and its gradient, in float64.

    Rafailov et al. 2023, equation 7 and section 4; Azar et al. 2023, equation 17.
    """
    loss, grad_VV, count = 0.0, np.zeros_like(ours_VV), int(batch["weight"].sum())
    beta, smoothing = config.beta, config.label_smoothing
    for pair in list(zip(batch["tokens"], batch["mask"], strict=True))[:count]:
        rows = list(zip(*pair, strict=True))
        (win, d_win), (lose, d_lose) = (log_probability(ours_VV, *row) for row in rows)
        ref_win, ref_lose = (log_probability(theirs_VV, *row)[0] for row in rows)
        h = (win - ref_win) - (lose - ref_lose)
        if config.kind == "ipo":
            pair_loss, slope = (h - 1 / (2 * beta)) ** 2, 2 * (h - 1 / (2 * beta))
        else:
            right, wrong = 1 / (1 + math.exp(-beta * h)), 1 / (1 + math.exp(beta * h))
            pair_loss = -(1 - smoothing) * math.log(right) - smoothing * math.log(wrong)
            slope = beta * (smoothing * right - (1 - smoothing) * wrong)
        loss, grad_VV = loss + pair_loss / count, grad_VV + slope * (d_win - d_lose) / count
    return loss, grad_VV


@pytest.mark.parametrize(
    "config",
    [specs.Dpo(), specs.Dpo(beta=0.5, label_smoothing=0.2), specs.Dpo(kind="ipo", beta=1.0)],
    ids=["sigmoid", "smoothed", "ipo"],
)
def test_loss_and_gradients_match_paper(config: specs.Dpo) -> None:
    draw = np.random.default_rng(1)
    ours_VV, theirs_VV = draw.normal(size=(2, VOCAB, VOCAB)).astype(np.float32)
    batch, task = some_pairs(draw), Preference()
    task._config = config

    @jax.jit
    def loss(table_VV: Any) -> Any:
        model = Bigram(table_VV)
        attach_reference(model, Bigram(theirs_VV))
        result = task.loss(model, batch, jax.random.key(0))
        means = {name: total / weight for name, (total, weight) in result.metrics.items()}
        return result.sum / result.weight, means

    (result, metrics), grad_VV = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(ours_VV))
    tables = ours_VV.astype(np.float64), theirs_VV.astype(np.float64)
    expected, wanted_VV = by_the_paper(config, *tables, batch)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(grad_VV, wanted_VV, rtol=1e-6, atol=1e-6)
    assert np.abs(wanted_VV).max() > 0.01
    rewards = [float(metrics[f"rewards/{text}"]) for text in ("chosen", "rejected")]
    assert float(metrics["margin"]) == pytest.approx(rewards[0] - rewards[1], abs=1e-6)
    assert float(metrics["accuracy"]) in (0, 0.25, 0.5, 0.75, 1)  # of four pairs that count


def mean_log_probabilities(
    table_VV: Any, batch: dict[str, np.ndarray], count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sums and means over the answers [count, 2], and the sums over the chosen texts."""
    sums, means, texts = np.zeros((count, 2)), np.zeros((count, 2)), np.zeros(count)
    for pair in range(count):
        for row in range(2):
            tokens_T, mask_L = batch["tokens"][pair, row], batch["mask"][pair, row]
            sums[pair, row] = log_probability(table_VV, tokens_T, mask_L)[0]
            means[pair, row] = sums[pair, row] / mask_L.sum()
        texts[pair] = log_probability(table_VV, batch["tokens"][pair, 0], np.ones(7))[0]
    return sums, means, texts


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def by_trl(config: Any, ours_VV: Any, batch: dict[str, np.ndarray]) -> float:
    """Return the mean loss over pairs as trl 1.16 computes it, in float64.

    `ORPOTrainer.odds_ratio_loss` and `get_batch_loss_metrics` (Hong et al. 2024, equations 4 to
    7): the cross-entropy is the mean over all tokens of the chosen texts. `CPOTrainer.cpo_loss`
    with loss_type simpo (Meng et al. 2024, equation 6).
    """
    count = int(batch["weight"].sum())
    _, means, texts = mean_log_probabilities(ours_VV, batch, count)
    if isinstance(config, specs.Orpo):
        odds = np.log(np.exp(means) / (1 - np.exp(means)))
        ratio = np.log(sigmoid(odds[:, 0] - odds[:, 1]))
        return float(-texts.sum() / (7 * count) - (config.beta * ratio).mean())
    logits = means[:, 0] - means[:, 1] - config.gamma / config.beta
    smoothing = config.label_smoothing
    loss = -np.log(sigmoid(config.beta * logits)) * (1 - smoothing)
    return float((loss - np.log(sigmoid(-config.beta * logits)) * smoothing).mean())


def kto_by_trl(
    config: specs.Kto, ours_VV: Any, theirs_VV: Any, batch: Any, kl: float | None = None
) -> tuple[float, float]:
    """Return mean loss and divergence of trl 1.16's `KTOTrainer`, in float64.

    Ethayarajh et al. 2024, equation 8. The divergence, unless it is given, is that of each prompt
    with the answer of the row before.
    """
    count = int(batch["weight"].sum())
    ratios, divergences = [], []
    for row in range(len(batch["tokens"])):
        parts = []
        for index in (row, row - 1):
            start = int(np.flatnonzero(batch["mask"][index])[0]) + 1
            end = int(batch["length"][index])
            tokens_T, mask_L = batch["tokens"][index], batch["mask"][index]
            parts.append((tokens_T[:start], tokens_T[start:end], mask_L[start - 1 : end - 1]))
        (prompt, answer, mask), (_, other, other_mask) = parts
        for texts, kind, kind_mask in ((answer, ratios, mask), (other, divergences, other_mask)):
            tokens = np.concatenate([prompt, texts])[:8]
            weights = np.concatenate([np.zeros(len(prompt) - 1), kind_mask])[:7]
            scores = [log_probability(table, tokens, weights)[0] for table in (ours_VV, theirs_VV)]
            kind.append(scores[0] - scores[1])
    kl = max(float(np.mean(divergences[:count])), 0.0) if kl is None else kl
    loss = 0.0
    for ratio, label in zip(ratios[:count], batch["label"], strict=False):
        if label:
            loss += config.desirable_weight * (1 - sigmoid(config.beta * (ratio - kl)))
        else:
            loss += config.undesirable_weight * (1 - sigmoid(config.beta * (kl - ratio)))
    return float(loss / count), kl


def differentiate(task: Preference, batch: Any, ours_VV: Any, theirs_VV: Any) -> tuple[Any, Any]:
    @jax.jit
    def loss(table_VV: Any) -> Any:
        model = Bigram(table_VV)
        attach_reference(model, Bigram(theirs_VV))
        result = task.loss(model, batch, jax.random.key(0))
        return result.sum / result.weight

    return jax.value_and_grad(loss)(jnp.asarray(ours_VV, jnp.float32))


def assert_matches(expected: Any, task: Preference, batch: Any, tables: Any) -> None:
    """Compare the loss with a function of the table, and its gradient with finite differences."""
    ours_VV, theirs_VV = tables
    result, grad_VV = differentiate(task, batch, ours_VV, theirs_VV)
    table_VV = ours_VV.astype(np.float64)
    np.testing.assert_allclose(result, expected(table_VV), rtol=1e-6, atol=1e-6)
    for place in np.ndindex(2, 3):
        step_VV = np.zeros_like(table_VV)
        step_VV[place] = 1e-5
        slope = (expected(table_VV + step_VV) - expected(table_VV - step_VV)) / 2e-5
        np.testing.assert_allclose(grad_VV[place], slope, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    "config",
    [
        specs.Orpo(),
        specs.Orpo(beta=1.0),
        specs.Simpo(),
        specs.Simpo(gamma=0.5, label_smoothing=0.1),
    ],
    ids=["orpo", "strong orpo", "simpo", "smoothed simpo"],
)
def test_losses_without_reference_match_trl(config: Any) -> None:
    draw = np.random.default_rng(2)
    batch, task = some_pairs(draw), Preference()
    batch["mask"][..., 3] = 1
    task._config = config
    tables = draw.normal(size=(2, VOCAB, VOCAB)).astype(np.float32)
    assert_matches(lambda table_VV: by_trl(config, table_VV, batch), task, batch, tables)


@pytest.mark.parametrize(
    "config", [specs.Kto(), specs.Kto(beta=0.5, desirable_weight=2, undesirable_weight=0.5)]
)
def test_kto_matches_trl(config: specs.Kto) -> None:
    draw = np.random.default_rng(3)
    rows = 5
    length_B = np.array([8, 6, 8, 7, 8], np.int32)
    index_L = np.arange(7)
    start_B = np.array([2, 1, 4, 3, 2])
    batch = {
        "tokens": draw.integers(0, VOCAB, (rows, 8), np.int32),
        "length": length_B,
        "mask": ((index_L >= start_B[:, None] - 1) & (index_L < length_B[:, None] - 1)).astype(
            np.float32
        ),
        "label": np.array([1, 0, 1, 1, 0], np.int32),
        "weight": np.ones(rows, np.float32),
    }
    task = Preference()
    task._config = config
    tables = draw.normal(size=(2, VOCAB, VOCAB)).astype(np.float32)
    theirs_VV = tables[1].astype(np.float64)
    # The divergence is not differentiated, so that it is a number for the finite differences.
    _, kl = kto_by_trl(config, tables[0].astype(np.float64), theirs_VV, batch)
    assert kl > 0
    assert_matches(
        lambda table_VV: kto_by_trl(config, table_VV, theirs_VV, batch, kl)[0], task, batch, tables
    )
    # A batch whose texts are those of its reference has no divergence.
    result, _ = differentiate(task, batch, tables[0], tables[0])
    weights = np.where(batch["label"], config.desirable_weight, config.undesirable_weight)
    assert result == pytest.approx(weights.mean() / 2)


class UpOrDown(Preference):
    """Tokens that count up are chosen, that count down rejected; from the fourth on."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        start = np.random.default_rng(step).integers(0, 32, (8, 1))
        pair = [(start + sign * np.arange(17)[None]) % 32 for sign in (1, -1)]
        mask = np.ones((8, 2, 16), np.float32)
        mask[..., :3] = 0
        length = np.full((8, 2), 17, np.int32)
        length[::2, 1], mask[::2, 1, 11:] = 12, 0
        rows = {"tokens": np.stack(pair, 1).astype(np.int32), "mask": mask, "length": length}
        return rows | {"weight": np.ones(8, np.float32)}


class Rated(UpOrDown):
    """The same texts, each with a label."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        pairs = super().batch(step)
        label = np.arange(8, dtype=np.int32) % 2
        rows = {name: pairs[name][np.arange(8), 1 - label] for name in ("tokens", "mask", "length")}
        return {**rows, "label": label, "weight": pairs["weight"]}


def build(devices: int = 1, task: UpOrDown | None = None, **keys: Any) -> Step:
    task = task or UpOrDown()
    defaults = {"task": "tests:Pairs", "model": tiny.DECODER, "batch": 8, "mesh": {"dp": 1}}
    defaults["optimizer"] = specs.Optimizer(lr=1e-2)
    train = TrainSpec.model_validate(defaults | keys)
    step = Step(task, train, mesh.build_mesh(train.mesh, jax.devices()[:devices]), 20)
    step.compile_train(step.put_batch(task.batch(0)))
    return step


def run(
    step: Step, state: Any, first: int, last: int, task: Any = None
) -> tuple[Any, list[dict[str, float]]]:
    task, message = task or UpOrDown(), []
    for number in range(first, last):
        state, metrics = step.train(state, step.put_batch(task.batch(number)))
        message.append({name: float(value) for name, value in metrics.items()})
    return state, message


def assert_no_preference(message: dict[str, float]) -> None:
    """A model that equals its reference prefers neither, except for rounding."""
    assert message["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert message["margin"] == pytest.approx(0, abs=1e-6)


def test_reference_copy_is_not_in_checkpoints() -> None:
    step = build()
    began = step.init_state()
    for name, leaf in step.builder.saved_params(began.params).items():
        assert np.array_equal(leaf, began.params[f"reference.{name}"]), name
    assert "the reference is a frozen copy of the model, " in step.notes[-1]
    halfway, message = run(step, began, 0, 4)
    assert_no_preference(message[0])
    remaining = jax.tree.map(np.asarray, step.builder.to_tree(halfway))
    assert not any(name.startswith("reference") for name in remaining["params"])
    assert len(step.builder.frozen) == len(remaining["params"])
    _, on = run(step, halfway, 4, 8)
    assert on[-1]["margin"] > 0.1 and on[-1]["accuracy"] == 1.0 and on[-1]["rewards/chosen"] > 0
    # After a resume the reference is drawn again: the same numbers to the bit.
    place = step.builder.to_tree(step.abstract)
    tree = jax.tree.map(lambda array, like: jax.device_put(array, like.sharding), remaining, place)
    assert run(step, step.builder.from_tree(tree), 4, 8)[1] == on
    # On a mesh, with the logits in parts, and with nothing shared but the seed.
    parts = build(4, mesh={"dp": 2, "fsdp": 1, "mp": 2}, loss={"chunks": 4})
    _, other = run(parts, parts.init_state(), 0, 4)
    losses = [[line["loss"] for line in lines] for lines in (other, message)]
    np.testing.assert_allclose(*losses, rtol=0, atol=2e-5)


def test_reference_of_adapters_is_base_model() -> None:
    step = build(2, mesh={"fsdp": 2}, lora={"rank": 4, "targets": ["all-linear"], "dropout": 0.1})
    assert not any(name.startswith("reference") for name in step.abstract.params)
    state, message = run(step, step.init_state(), 0, 10)
    assert_no_preference(message[0])
    assert message[-1]["loss"] < 0.6 and message[-1]["margin"] > 0.1


@pytest.mark.parametrize("name", ["kto", "orpo", "simpo"])
def test_each_loss_prefers_chosen_texts_on_a_mesh(name: str) -> None:
    task = Rated() if name == "kto" else UpOrDown()
    step = build(4, task, mesh={"dp": 2, "mp": 2}, loss={name: {}, "chunks": 2})
    has_reference = any(leaf.startswith("reference") for leaf in step.abstract.params)
    assert has_reference == (name == "kto")
    _, message = run(step, step.init_state(), 0, 8, task)
    rewards = [line["rewards/chosen"] - line["rewards/rejected"] for line in message]
    assert rewards[-1] > rewards[0] + 0.01 and message[-1]["loss"] < message[0]["loss"]
    assert ("kl" in message[0], "nll" in message[0]) == (name == "kto", name == "orpo")


def test_reference_is_read_from_folder_and_checked(tmp_path: Path) -> None:
    folder = references.folder("qwen2_tiny", tmp_path / "hf")
    inputs = references.train_spec("qwen2_tiny", folder, precision="bf16")
    step = Step(UpOrDown(), inputs, mesh.build_mesh(inputs.mesh, jax.devices()[:1]), 20)
    state = step.init_state()
    for name, leaf in step.builder.saved_params(state.params).items():
        copy = state.params[f"reference.{name}"]
        assert copy.dtype == jnp.bfloat16 and np.array_equal(copy, leaf.astype(jnp.bfloat16)), name
    base = step.builder.base
    assert base is not None and base["init_from"] == str(tmp_path / "hf")
    words = "step 3 holds a model compared with the weights of .* with digest abc"
    with pytest.raises(CheckpointError, match=words):
        frozen_base.check_digest(
            {**base, "digest": "abc"}, base, "step 3", contents=frozen_base.REFERENCE_OF
        )


def test_initial_adapters_are_refused() -> None:
    lora = {"rank": 2, "targets": ["q"]}
    train = TrainSpec.model_validate({"task": DPO, "model": tiny.DECODER, "lora": lora})
    assert train.lora is not None
    begun = train.lora.model_copy(update={"init_from": "sft"})
    words = "train.lora.init_from = sft: the reference would be the model without these"
    with pytest.raises(SpecError, match=words):
        Preference().model(train.model_copy(update={"lora": begun}), nnx.Rngs(0))


class Never:
    """Nobody tells this run to stop."""

    def poll(self) -> bool:
        return False


def lines(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    result = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
    return {line["step"]: line for line in result}


@pytest.mark.extended
def test_example_of_rated_texts_prefers_desirable_ones(tmp_path: Path) -> None:
    inputs = yaml.safe_load((EXAMPLES / "kto.yaml").read_text())["train"]
    inputs["data"]["path"] = str(EXAMPLES / inputs["data"]["path"])
    inputs["optimizer"]["lr"] = 1e-3  # YAML 1.1 reads it as text; the launcher does not
    train = TrainSpec.model_validate(inputs | {"log_every": 5, "mesh": {"dp": 8}})
    build_loop(train, Preference(), RunContext(str(tmp_path)), Never(), Progress(None)).run()
    held_out = lines(tmp_path, "eval")[30]
    assert held_out["rewards/chosen"] > held_out["rewards/rejected"] and held_out["kl"] >= 0
    assert held_out["loss"] < 0.5


@pytest.mark.extended
def test_example_prefers_chosen_text_and_resumes(tmp_path: Path) -> None:
    inputs = yaml.safe_load((EXAMPLES / "dpo.yaml").read_text())["train"]
    inputs["data"]["path"] = str(EXAMPLES / inputs["data"]["path"])
    inputs["optimizer"]["lr"] = 1e-3  # YAML 1.1 reads it as text; the launcher does not
    every = {"eval": {"every": 8}, "checkpoint": {"every": 8}}
    less = {"steps": 16, "log_every": 4, "mesh": {"dp": 8}, **every}
    train = TrainSpec.model_validate(inputs | less)
    build_loop(train, Preference(), RunContext(str(tmp_path)), Never(), Progress(None)).run()
    whole, held_out = lines(tmp_path, "metrics"), lines(tmp_path, "eval")
    assert held_out[16]["examples"] == 6 and held_out[16]["accuracy"] == 1.0
    assert held_out[16]["loss"] < held_out[8]["loss"] < math.log(2)
    assert {"rewards/chosen", "rewards/rejected", "margin"} <= set(whole[16]) & set(held_out[16])
    # The tokens of both texts, without padding.
    assert 0 < whole[16]["tokens_per_s"] < 2 * 63 * whole[16]["examples_per_s"]
    assert whole[16]["targets_per_s"] is None  # a loss of pairs counts no targets
    shutil.rmtree(tmp_path / "checkpoints" / "16")
    build_loop(train, Preference(), RunContext(str(tmp_path)), Never(), Progress(None)).run()
    for step, repeated in lines(tmp_path, "metrics").items():
        for key in ("loss", "margin"):
            assert repeated[key] == whole[step][key], step
    exported = export(str(tmp_path / "checkpoints"), str(tmp_path / "out"))
    assert exported["architecture"] == "LlamaForCausalLM"


def test_synthetic_rows_are_pairs() -> None:
    train = TrainSpec.model_validate({"task": DPO, "model": tiny.DECODER})
    raw = Preference().source(train, "train")
    assert raw is not None and len(raw) == 2048
    assert Preference().example(raw[0])["tokens"].shape == (2, 17)


ROWS = np.ones((2, 5))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"tokens": [1, 2, 3]}, r"tokens of shape \[3\], but a pair is two rows of at least 2"),
        ({"tokens": ROWS, "mask": ROWS}, r"mask of shape \[2, 5\], but a pair of 5 tokens has"),
        ({"tokens": ROWS, "length": 3}, r"length of shape \[\], but a pair of 5 tokens has \[2\]"),
    ],
)
def test_wrong_example_shapes_are_named(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(UnusableExampleError, match=words):
        Preference().example(raw)


@pytest.mark.parametrize(
    ("config", "task", "words"),
    [
        (specs.Kto(), UpOrDown(), "have no label, which train.loss.kto reads"),
        (specs.Dpo(), Rated(), "have a label, and the loss compares pairs"),
    ],
)
def test_labels_must_match_the_loss(
    config: specs.PreferenceLoss, task: UpOrDown, words: str
) -> None:
    task._config = config
    batch = jax.tree.map(jnp.asarray, task.batch(0))
    with pytest.raises(SpecError, match=words):
        task.loss(None, batch, jax.random.key(0))


def test_kto_needs_two_rows_in_a_micro_batch() -> None:
    keys = {"task": DPO, "model": tiny.DECODER, "loss": {"kto": {}}, "batch": 4}
    words = "batch = 4 with accumulate = 4 leaves no other row; make batch at least 8"
    with pytest.raises(ValueError, match=words):
        TrainSpec.model_validate(keys | {"accumulate": 4})
    spec = TrainSpec.model_validate(keys | {"mesh": {"dp": 4}})
    assert specs.shrink_to_devices(spec, 2, 4).accumulate == 2
    with pytest.raises(
        ValueError, match="over 1 devices × accumulate 1; kto needs 2 rows in a micro-batch"
    ):
        specs.shrink_to_devices(spec, 1, 4)
    pairs = spec.model_copy(update={"loss": specs.Loss()})
    assert specs.shrink_to_devices(pairs, 1, 4).accumulate == 4


def test_unknown_token_is_named() -> None:
    train = TrainSpec(task=DPO, model=tiny.DECODER)
    batch = UpOrDown().batch(0)
    assert Preference().check_batch(train, batch) is None
    batch["tokens"][3, 1, 4] = 32
    words = "token 32 at place 1, outside 0 to 31, the vocabulary"
    assert Preference().check_batch(train, batch) == (3, words)
    wide = ((0, 0), (0, 0), (0, 1))
    long = {key: np.pad(array, wide) for key, array in batch.items() if array.ndim == 3}
    words = "18 tokens, and train.model.length = 16 allows 17"
    assert Preference().check_batch(train, long) == (0, words)


@pytest.mark.parametrize(
    ("task", "loss", "words"),
    [
        (
            DPO,
            {"z": 1e-4},
            "z and smoothing apply to a cross-entropy; preferences have label_smoothing in dpo",
        ),
        (DPO, {"dpo": {"beta": 0}}, "greater than 0"),
        (
            DPO,
            {"dpo": {"kind": "ipo", "label_smoothing": 0.1}},
            "label_smoothing applies only to kind sigmoid",
        ),
        (specs.LM, {"dpo": {"beta": 0.2}}, "dpo applies to preferences, which the task dpo"),
        (specs.LM, {"orpo": {}}, "orpo applies to preferences, which the task dpo"),
        (DPO, {"orpo": {}, "simpo": {"gamma": 0}}, "orpo and simpo are both given; keep one"),
    ],
)
def test_keys_of_another_loss_are_refused(task: str, loss: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainSpec.model_validate({"task": task, "loss": loss})
