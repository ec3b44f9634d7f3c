"""Direct preference optimization: training on pairs of a chosen and a rejected text.

The loss compares the log-probabilities of both texts with those of a frozen reference, the model at
the start of the training. It increases the log-ratio of the chosen text relative to that of the
rejected one.

An example is a pair of rows, first the chosen one: `tokens` [2, L + 1], a `mask` [2, L] that is 1
for predicted tokens, which are those of the answers, and the `length` [2] of each row before its
padding.

B batch, L length, T = L + 1 tokens, R = 2 B rows.
"""

from __future__ import annotations

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
from jaxlaunch.trainer.models.language_model import LanguageModel
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.task import Loss, Task
from jaxlaunch.trainer.tasks import lm, losses, ranges


class Preference(Task):
    """The task `dpo`: direct preference optimization on a chosen and a rejected text.

    Examples have `tokens` `[2, L + 1]`. The loss is that of Rafailov et al. 2023, equation 7; for
    labels that may be wrong, that of Mitchell 2023; for `ipo`, that of Azar et al. 2023, equation
    17.

    The reference is the model at the beginning of the training. Its log-probabilities are computed
    in the step, with a frozen copy of the weights or, when adapters are trained, with the model
    without them. They are therefore the same on any number of hosts and after any resume, and no
    other state is saved.
    """

    needs_reference = True

    # The block `train.loss.dpo`, set when the model is created.
    _config = specs.Dpo()

    def model(self, spec: TrainSpec, rngs: Any) -> Any:
        """Return the model of next-token prediction. Raises SpecError for initial adapters."""
        if spec.lora is not None and spec.lora.init_from is not None:
            raise SpecError(
                f"train.lora.init_from = {spec.lora.init_from}: the reference would be the model "
                "without these adapters; export them with --merged and name that folder as "
                "train.model.init_from"
            )
        self._config = spec.loss.dpo
        return lm.NextToken().model(spec, rngs)

    def loss(self, model: Any, batch: dict[str, Array], rng: Array) -> Loss:
        """Return the weighted mean over pairs. A reward is beta times a text's log-ratio."""
        pairs = padding.split_rows(batch)
        model_B2, routing = _log_probabilities(model, pairs)
        reference_B2, _ = _log_probabilities(evaluation_reference(model), pairs)
        rewards_B2 = self._config.beta * (model_B2 - jax.lax.stop_gradient(reference_B2))
        chosen_B, rejected_B = rewards_B2[:, 0], rewards_B2[:, 1]
        margin_B, weight_B = chosen_B - rejected_B, batch["weight"]
        total_weight = weight_B.sum()
        metrics = {
            "rewards/chosen": chosen_B,
            "rewards/rejected": rejected_B,
            "accuracy": (margin_B > 0).astype(jnp.float32),
            "margin": margin_B,
        }
        total = (_pair_losses(margin_B, self._config) * weight_B).sum()
        sums = {
            name: ((value_B * weight_B).sum(), total_weight) for name, value_B in metrics.items()
        }
        return Loss(total, total_weight, sums, routing)

    def source(self, spec: TrainSpec, split: Split) -> Source | None:
        """Return the pairs that `train.data` describes. Raises DataError, SpecError."""
        source = open_source(spec, split)
        is_synthetic = isinstance(spec.data, specs.Synthetic)
        return _PairSource(source) if source is not None and is_synthetic else source

    def example(self, raw: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Return `tokens` int32 [2, L + 1], `mask` float32 [2, L], `length` int32 [2]."""
        tokens = ranges.read_integers("tokens", ranges.get_value(raw, "tokens"))
        if tokens.ndim != 2 or len(tokens) != 2 or tokens.shape[1] < 2:
            raise UnusableExampleError(
                f"tokens of shape {list(tokens.shape)}, but a pair is two rows of at least 2"
            )
        width = tokens.shape[1]
        length = ranges.read_integers("length", raw.get("length", [width, width]))
        mask = np.asarray(raw["mask"] if "mask" in raw else np.ones((2, width - 1)), np.float32)
        for key, array, shape in (("mask", mask, (2, width - 1)), ("length", length, (2,))):
            if array.shape != shape:
                raise UnusableExampleError(
                    f"{key} of shape {list(array.shape)}, but a pair of {width} tokens has "
                    f"{list(shape)}"
                )
        return {"tokens": tokens, "length": length, "mask": mask}

    def check_batch(self, spec: TrainSpec, batch: Batch) -> tuple[int, str] | None:
        """Return the first pair that is too long or has unknown tokens, and a sentence about it."""
        config, tokens_B2T = spec.model, batch["tokens"]
        language_models = specs.Decoder | specs.GPT2 | specs.TransformersModel
        if not isinstance(config, language_models) or config.vocab is None:
            return None
        length = tokens_B2T.shape[-1] - 1
        if length > config.length:
            limit = f"train.model.length = {config.length} allows {config.length + 1}"
            return 0, f"{length + 1} tokens, and {limit}"
        return ranges.find_outside("token", tokens_B2T, config.vocab, "the vocabulary")


class _PairSource(DataSource):
    """Pairs of consecutive synthetic examples, for smoke tests and for the plan of a job."""

    def __init__(self, rows: Source) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows) // 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": np.stack([self._rows[2 * index + offset]["tokens"] for offset in (0, 1)])}

    def fingerprint(self) -> str:
        return f"pairs of {self._rows.fingerprint()}"


def _log_probabilities(model: Any, pairs: dict[str, Array]) -> tuple[Array, Routing | None]:
    """Return the log-probabilities [B, 2] of chosen and rejected texts, and the routing if any."""
    tokens_RT = pairs["tokens"]
    weight_RL = pairs["mask"] * padding.target_mask(pairs).astype(pairs["mask"].dtype)
    inputs_RL, labels_RL = tokens_RT[:, :-1], tokens_RT[:, 1:]
    if not isinstance(model, LanguageModel):
        # A custom model is not told where padding begins. It does not need to be, because padding
        # follows all predicted tokens.
        return losses.log_probabilities(model(inputs_RL), labels_RL, weight_RL).reshape(-1, 2), None
    visible = Visible(None, None, pairs["length"])
    features = model.read(inputs_RL, visible, padding.input_mask(pairs))
    sums_R = lm.score_logits(model, features.x_BLD, labels_RL, weight_RL, losses.log_probabilities)
    return sums_R.reshape(-1, 2), features.routing


def _pair_losses(margin_B: Array, config: specs.Dpo) -> Array:
    """Return the loss [B] of pairs, given the differences of their rewards."""
    if config.kind == "ipo":
        # With h the difference of the log-ratios, this is (h - 1 / (2 beta))².
        return jnp.square((margin_B - 0.5) / config.beta)
    smoothing = config.label_smoothing
    return -(1 - smoothing) * jax.nn.log_sigmoid(margin_B) - smoothing * jax.nn.log_sigmoid(
        -margin_B
    )
