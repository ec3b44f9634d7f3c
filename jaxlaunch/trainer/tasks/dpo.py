"""Training on preferences: pairs of a chosen and a rejected text, or texts with a label.

The losses `dpo` and `kto` compare the log-probabilities of the texts with those of a frozen
reference, the model at the start of the training. `orpo` and `simpo` need no reference and compare
the mean log-probabilities of the tokens.

An example is a pair of rows, first the chosen one: `tokens` [2, L + 1], a `mask` [2, L] that is 1
for predicted tokens, which are those of the answers, and the `length` [2] of each row before its
padding. For `kto` it is a single row with a `label`, 1 for a desirable text.

B batch, L length, T = L + 1 tokens, R rows: 2 B of pairs, K weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.adapters.lora import evaluation_reference
from jaxlaunch.trainer.attention import padding
from jaxlaunch.trainer.attention.implementations import Visible
from jaxlaunch.trainer.data.examples import Batch, UnusableExampleError
from jaxlaunch.trainer.data.source import DataSource, Source, Split
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.models.experts import Routing
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.task import Loss, Task
from jaxlaunch.trainer.tasks import lm, losses, ranges


class Preference(Task):
    """The task `dpo`: training on preferences, by default by direct preference optimization.

    Examples have `tokens` `[2, L + 1]`, or for the loss `kto` `[L + 1]` and a `label`. The loss
    `dpo` is that of Rafailov et al. 2023, equation 7; for labels that may be wrong, that of
    Mitchell 2023; for `ipo`, that of Azar et al. 2023, equation 17. `kto` is that of Ethayarajh et
    al. 2024, equation 8, `orpo` that of Hong et al. 2024, equation 6, and `simpo` that of Meng et
    al. 2024, equation 6.

    The reference is the model at the beginning of the training. Its log-probabilities are computed
    in the step, with a frozen copy of the weights or, when adapters are trained, with the model
    without them. They are therefore the same on any number of hosts and after any resume, and no
    other state is saved.
    """

    # The block of the loss and what it needs, set when the model is created.
    _config: specs.PreferenceLoss = specs.Dpo()
    needs_reference = True
    # Tokens of a row that the model does not read, because they are only targets.
    target_tokens = 1

    def model(self, spec: TrainSpec, rngs: Any) -> Any:
        """Return the model of next-token prediction. Raises SpecError for initial adapters."""
        self._config = spec.loss.preference
        self.needs_reference = isinstance(self._config, specs.Dpo | specs.Kto)
        lora = spec.lora
        if lora is not None and lora.init_from is not None and self.needs_reference:
            raise SpecError(
                f"train.lora.init_from = {lora.init_from}: the reference would be the model "
                "without these adapters; export them with --merged and name that folder as "
                "train.model.init_from"
            )
        return lm.NextToken().model(spec, rngs)

    def loss(self, model: Any, batch: dict[str, Array], rng: Array) -> Loss:
        """Return the weighted mean over pairs or texts, and the rewards as metrics.

        Raises SpecError if the rows are pairs and the loss trains on texts with a label, or vice
        versa.
        """
        if isinstance(self._config, specs.Kto) != ("label" in batch):
            problem = "the examples of train.data have a label, and the loss compares pairs"
            hint = "set train.loss: {kto: {}}, or give tokens [2, L + 1] without a label"
            if isinstance(self._config, specs.Kto):
                problem = "the examples of train.data have no label, which train.loss.kto reads"
                hint = "give tokens [L + 1] and a label, 1 for a desirable text, or use loss.dpo"
            raise SpecError(f"{problem}; {hint}")
        match self._config:
            case specs.Kto() as config:
                return _rated_loss(model, batch, config)
            case config:
                return _paired_loss(model, batch, config)

    def source(self, spec: TrainSpec, split: Split) -> Source | None:
        """Return the rows that `train.data` describes. Raises DataError, SpecError."""
        source = open_source(spec, split)
        if source is None or not isinstance(spec.data, specs.Synthetic):
            return source
        return _SyntheticSource(source, is_rated=spec.loss.kto is not None)

    def example(self, raw: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Return `tokens` int32 [2, L + 1], `mask` float32 [2, L], `length` int32 [2].

        An example with a `label` int32 [] is a single row, without the axis of 2.
        """
        tokens = ranges.read_integers("tokens", ranges.get_value(raw, "tokens"))
        is_rated = "label" in raw
        rows, noun = ((), "a rated text") if is_rated else ((2,), "a pair")
        if tokens.shape[:-1] != rows or tokens.shape[-1] < 2:
            expected = "one row" if is_rated else "two rows"
            raise UnusableExampleError(
                f"tokens of shape {list(tokens.shape)}, but {noun} is {expected} of at least 2"
            )
        width = tokens.shape[-1]
        length = ranges.read_integers("length", raw.get("length", np.full(rows, width)))
        ones = np.ones((*rows, width - 1))
        mask = np.asarray(raw.get("mask", ones), np.float32)
        for key, array, shape in (("mask", mask, ones.shape), ("length", length, rows)):
            if array.shape != shape:
                raise UnusableExampleError(
                    f"{key} of shape {list(array.shape)}, but {noun} of {width} tokens has "
                    f"{list(shape)}"
                )
        example = {"tokens": tokens, "length": length, "mask": mask}
        if is_rated:
            example["label"] = ranges.read_integers("label", raw["label"])
        return example

    def check_batch(self, spec: TrainSpec, batch: Batch) -> tuple[int, str] | None:
        """Return the first pair that is too long or has unknown tokens, and a sentence about it."""
        config, tokens = spec.model, batch["tokens"]
        language_models = specs.Decoder | specs.GPT2 | specs.TransformersModel
        if not isinstance(config, language_models) or config.vocab is None:
            return None
        count, limit = tokens.shape[-1], config.length + self.target_tokens
        if count > limit:
            return 0, f"{count} tokens, and train.model.length = {config.length} allows {limit}"
        return ranges.find_outside("token", tokens, config.vocab, "the vocabulary")


class _SyntheticSource(DataSource):
    """Pairs of consecutive synthetic examples, or examples with a label in turn.

    They are for smoke tests and for the plan of a job.
    """

    def __init__(self, rows: Source, *, is_rated: bool) -> None:
        self._rows, self._is_rated = rows, is_rated

    def __len__(self) -> int:
        return len(self._rows) // 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._is_rated:
            return {"tokens": self._rows[index]["tokens"], "label": index % 2}
        return {"tokens": np.stack([self._rows[2 * index + offset]["tokens"] for offset in (0, 1)])}

    def fingerprint(self) -> str:
        return f"{'labels' if self._is_rated else 'pairs'} of {self._rows.fingerprint()}"


def _rated_loss(model: Any, batch: dict[str, Array], config: specs.Kto) -> Loss:
    """Return the loss of texts with a label. A reward is beta times a text's log-ratio.

    The divergence from the reference is estimated on the prompts with the answers of other rows.
    """
    reference = evaluation_reference(model)
    rows, mismatched = dict(batch), _rotate_answers(batch)
    model_B, routing = _log_probabilities(model, rows)
    log_ratio_B = model_B - jax.lax.stop_gradient(_log_probabilities(reference, rows)[0])
    other_B, other_reference_B = (
        _log_probabilities(network, mismatched)[0] for network in (model, reference)
    )
    weight_B, is_desirable_B = batch["weight"], batch["label"] > 0
    total_weight = weight_B.sum()
    divergence = ((other_B - other_reference_B) * weight_B).sum() / jnp.maximum(total_weight, 1.0)
    divergence = jax.lax.stop_gradient(jnp.maximum(divergence, 0.0))
    sign_B = jnp.where(is_desirable_B, 1.0, -1.0)
    share_B = jnp.where(is_desirable_B, config.desirable_weight, config.undesirable_weight)
    loss_B = share_B * (1.0 - jax.nn.sigmoid(config.beta * sign_B * (log_ratio_B - divergence)))
    metrics = {"kl": (divergence * total_weight, total_weight)}
    for name, is_in_B in (("chosen", is_desirable_B), ("rejected", ~is_desirable_B)):
        share_B = jnp.where(is_in_B, weight_B, 0.0)
        metrics[f"rewards/{name}"] = (config.beta * (log_ratio_B * share_B).sum(), share_B.sum())
    return Loss((loss_B * weight_B).sum(), total_weight, metrics, routing)


def _rotate_answers(batch: dict[str, Array]) -> dict[str, Array]:
    """Return the batch with the answer of the row before in place of each answer."""
    tokens_BT, mask_BL, length_B = batch["tokens"], batch["mask"], batch["length"]
    width = tokens_BT.shape[1]
    # The first predicted token is the first of the answer.
    prompt_B = jnp.argmax(mask_BL != 0.0, axis=1).astype(length_B.dtype) + 1
    other_prompt_B = jnp.roll(prompt_B, 1)
    index_BT = jax.lax.broadcasted_iota(length_B.dtype, tokens_BT.shape, 1)
    is_prompt_BT = index_BT < prompt_B[:, None]
    other_index_BT = jnp.clip(index_BT + (other_prompt_B - prompt_B)[:, None], 0, width - 1)
    mask_BT = jnp.pad(mask_BL, ((0, 0), (1, 0)))
    other_tokens_BT, other_mask_BT = (
        jnp.take_along_axis(jnp.roll(array_BT, 1, axis=0), other_index_BT, axis=1)
        for array_BT in (tokens_BT, mask_BT)
    )
    new_length_B = jnp.minimum(prompt_B + jnp.roll(length_B, 1) - other_prompt_B, width)
    is_answer_BT = ~is_prompt_BT & (index_BT < new_length_B[:, None])
    return {
        "tokens": jnp.where(is_prompt_BT, tokens_BT, other_tokens_BT),
        "mask": jnp.where(is_answer_BT, other_mask_BT, 0.0)[:, 1:],
        "length": new_length_B,
    }


def _paired_loss(
    model: Any, batch: dict[str, Array], config: specs.Dpo | specs.Orpo | specs.Simpo
) -> Loss:
    """Return the loss of pairs. A reward is beta times a log-ratio or mean log-probability."""
    pairs, weight_B = padding.split_rows(batch), batch["weight"]
    total_weight = weight_B.sum()
    metrics: dict[str, tuple[Array, Array]] = {}
    if isinstance(config, specs.Dpo):
        model_B2, routing = _log_probabilities(model, pairs)
        reference_B2, _ = _log_probabilities(evaluation_reference(model), pairs)
        score_B2 = (model_B2 - jax.lax.stop_gradient(reference_B2)).reshape(-1, 2)
    else:
        sums_R2, counts_R2, routing = _sum_log_probabilities(model, pairs)
        score_B2 = (sums_R2[:, 0] / jnp.maximum(counts_R2[:, 0], 1.0)).reshape(-1, 2)
    reward_B2 = config.beta * score_B2
    chosen_B, rejected_B = reward_B2[:, 0], reward_B2[:, 1]
    margin_B = chosen_B - rejected_B
    if isinstance(config, specs.Orpo):
        log_odds_B2 = score_B2 - _log1mexp(score_B2)
        ratio_B = jax.nn.log_sigmoid(log_odds_B2[:, 0] - log_odds_B2[:, 1])
        # As in trl, the cross-entropy is the mean over all tokens of the chosen texts, with their
        # prompts.
        nats, tokens = (
            (array_R2[:, 1].reshape(-1, 2)[:, 0] * weight_B).sum()
            for array_R2 in (-sums_R2, counts_R2)
        )
        metrics["nll"] = (nats, tokens)
        nll = nats / jnp.maximum(tokens, 1.0)
        total = nll * total_weight - config.beta * (ratio_B * weight_B).sum()
    else:
        total = (_pair_losses(margin_B, config) * weight_B).sum()
    by_pair = {
        "rewards/chosen": chosen_B,
        "rewards/rejected": rejected_B,
        "accuracy": (margin_B > 0).astype(jnp.float32),
        "margin": margin_B,
    }
    metrics |= {
        name: ((value_B * weight_B).sum(), total_weight) for name, value_B in by_pair.items()
    }
    return Loss(total, total_weight, metrics, routing)


def _log1mexp(x: Array) -> Array:
    """Return log(1 - exp(x)) for negative `x`."""
    # 1 - exp(x) loses its digits near 0, and log(1 - y) for a small y.
    x = jnp.minimum(x, -1e-7)
    is_near_0 = x > -math.log(2)
    near = jnp.log(-jnp.expm1(jnp.where(is_near_0, x, -1.0)))
    return jnp.where(is_near_0, near, jnp.log1p(-jnp.exp(jnp.where(is_near_0, -1.0, x))))


def _log_probabilities(model: Any, rows: dict[str, Array]) -> tuple[Array, Routing | None]:
    """Return the log-probabilities [R] of the answers, and the routing if any."""
    weight_RL = rows["mask"] * padding.target_mask(rows).astype(rows["mask"].dtype)
    return _score_rows(model, rows, weight_RL, losses.log_probabilities)


def _sum_log_probabilities(
    model: Any, rows: dict[str, Array]
) -> tuple[Array, Array, Routing | None]:
    """Return sums of log-probabilities and counts of tokens [R, K = 2]: answers, whole texts."""
    real = {name: array for name, array in rows.items() if name != "mask"}
    text_RL = padding.target_mask(real).astype(rows["mask"].dtype)
    answer_RL = rows["mask"] * padding.target_mask(rows).astype(rows["mask"].dtype)
    weight_RLK = jnp.stack([answer_RL, text_RL], axis=-1)

    def score(logits: Array, labels: Array, weight: Array) -> Array:
        columns = (weight[..., column] for column in range(weight.shape[-1]))
        sums = [losses.log_probabilities(logits, labels, column) for column in columns]
        return jnp.stack(sums, axis=-1)

    sums_RK, routing = _score_rows(model, rows, weight_RLK, score)
    return sums_RK, weight_RLK.sum(1), routing


def _score_rows(
    model: Any, rows: dict[str, Array], weight: Array, score: Callable[..., Array]
) -> tuple[Array, Routing | None]:
    """Return the sums over positions of a score of the logits, and the routing if any."""
    inputs_RL, labels_RL = rows["tokens"][:, :-1], rows["tokens"][:, 1:]
    if not lm.has_separate_head(model):
        # A custom model is not told where padding begins. It does not need to be, because padding
        # follows all predicted tokens.
        return score(model(inputs_RL), labels_RL, weight), None
    visible = Visible(None, None, rows["length"])
    features = model.read(inputs_RL, visible, padding.input_mask(rows))
    sums = lm.score_logits(model, features.x_BLD, labels_RL, weight, score)
    return sums, features.routing


def _pair_losses(margin_B: Array, config: specs.Dpo | specs.Simpo) -> Array:
    """Return the loss [B] of pairs, given the differences of their rewards."""
    if isinstance(config, specs.Simpo):
        margin_B = margin_B - config.gamma
    elif config.kind == "ipo":
        # With h the difference of the log-ratios, this is (h - 1 / (2 beta))².
        return jnp.square((margin_B - 0.5) / config.beta)
    smoothing = config.label_smoothing
    return -(1 - smoothing) * jax.nn.log_sigmoid(margin_B) - smoothing * jax.nn.log_sigmoid(
        -margin_B
    )
