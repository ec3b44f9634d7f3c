"""What fills a row up changes nothing: the loss, what routers say, counts and gradients of every source and model."""

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
    "decoder": tiny.WIDE.model_copy(update=SIZES | {"layers": 3}),
    "gpt2": tiny.GPT2.model_copy(update=SIZES | {"positions": MORE}),
}
PICTURES: dict[str, Any] = {"vit": tiny.Pictures(), "mlp": tiny.Digits()}
MODELS["tight, longer"] = MODELS["tight"].model_copy(
    update={"capacity": 0.75 * LENGTH / MORE}
)  # as many places
MODELS |= {name: tiny.MODELS[type(task)][0] for name, task in PICTURES.items()}
Rows = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    corpora.save_tokenizer(
        folder / "tokenizer",
        bos_token=corpora.BEGIN,
        eos_token=corpora.END,
        chat_template=chat_corpora.CHATML,
    )
    corpora.write_lines(
        folder / "text.jsonl", list(filter(None, corpora.make_texts(40, seed=4, longest=8)))
    )
    chats = [json.dumps({"messages": chat}) for chat in chat_corpora.make_chats(30)]
    (folder / "chat.jsonl").write_text("\n".join(chats) + "\n")
    (folder / "bytes.txt").write_text("what fills a row up\n" * 8)
    words = [
        ("yes", "no, not at all"),
        ("it is so", "never"),
        ("a", "b"),
        ("so it is", "is it"),
    ] * 2
    pairs = [
        json.dumps({"prompt": f"{at}? ", "chosen": yes, "rejected": no})
        for at, (yes, no) in enumerate(words)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(pairs) + "\n")
    return folder


def packed(folder: Path, name: str) -> PackedRows:
    keys: dict[str, Any] = {
        "path": f"{folder}/{name}.jsonl",
        "format": name,
        "packing": "first-fit",
    }
    data = specs.Text(
        source="text",
        tokenizer=f"{folder}/tokenizer",
        data_dir=f"{folder}/out",
        eval_split=0.0,
        **keys,
    )
    made = recipe.make_recipe(data, LENGTH)
    place = Path(recipe.prepared_root(data)) / made.address
    if not place.exists():
        build.build_rows(made, place)
    return PackedRows(place, "train")


def plain(folder: Path, *, apart: bool) -> TextStream:
    """Bytes of files, of which the last window is short."""
    path = str(folder / "bytes.txt")
    return TextStream([(path, 0, 50), (path, 50, 110)] * 2, LENGTH, "train", apart)


def pairs(folder: Path) -> Rows:
    data = specs.Text(
        source="text", path=f"{folder}/pairs.jsonl", format="preference", eval_split=0.0
    )
    source = preferences.open_source(data, LENGTH, "train")
    assert source is not None
    return first(source, Preference().example)


def first(source: Any, example: Callable[..., Any]) -> Rows:
    """The first batch that a run reads of a source."""
    how: dict[str, Any] = {"shuffle": False, "prefetch": 0, "threads": 1}
    return Pipeline(source, example, batch=ROWS, rows=range(ROWS), seed=0, **how).read_batch(0)


def own(**keys: Any) -> Rows:
    """Rows of a program of one's own: of 5 to 25 tokens."""
    draw = np.random.default_rng(5)
    lengths, rows = draw.integers(5, LENGTH + 2, ROWS), []
    for length in lengths:
        row: dict[str, Any] = {"tokens": draw.integers(0, 600, LENGTH + 1)}
        for key, made in keys.items():
            row[key] = made(length)
        rows.append(NextToken().example(row))
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]} | {
        "weight": np.ones(ROWS, np.float32)
    }


def run_of(value: int, width: int = LENGTH + 1) -> Callable[[int], np.ndarray]:
    """1 for as many tokens as there are, then 0."""
    return lambda length: np.arange(width) < length - value


def halves(length: int) -> np.ndarray:
    """Two examples numbered from 1, behind them padding."""
    index = np.arange(LENGTH + 1)
    return np.where(index < length, 1 + (index >= length // 2), 0)


BATCHES: dict[str, Callable[[Path], Rows]] = {
    "text": lambda folder: first(plain(folder, apart=False), NextToken().example),
    "files apart": lambda folder: first(plain(folder, apart=True), NextToken().example),
    "packed": lambda folder: first(packed(folder, "text"), NextToken().example),
    "chat": lambda folder: first(packed(folder, "chat"), NextToken().example),
    "mixture": lambda folder: first(
        Mixture(
            {name: packed(folder, name) for name in ("text", "chat")}, {"text": 1.0, "chat": 1.0}
        ),
        NextToken().example,
    ),
    "pairs": pairs,
    "mask": lambda folder: own(mask=run_of(1, LENGTH)),
    "length": lambda folder: own(length=int),
    "attention_mask": lambda folder: own(attention_mask=run_of(0)),
    "segments": lambda folder: own(segments=halves),
}


# --- what a step makes of a batch -----------------------------------------------------------------


STEPS: dict[Any, Step] = {}  # by model, settings and the form of the batch: each is compiled once
STARTS: dict[Any, TrainState] = {}  # by model and settings


def trained(model: str, batch: Rows, **settings: Any) -> dict[str, np.ndarray]:
    """The metrics of a step, and what it takes off each parameter: the gradient of the mean loss."""
    form = tuple((key, array.shape) for key, array in sorted(batch.items()))
    found = STEPS.get(key := (model, repr(settings), form))
    if found is None:
        task: Any = PICTURES.get(model) or (
            NextToken() if batch["tokens"].ndim == 2 else Preference()
        )
        given = {
            "optimizer": {"name": "sgd", "lr": 1.0, "momentum": 0.0, "schedule": "constant"},
            **settings,
        }
        train = TrainSpec(task="tests:Rows", model=MODELS[model], batch=ROWS, **given)
        devices = jax.devices()[: math.prod(settings.get("mesh", {}).values())]
        found = STEPS[key] = Step(task, train, mesh.build_mesh(train.mesh, devices), 20)
        found.compile_train(found.put_batch(batch))
    if key[:2] not in STARTS:
        STARTS[key[:2]] = found.init_state()
    state = jax.tree.map(jnp.copy, STARTS[key[:2]])  # a step takes the state's memory
    before = {name: np.asarray(array) for name, array in state.params.items()}
    state, metrics = found.train(state, found.put_batch(batch))
    taken = {f"d {name}": before[name] - np.asarray(array) for name, array in state.params.items()}
    return {name: np.asarray(value) for name, value in metrics.items()} | taken


def assert_alike(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(other[name], array, rtol=2e-5, atol=2e-6, err_msg=name)


def filled(batch: Rows, more: int, *, left: bool = False) -> Rows:
    """With so many tokens more in each row, of any number, behind or before it, which its keys call padding."""
    draw, found = np.random.default_rng(0), dict(batch)
    for key in ("tokens", "mask", "segments", "attention_mask"):
        if key in batch:
            shape = *batch[key].shape[:-1], more
            fill = draw.integers(0, 600, shape) if key == "tokens" else np.zeros(shape)
            parts = [fill.astype(batch[key].dtype), batch[key]]
            found[key] = np.concatenate(parts if left else parts[::-1], axis=-1)
    return found


def permuted(batch: Rows) -> Rows:
    order = np.random.default_rng(1).permutation(ROWS)
    return {key: array[order] for key, array in batch.items()}


def without_two(batch: Rows) -> list[Rows]:
    """The batch twice with two rows of weight 0, which hold what another row does and then something else."""
    weight = batch["weight"] * (np.arange(ROWS) < ROWS - 2)
    return [
        {key: array[order] for key, array in batch.items()} | {"weight": weight}
        for order in ([*range(6), 0, 1], [*range(6), 2, 3])
    ]


CASES = [("experts alone" if name == "pairs" else "experts", name) for name in BATCHES]
CASES += [
    ("decoder", "packed"),
    ("decoder", "attention_mask"),
    ("gpt2", "packed"),
    ("gpt2", "length"),
]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_what_fills_a_row_up_changes_nothing_nor_does_the_order_of_rows(
    folder: Path, model: str, name: str
) -> None:
    batch = BATCHES[name](folder)
    found = trained(model, batch)
    assert_alike(found, trained(model, permuted(batch)))
    assert_alike(*(trained(model, each) for each in without_two(batch)))
    assert_alike(found, trained(model, filled(batch, MORE - LENGTH)))
    if name == "attention_mask" and model != "gpt2":  # GPT-2 counts positions from the row's begin
        assert_alike(found, trained(model, filled(batch, MORE - LENGTH, left=True)))


def test_within_a_capacity_what_fills_a_row_up_takes_no_place(folder: Path) -> None:
    batch = BATCHES["packed"](folder)
    found = trained("tight", batch)
    assert found["expert_left_out"] > 0.1
    assert_alike(*(trained("tight", each) for each in without_two(batch)))
    assert_alike(found, trained("tight, longer", filled(batch, MORE - LENGTH)))


@pytest.mark.parametrize("model", PICTURES)
def test_of_images_rows_that_only_fill_a_batch_up_change_nothing_nor_does_their_order(
    model: str,
) -> None:
    batch = {key: array[:ROWS] for key, array in PICTURES[model].batch(0).items()}
    assert_alike(trained(model, batch), trained(model, permuted(batch)))
    assert_alike(*(trained(model, each) for each in without_two(batch)))


@pytest.mark.parametrize(
    "keys", [{"mesh": {"fsdp": 2, "ep": 2}}, {"mesh": {"dp": 2}, "accumulate": 2}], ids=str
)
def test_nor_does_it_on_a_mesh_or_in_micro_batches(folder: Path, keys: dict[str, Any]) -> None:
    batch = BATCHES["packed"](folder)
    found = trained("experts", batch, **keys)
    assert_alike(found, trained("experts", filled(batch, MORE - LENGTH), **keys))
    if "accumulate" not in keys:  # where each micro-batch has a balance of its own
        assert_alike(found, trained("experts", batch))


def test_what_is_counted_is_what_is_read_and_what_is_predicted(folder: Path) -> None:
    source = packed(folder, "text")
    lengths = [np.asarray(source._records[at]["lengths"]) for at in range(ROWS)]
    found = trained("experts", filled(BATCHES["packed"](folder), MORE - LENGTH))
    assert found["weight"] == sum((each - 1).sum() for each in lengths)
    assert found["real_tokens"] == sum(each.sum() - 1 for each in lengths)
