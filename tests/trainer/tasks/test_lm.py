from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.data.pipeline import Pipeline
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.task import Loss
from jaxlaunch.trainer.tasks import lm
from jaxlaunch.trainer.tasks.lm import NextToken
from jaxlaunch.trainer.torch_models.network import TorchModel

NAME = "lm"


def uniform(tokens_BL: jax.Array) -> jax.Array:
    return jnp.zeros((*tokens_BL.shape, 256))


def open_text(**data: Any) -> NextToken:
    """Return the task after it opened its data, which the trainer does first of all."""
    task = NextToken()
    task.source(TrainSpec(task=NAME, model={"kind": "decoder", "length": 8}, data=data), "train")
    return task


def test_uniform_guess_costs_eight_bits_per_byte() -> None:
    raw = {"tokens": np.arange(9), "mask": np.array([1, 1, 1, 1, 1, 0, 0, 0])}
    rows = [NextToken().example(raw), NextToken().example({"tokens": np.arange(9)})]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    batch |= {"weight": np.ones(2, np.float32)}
    task = open_text(source="text", path=__file__, eval_split=0.0)
    loss = task.loss(uniform, batch, jax.random.key(0))
    assert loss.weight == 5 + 8
    total, weight = loss.metrics["bits_per_byte"]
    np.testing.assert_allclose(total / weight, 8.0, rtol=1e-6)
    first_row = batch | {"weight": np.array([1, 0], np.float32)}
    assert NextToken().loss(uniform, first_row, jax.random.key(0)).weight == 5


def test_other_tokens_have_no_bits_per_byte() -> None:
    batch = {"tokens": np.arange(9)[None], "mask": np.ones((1, 8), np.float32)}
    batch |= {"weight": np.ones(1, np.float32)}
    for task in (NextToken(), open_text(source="synthetic")):
        assert set(task.loss(uniform, batch, jax.random.key(0)).metrics) == {"accuracy"}


# --- several examples in a row, and rows that are filled up ---------------------------------------

CONFIGS = [
    specs.Decoder(kind="decoder", layers=1, width=32, heads=4, kv_heads=2, vocab=32, length=16),
    specs.GPT2(kind="gpt2", layers=1, width=32, heads=4, vocab=32, length=16),
]
# Two examples that fill a row of 17 tokens.
SHORT, LONG = np.arange(5) % 32, np.arange(12)[::-1] * 3 % 32


def loss_sums(config: Any, row: dict[str, Any]) -> tuple[Loss, Any]:
    """Return the loss of one example, and its gradient by the model's parameters."""
    task = NextToken()
    batch = {name: jnp.asarray(value)[None] for name, value in task.example(row).items()}
    batch |= {"weight": jnp.ones(1)}
    graph, params = nnx.split(task.model(TrainSpec(task=NAME, model=config), nnx.Rngs(0)))

    def loss(params: Any) -> tuple[jax.Array, Loss]:
        result = task.loss(nnx.merge(graph, params), batch, jax.random.key(0))
        return result.sum, result

    grads, result = jax.jit(jax.grad(loss, has_aux=True))(params)
    return result, grads


def equal(first: tuple[Loss, Any], other_items: list[tuple[Loss, Any]]) -> None:
    """Check that a row's loss and gradient are the sums of others'."""
    whole = jax.tree.map(lambda *parts: sum(parts), *other_items)
    for result, expected in zip(jax.tree.leaves(first), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_packed_examples_are_independent(config: Any) -> None:
    tokens, segments = np.concatenate([SHORT, LONG]), np.repeat([7, 2], [5, 12])
    result = loss_sums(config, {"tokens": tokens, "segments": segments})
    assert result[0].weight == 4 + 11
    equal(result, [loss_sums(config, {"tokens": tokens}) for tokens in (SHORT, LONG)])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_padding_is_neither_seen_nor_predicted(config: Any) -> None:
    filled = {"tokens": np.concatenate([LONG, np.full(5, 9)]), "length": 12}
    result = loss_sums(config, filled)
    assert result[0].weight == 11
    equal(result, [loss_sums(config, {"tokens": LONG})])
    nothing = loss_sums(config, filled | {"length": 0})
    assert nothing[0].weight == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nothing))


# --- invalid examples -----------------------------------------------------------------------------


class Listed:
    """A source over a list of raw examples."""

    name = "listed"

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]

    def fingerprint(self) -> str:
        return "listed"


def read(items: list[dict[str, Any]], model: Any = CONFIGS[0], task: Any = None) -> dict[str, Any]:
    """Return the first batch of these examples for a model with rows of 17 of 32 tokens."""
    task = task or NextToken()
    how = {"rows": range(len(items)), "seed": 0, "shuffle": False, "prefetch": 0, "threads": 1}
    check = partial(task.check_batch, TrainSpec(task=NAME, model=model))
    return Pipeline(Listed(items), task.example, batch=len(items), check=check, **how).read_batch(0)


FINE = {"tokens": [1, 2, 3, 4, 5, 6]}
HALVES = {"segments": [0, 0, 0, 1, 1, 1]}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"tokens": [1, 2, 3, 32, 5, 6]}, "token 32 at place 3, outside 0 to 31, the vocabulary"),
        ({"tokens": [1, 2, 3, 4, 5, -1]}, "token -1 at place 5, outside 0 to 31"),
        ({"tokens": [-1, 2, 3, 4, 5, 6]}, "token -1 at place 0, outside"),
        ({"tokens": [1, 2, 3, 4, 5, 6.5]}, "tokens 6.5, not a whole number"),
        ({"tokens": [1, 2, 3, 4, 5, 2**33]}, "tokens 8589934592, too large for the int32"),
        ({"tokens": [[1, 2, 3, 4, 5, 6]]}, r"tokens of shape \[1, 6\], but an example is one row"),
        ({"tokens": [1]}, r"tokens of shape \[1\], but an example is one row of at least 2"),
        ({**FINE, "mask": np.ones(6)}, r"mask of shape \[6\], but its 6 tokens go with \[5\]"),
        (
            {**FINE, "attention_mask": np.ones(5)},
            r"attention_mask of shape \[5\], but its 6 tokens go with \[6\]",
        ),
        ({**FINE, "length": [6]}, r"length of shape \[1\], but its 6 tokens go with \[\]"),
        # A target that does not count is still read by those after it, which count.
        ({"tokens": [1, -100, 3, 4, 5, 6], "mask": [0, 1, 1, 1, 1]}, "token -100 at place 1"),
        ({"tokens": [1, 2, 3, -100, 5, 6], "mask": [1, 1, 1, 1, 0], **HALVES}, "token -100"),
    ],
)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_unknown_tokens_are_named_with_place(config: Any, raw: dict[str, Any], words: str) -> None:
    whole = {key: np.zeros(6, np.int32) for key in raw if key in ("segments",)}
    whole |= {"attention_mask": np.ones(6)} if "attention_mask" in raw else {}
    whole |= {"length": 6} if "length" in raw else {}
    with pytest.raises(DataError, match=f"^listed: example 1 has {words}"):
        read([FINE | whole, raw], config)


@pytest.mark.parametrize(
    "raw",
    [
        {"tokens": [1, 2, 3, 4, -100, -100], "mask": [1, 1, 1, 0, 0]},
        {"tokens": [1, 2, 3, 4, 99, -1], "length": 4},
        {
            "tokens": [1, 2, 3, -100, -100, 4],
            "segments": [0, 0, 0, 1, 1, 2],
            "mask": [1, 1, 0, 0, 0],
        },
        {
            "tokens": [-100, -100, -100, 4, 5, 6],
            "segments": [1, 1, 1, 0, 0, 0],
            "mask": [0, 0, 0, 1, 1],
        },
    ],
)
def test_unused_token_may_be_any_number(raw: dict[str, Any]) -> None:
    remaining = np.array(raw["tokens"])
    remaining[(remaining < 0) | (remaining >= 32)] = 0
    assert read([raw])["tokens"].tolist() == [remaining.tolist()]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_too_long_row_is_refused_with_lengths(config: Any) -> None:
    assert read([{"tokens": np.arange(17)}], config)["tokens"].shape == (1, 17)
    words = "example 0 has 18 tokens, and train.model.length = 16 allows 17: make the length"
    with pytest.raises(DataError, match=words):
        read([{"tokens": np.arange(18)}], config)


def trace_loss(task: Any, model: Any, length: int) -> None:
    """Trace the loss of `model`, so that the task knows its vocabulary."""
    tokens, mask = jnp.zeros((1, length + 1), jnp.int32), jnp.ones((1, length))
    batch = {"tokens": tokens, "mask": mask, "weight": jnp.ones(1)}
    nnx.eval_shape(lambda: task.loss(model(), batch, jax.random.key(0)).sum)


def test_only_targets_of_custom_model_are_checked() -> None:
    task, custom = NextToken(), {"kind": "mine:Net"}
    row = {"tokens": [300, 2, 999], "mask": [1, 0]}
    assert read([row], custom, task)["tokens"].tolist() == [[300, 2, 999]]
    trace_loss(task, lambda: uniform, 2)
    assert read([row], custom, task)["tokens"].tolist() == [[300, 2, 999]]
    with pytest.raises(DataError, match="example 0 has token 999 at place 2, outside 0 to 255"):
        read([row | {"mask": [1, 1]}], custom, task)


def test_vocabulary_of_custom_task_is_known() -> None:
    class Own(NextToken):
        def model(self, spec: TrainSpec, rngs: nnx.Rngs) -> nnx.Module:
            return super().model(TrainSpec(task=NAME, model=CONFIGS[0]), rngs)

    task, custom = Own(), {"kind": "mine:Net"}
    trace_loss(task, lambda: task.model(None, nnx.Rngs(0)), 8)
    with pytest.raises(DataError, match="example 0 has token 32 at place 1, outside 0 to 31"):
        read([{"tokens": [1, 32, 3]}], custom, task)


def test_custom_model_gets_only_attention_mask() -> None:
    task, reports = NextToken(), []

    def listening(tokens_BL: jax.Array, mask_BL: jax.Array) -> jax.Array:
        reports.append(mask_BL.shape)
        return uniform(tokens_BL)

    row = task.example({"tokens": np.arange(9), "attention_mask": np.ones(9)})
    batch = {name: value[None] for name, value in row.items()} | {"weight": np.ones(1, np.float32)}
    task.loss(listening, batch, jax.random.key(0))
    assert reports == [(1, 8)]
    with pytest.raises(
        SpecError, match="segments or a length, which a custom model does not receive"
    ):
        task.loss(listening, batch | {"length": np.full(1, 5)}, jax.random.key(0))


class WholeLogits(TorchModel):
    """A model of transformers whose logits need more than a matrix."""

    def __init__(self, loss: specs.Loss, deterministic: bool) -> None:
        self.loss, self.deterministic, self.head_name = loss, deterministic, None

    def __call__(self, tokens_BL: jax.Array, keys: Any = None) -> jax.Array:
        return jnp.broadcast_to(jnp.arange(4.0), (*tokens_BL.shape, 4))


def test_whole_logits_have_the_terms_of_the_loss_in_training() -> None:
    batch = {"tokens": jnp.array([[0, 1, 3]]), "mask": jnp.ones((1, 2)), "weight": jnp.ones(1)}

    def mean(deterministic: bool, **terms: float) -> float:
        model = WholeLogits(specs.Loss(**terms), deterministic)
        loss = NextToken().loss(model, batch, jax.random.key(0))
        return float(loss.sum / loss.weight)

    log_sum = np.log(np.exp(np.arange(4.0)).sum())
    plain = log_sum - 2.0
    assert mean(False) == pytest.approx(plain, rel=1e-5)
    assert mean(False, z=0.5) == pytest.approx(plain + 0.5 * log_sum**2, rel=1e-5)
    assert mean(False, smoothing=0.2) == pytest.approx(plain + 0.2 * (2.0 - 1.5), rel=1e-5)
    assert mean(True, z=0.5, smoothing=0.2) == pytest.approx(plain, rel=1e-5)


def test_model_of_another_kind_is_refused() -> None:
    with pytest.raises(SpecError, match="kind = mlp does not predict tokens; use decoder"):
        NextToken().model(TrainSpec(task=NAME, model={"kind": "mlp"}), nnx.Rngs(0))


@pytest.mark.parametrize(
    ("batch", "width", "size", "count"),
    # Two chunks of 4096 × 2048 cost more than they save; a head of twice the size has half as many
    # chunks.
    [
        (8, 2048, 4, 8),
        (7, 2048, 4, 1),
        (2, 512, 4, 2),
        (64, 16, 4, 64),
        (8, 2048, 2, 4),
        (16, 4096, 4, 8),
    ],
)
def test_large_logits_are_chunked(batch: int, width: int, size: int, count: int) -> None:
    head = jnp.zeros((width, 131_072), jnp.int8)
    assert lm._choose_chunks("auto", (batch, 512), head, size) == count
    assert lm._choose_chunks(3, (batch, 512), jnp.zeros((width, 1)), size) == 3
