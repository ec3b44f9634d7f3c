"""What a model goes on with while it trains: the prompts of `eval.samples`, at each evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax import Array

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.adapters.base import MergingParameters
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.choose import Sampling
from jaxlaunch.trainer.generate.generator import Generator, Ids, check
from jaxlaunch.trainer.generate.network import Network, Weights
from jaxlaunch.trainer.sources.open import tokenizer_files
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.text import tokenizer as tokenizers

KEY = "train.eval.samples"


def bytes_per_device(train: TrainSpec, asked: spec.Samples, mesh: jax.sharding.Mesh) -> int:
    """What one device holds while samples are made: the weights in the compute dtype, and the keys and values.

    The tokenizer of text need not be here: a token is one byte at least.
    """
    lengths = (len(prompt.encode() if isinstance(prompt, str) else prompt) for prompt in asked.prompts)
    network = Network(train.model, mesh, train.precision)
    return network.bytes_per_device(len(asked.prompts), max(lengths) + asked.max_tokens)


class Samples:
    """Samples of a training's prompts. Raises SpecError where its model cannot go on from them."""

    def __init__(self, train: TrainSpec, asked: spec.Samples, mesh: jax.sharding.Mesh) -> None:
        try:
            self._network = Network(train.model, mesh, train.precision)
            files, vocab = tokenizer_files(train.data), self._network.config.vocab
            self._tokenizer = tokenizers.of(vocab, train.data.model_dump(), files, "train.data.tokenizer")
            self._how = Sampling(max_tokens=asked.max_tokens, temperature=asked.temperature, seed=train.seed)
            self._prompts = asked.prompts
            self._rows = [self._ids(prompt) for prompt in asked.prompts]
            check(self._network.config, self._rows, self._how)
        except SpecError as error:
            raise SpecError(f"{KEY}: {error}") from None
        self._lora = train.lora
        self._generator = Generator(self._network, Weights({}, ()), self._tokenizer.ends if self._tokenizer else ())

    def taken(self, params: Mapping[str, Array]) -> list[dict[str, Any]]:
        """A sample of each prompt with these stacked parameters of the training, as JSON. Every process takes part.

        While they are made, a copy of the parameters in the compute dtype is on the devices, adapters merged.
        """
        self._generator.weights = self._network.laid_out(MergingParameters(params, self._network.config, self._lora))
        found = self._generator.generate(self._rows, self._how)
        self._generator.weights = Weights({}, ())
        return [
            {"prompt": prompt, "sample": self._shown(sample.ids)}
            for prompt, (sample,) in zip(self._prompts, found, strict=True)
        ]

    def _ids(self, prompt: str | Ids) -> Ids:
        if not isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise SpecError(f"{prompt!r} is text, and train.data has no tokenizer; give token ids")
        return self._tokenizer.encode(prompt)

    def _shown(self, ids: Ids) -> str | Ids:
        return ids if self._tokenizer is None else self._tokenizer.decode(ids)
