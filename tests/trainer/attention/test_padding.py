"""Padding changes neither loss nor counts, routing and gradients, for every source and model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.data.pipeline import Pipeline
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.sources.mixture import Mixture
from jaxlaunch.trainer.sources.text import PackedRows, TextStream
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.step.state import TrainState
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.tasks.dpo import Preference
from jaxlaunch.trainer.tasks.lm import NextToken
from jaxlaunch.trainer.text import build, preferences, recipe
from tests.trainer import tiny
from tests.trainer.text import chat_corpora, corpora

LENGTH, MORE, ROWS = 24, 40, 8
SIZES = {"vocab": 600, "length": MORE, "layers": 2}
EXPERTS = tiny.EXPERTS.model_copy(update=SIZES | {"router_z": 1e-2})
MODELS: dict[str, Any] = {
    "experts": EXPERTS,
    "experts alone": EXPERTS.model_copy(update={"layers": 1, "dense_layers": []}),
    "tight": EXPERTS.model_copy(update={"layers": 1, "dense_layers": [], "capacity": 0.75}),
    "decoder": tiny.WIDE.model_copy(update=SIZES),
    "gpt2": tiny.GPT2.model_copy(update=SIZES | {"positions": MORE}),
}
PICTURES: dict[str, Any] = {"vit": tiny.Pictures(), "mlp": tiny.Digits()}
# A longer row has as many places.
MODELS["tight, longer"] = MODELS["tight"].model_copy(update={"capacity": 0.75 * LENGTH / MORE})
# Its state has a reference, too.
MODELS["experts of pairs"] = MODELS["experts alone"]
MODELS |= {name: tiny.MODELS[type(task)][0] for name, task in PICTURES.items()}
Rows = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    special = {"bos_token": corpora.BEGIN, "eos_token": corpora.END}
    corpora.save_tokenizer(folder / "tokenizer", **special, chat_template=chat_corpora.CHATML)
    corpora.write_lines(
        folder / "text.jsonl", list(filter(None, corpora.make_texts(40, seed=4, longest=8)))
    )
    chats = [json.dumps({"messages": chat}) for chat in chat_corpora.make_chats(30)]
    (folder / "chat.jsonl").write_text("\n".join(chats) + "\n")
    (folder / "bytes.txt").write_text("what fills a row up\n" * 8)
    words = [("yes", "no, not at all"), ("it is so", "never"), ("a", "b"), ("so it is", "is it")]
    pairs = [
        json.dumps({"prompt": f"{index}? ", "chosen": yes, "rejected": no})
        for index, (yes, no) in enumerate(words * 2)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(pairs) + "\n")
    return folder


def open_packed_rows(folder: Path, name: str) -> PackedRows:
    paths = {"path": f"{folder}/{name}.jsonl", "tokenizer": f"{folder}/tokenizer"}
    keys: dict[str, Any] = {"format": name, "packing": "first-fit", "eval_split": 0.0}
    data = specs.Text(source="text", data_dir=f"{folder}/out", **paths, **keys)
    plan = recipe.make_recipe(data, LENGTH)
    place = Path(recipe.prepared_root(data)) / plan.address
    if not place.exists():
        build.build_rows(plan, place)
    return PackedRows(place, "train")


def open_byte_stream(folder: Path, *, apart: bool) -> TextStream:
    """Bytes of files, of which the last window is short."""
    path = str(folder / "bytes.txt")
    data = specs.Text(source="text", path=path, apart=apart)
    return TextStream(data, [(path, 0, 50), (path, 50, 110)] * 2, LENGTH, "train")


def read_pairs(folder: Path) -> Rows:
    path = f"{folder}/pairs.jsonl"
    data = specs.Text(source="text", path=path, format="preference", eval_split=0.0)
    source = preferences.open_source(data, LENGTH, "train")
    assert source is not None
    return read_first_batch(source, Preference().example)


NEXT_TOKEN = NextToken()


def read_first_batch(source: Any, example: Any = NEXT_TOKEN.example) -> Rows:
    """The first batch that a run reads of a source."""
    options: dict[str, Any] = {"shuffle": False, "prefetch": 0, "threads": 1}
    return Pipeline(source, example, batch=ROWS, rows=range(ROWS), seed=0, **options).read_batch(0)


def make_rows(**keys: Any) -> Rows:
    """Return rows as a user's program makes them: of 5 to 25 tokens."""
    draw = np.random.default_rng(5)
    lengths, rows = draw.integers(5, LENGTH + 2, ROWS), []
    for length in lengths:
        row: dict[str, Any] = {"tokens": draw.integers(0, 600, LENGTH + 1)}
        for key, plan in keys.items():
            row[key] = plan(length)
        rows.append(NextToken().example(row))
    stacked = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    return stacked | {"weight": np.ones(ROWS, np.float32)}


def ones_mask(value: int, width: int = LENGTH + 1) -> Callable[[int], np.ndarray]:
    """1 for as many tokens as there are, then 0."""
    return lambda length: np.arange(width) < length - value


def two_segments(length: int) -> np.ndarray:
    """Two examples numbered from 1, behind them padding."""
    index = np.arange(LENGTH + 1)
    return np.where(index < length, 1 + (index >= length // 2), 0)


def open_mixture(folder: Path) -> Mixture:
    parts = {name: open_packed_rows(folder, name) for name in ("text", "chat")}
    return Mixture(parts, dict.fromkeys(parts, 1.0))


BATCHES: dict[str, Callable[[Path], Rows]] = {
    "text": lambda folder: read_first_batch(open_byte_stream(folder, apart=False)),
    "files apart": lambda folder: read_first_batch(open_byte_stream(folder, apart=True)),
    "packed": lambda folder: read_first_batch(open_packed_rows(folder, "text")),
    "chat": lambda folder: read_first_batch(open_packed_rows(folder, "chat")),
    "mixture": lambda folder: read_first_batch(open_mixture(folder)),
    "pairs": read_pairs,
    "mask": lambda folder: make_rows(mask=ones_mask(1, LENGTH)),
    "length": lambda folder: make_rows(length=int),
    "attention_mask": lambda folder: make_rows(attention_mask=ones_mask(0)),
    "segments": lambda folder: make_rows(segments=two_segments),
}


# --- what a step makes of a batch -----------------------------------------------------------------


STEPS: dict[Any, Step] = {}  # by model, settings and the form of the batch: each is compiled once
STARTS: dict[Any, TrainState] = {}  # by model and settings


def train_one_step(model: str, batch: Rows, **settings: Any) -> dict[str, np.ndarray]:
    """Return the metrics of a step, and the gradient of the mean loss by parameter."""
    form = tuple((key, array.shape) for key, array in sorted(batch.items()))
    actual = STEPS.get(key := (model, repr(settings), form))
    if actual is None:
        task: Any = PICTURES.get(model)
        task = task or (NextToken() if batch["tokens"].ndim == 2 else Preference())
        sgd = {"name": "sgd", "lr": 1.0, "momentum": 0.0, "schedule": "constant"}
        inputs = {"optimizer": sgd, **settings}
        train = TrainSpec(task="tests:Rows", model=MODELS[model], batch=ROWS, **inputs)
        devices = jax.devices()[: math.prod(settings.get("mesh", {}).values())]
        actual = STEPS[key] = Step(task, train, mesh.build_mesh(train.mesh, devices), 20)
        actual.compile_train(actual.put_batch(batch))
    if key[:2] not in STARTS:
        STARTS[key[:2]] = actual.init_state()
    state = jax.tree.map(jnp.copy, STARTS[key[:2]])  # a step takes the state's memory
    initial = {name: np.asarray(array) for name, array in state.params.items()}
    state, metrics = actual.train(state, actual.put_batch(batch))
    params = state.params.items()
    gradients = {f"d {name}": initial[name] - np.asarray(array) for name, array in params}
    return {name: np.asarray(value) for name, value in metrics.items()} | gradients


def assert_metrics_close(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_allclose(second[name], array, rtol=2e-5, atol=2e-6, err_msg=name)


def pad_rows(batch: Rows, count: int, *, left: bool = False) -> Rows:
    """Add `count` tokens of padding to each row, after or before it."""
    draw, actual = np.random.default_rng(0), dict(batch)
    for key in ("tokens", "mask", "segments", "attention_mask"):
        if key in batch:
            shape = *batch[key].shape[:-1], count
            fill = draw.integers(0, 600, shape) if key == "tokens" else np.zeros(shape)
            parts = [fill.astype(batch[key].dtype), batch[key]]
            actual[key] = np.concatenate(parts if left else parts[::-1], axis=-1)
    return actual


def permute_rows(batch: Rows) -> Rows:
    order = np.random.default_rng(1).permutation(ROWS)
    return {key: array[order] for key, array in batch.items()}


def zero_weight_variants(batch: Rows) -> list[Rows]:
    """Return the batch twice with two rows of weight 0, which hold different tokens."""
    weight = batch["weight"] * (np.arange(ROWS) < ROWS - 2)
    return [
        {key: array[order] for key, array in batch.items()} | {"weight": weight}
        for order in ([*range(6), 0, 1], [*range(6), 2, 3])
    ]


CASES = [("experts of pairs" if name == "pairs" else "experts alone", name) for name in BATCHES]
CASES += [("experts", "packed")]
CASES += [("decoder", "packed"), ("decoder", "attention_mask")]
CASES += [("gpt2", "packed"), ("gpt2", "length")]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_padding_and_order_of_rows_change_nothing(folder: Path, model: str, name: str) -> None:
    batch = BATCHES[name](folder)
    actual = train_one_step(model, batch)
    assert_metrics_close(actual, train_one_step(model, permute_rows(batch)))
    assert_metrics_close(*(train_one_step(model, item) for item in zero_weight_variants(batch)))
    assert_metrics_close(actual, train_one_step(model, pad_rows(batch, MORE - LENGTH)))
    if name == "attention_mask" and model != "gpt2":  # GPT-2 counts positions from the row's begin
        left_padded = pad_rows(batch, MORE - LENGTH, left=True)
        assert_metrics_close(actual, train_one_step(model, left_padded))


def test_padding_uses_no_capacity(folder: Path) -> None:
    batch = BATCHES["packed"](folder)
    actual = train_one_step("tight", batch)
    assert actual["expert_left_out"] > 0.1
    assert_metrics_close(*(train_one_step("tight", item) for item in zero_weight_variants(batch)))
    assert_metrics_close(actual, train_one_step("tight, longer", pad_rows(batch, MORE - LENGTH)))


@pytest.mark.parametrize("model", PICTURES)
def test_zero_weight_images_change_nothing(model: str) -> None:
    batch = {key: array[:ROWS] for key, array in PICTURES[model].batch(0).items()}
    assert_metrics_close(train_one_step(model, batch), train_one_step(model, permute_rows(batch)))
    assert_metrics_close(*(train_one_step(model, item) for item in zero_weight_variants(batch)))


@pytest.mark.parametrize(
    "keys", [{"mesh": {"fsdp": 2, "ep": 2}}, {"mesh": {"dp": 2}, "accumulate": 2}], ids=str
)
def test_padding_changes_nothing_on_a_mesh_or_in_micro_batches(
    folder: Path, keys: dict[str, Any]
) -> None:
    batch = BATCHES["packed"](folder)
    actual = train_one_step("experts alone", batch, **keys)
    padded = pad_rows(batch, MORE - LENGTH)
    assert_metrics_close(actual, train_one_step("experts alone", padded, **keys))
    if "accumulate" not in keys:  # where each micro-batch has a balance of its own
        assert_metrics_close(actual, train_one_step("experts alone", batch))


def test_weight_and_real_tokens_are_counted(folder: Path) -> None:
    source = open_packed_rows(folder, "text")
    lengths = [np.asarray(source._records[index]["lengths"]) for index in range(ROWS)]
    actual = train_one_step("experts", pad_rows(BATCHES["packed"](folder), MORE - LENGTH))
    assert actual["weight"] == sum((item - 1).sum() for item in lengths)
    assert actual["real_tokens"] == sum(item.sum() - 1 for item in lengths)
