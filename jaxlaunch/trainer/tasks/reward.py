"""A pairwise reward model: a classifier of texts with one number, trained on preferences.

An example is a pair of rows, as for `dpo`. The loss of a pair is -log sigmoid(r_chosen -
r_rejected), that of trl's RewardTrainer. The model reads whole texts, with their prompts.

B pairs, R = 2 B rows, T tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.attention import padding
from jaxlaunch.trainer.attention.implementations import Visible
from jaxlaunch.trainer.data.source import Source, Split
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.spec import TrainSpec, model_sizes
from jaxlaunch.trainer.task import Loss
from jaxlaunch.trainer.tasks.dpo import Preference
from jaxlaunch.trainer.torch_models import build


class Reward(Preference):
    """The task `reward`: a model whose number is larger for the chosen text of a pair."""

    needs_reference = False
    target_tokens = 0

    def model(self, spec: TrainSpec, rngs: Any) -> Any:
        """Return a classifier with one logit. Raises SpecError for a model of another kind."""
        config = spec.model
        if not isinstance(config, specs.TransformersModel):
            raise SpecError(
                f"train.model.kind = {config.kind} has no head for a reward; set train.model: "
                "{transformers: FOLDER}"
            )
        return build.build_model(config, rngs, ModelOptions.from_spec(spec))

    def source(self, spec: TrainSpec, split: Split) -> Source | None:
        """Return the pairs that `train.data` describes. Raises DataError, SpecError."""
        # The rows of a language model have one token more, the target of the last one.
        length = model_sizes(spec.model).length
        if length is not None:
            model = spec.model.model_copy(update={"length": length - 1})
            spec = spec.model_copy(update={"model": model})
        return super().source(spec, split)

    def loss(self, model: Any, batch: dict[str, Array], rng: Array) -> Loss:
        """Return the weighted mean over pairs, with the rewards as metrics."""
        weight_B = batch["weight"]
        reward_B2 = self.predict(model, padding.split_rows(batch)).reshape(-1, 2)
        chosen_B, rejected_B = reward_B2[:, 0], reward_B2[:, 1]
        margin_B, total_weight = chosen_B - rejected_B, weight_B.sum()
        metrics = {
            "rewards/chosen": chosen_B,
            "rewards/rejected": rejected_B,
            "accuracy": (margin_B > 0).astype(jnp.float32),
            "margin": margin_B,
        }
        return Loss(
            -(jax.nn.log_sigmoid(margin_B) * weight_B).sum(),
            total_weight,
            {name: ((value_B * weight_B).sum(), total_weight) for name, value_B in metrics.items()},
        )

    def predict(self, model: Any, batch: dict[str, Array]) -> Array:
        """Return the rewards [R] of `tokens` [R, T] with their `length` [R], in float32."""
        logits_R1 = model(batch["tokens"], Visible(lengths_B=batch["length"]))
        rewards_R: Array = logits_R1[:, 0].astype(jnp.float32)
        return rewards_R
