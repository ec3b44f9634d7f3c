"""A trained model in a program's hands: out of a checkpoint, or out of a Hugging Face folder."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack

import jax
import numpy as np
import pydantic
from etils import epath
from jax import Array

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.adapters.base import merge_stored
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.checkpoint import reader, saved_files, stored_model
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.choose import Sampling, SamplingOptions
from jaxlaunch.trainer.generate.generator import Generator, Ids, Sample
from jaxlaunch.trainer.generate.network import Network
from jaxlaunch.trainer.huggingface import folder as folders
from jaxlaunch.trainer.huggingface import load as published
from jaxlaunch.trainer.models.language_model import LanguageModel
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.text import tokenizer as tokenizers
from jaxlaunch.trainer.text.tokenizer import Tokenizer

Prompt = str | Ids
Asked = Mapping[str, int] | spec.Mesh | jax.sharding.Mesh | None


class TextModel:
    """A loaded language model, with its weights on the devices. A prompt (`Prompt = str | list[int]`) is a text or a
    list of token ids.

    - `config`: the sizes of the model, by the keys of `train.model`.
    - `tokenizer`: an object with `encode(text)` and `decode(ids)`, or `None` if another program made the tokens.
    - `step`: the step of the checkpoint; `None` for a Hugging Face folder.

    **Example:**

    ```python
    import jaxlaunch

    lm = jaxlaunch.load("runs/lm")
    assert isinstance(lm, jaxlaunch.TextModel)
    [samples] = lm.generate("def ", n=2, temperature=0.8, max_tokens=8)
    print([lm.text(sample) for sample in samples])
    ```
    """

    def __init__(self, generator: Generator, tokenizer: Tokenizer | None, step: int | None) -> None:
        self.config = generator.network.config
        self.tokenizer, self.step = tokenizer, step
        self._generator = generator

    @property
    def params(self) -> dict[str, Array]:
        """A copy of the parameters by name, with the layers stacked as `[layers, …]`; each access makes a new one."""
        return self._generator.network.stacked(self._generator.weights)

    @property
    def model(self) -> LanguageModel:
        """A flax.nnx module with a copy of the parameters, from tokens `[B, L]` to logits `[B, L, V]`."""
        return self._generator.network.merged(self.params)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, stop: Sequence[str] = (), **how: Unpack[SamplingOptions]
    ) -> list[list[Sample]]:
        """Continues each prompt.

        **Arguments:**

        - `prompts`: a prompt or a list of them, each a text or a list of token ids.
        - `stop`: texts at which a sample ends; it does not contain them.
        - `max_tokens=128`: the largest number of tokens in a sample.
        - `temperature=0.0`: the temperature of the sampling; 0 always takes the likeliest token.
        - `top_k=None`, `top_p=None`: draw from the `top_k` likeliest tokens, or from the fewest tokens whose
            probabilities add up to `top_p`.
        - `min_p=None`: draw from the tokens whose probability is at least `min_p` times that of the likeliest.
        - `beams=1`: the number of beams in a search for the likeliest text.
        - `n=1`: the number of samples for each prompt; more than one needs a temperature or beams.
        - `seed=0`: the seed of the random draws.

        **Returns:**

        A list of `n` [samples](#sample) for each prompt; with beams, the best is first.

        **Raises:**

        [`TrainerError`](#trainererror) if a text is given without a tokenizer, or if a prompt does not fit the model.
        """
        rows = self.rows(prompts)
        if not stop:
            return self._generator.generate(rows, Sampling(**how))
        if self.tokenizer is None:
            raise SpecError("stop is text, and the model has no tokenizer here")
        if how.get("beams", 1) > 1:
            raise SpecError("stop ends a sample, and beams are compared whole: leave one out")
        decode = self.tokenizer.decode
        found = self._generator.generate(rows, Sampling(**how), lambda ids: any(text in decode(ids) for text in stop))
        return [[each._replace(ids=_before(stop, each.ids, decode)) for each in samples] for samples in found]

    def stream(self, prompt: Prompt, **how: Unpack[SamplingOptions]) -> Iterator[Sample]:
        """One sample of a prompt, again after every few tokens; the arguments are those of `generate`.

        **Raises:**

        [`TrainerError`](#trainererror) for beams and for several samples.
        """
        asked = Sampling(**how)
        if asked.beams > 1 or asked.n > 1:
            raise SpecError(
                f"stream gives one sample as it grows, not beams = {asked.beams} and n = {asked.n}; call generate"
            )
        for samples in self._generator.stream(self.rows([prompt]), asked, every=4):
            yield samples[0]

    def logprobs(self, rows: Prompt | Sequence[Prompt]) -> list[np.ndarray]:
        """For each row, a text or token ids, the log-probability of every token given those before it in nats, float32
        `[L - 1]`."""
        return [logprob_L for logprob_L, _ in self.scored(rows)]

    def scored(self, rows: Prompt | Sequence[Prompt]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The same, and whether each token was the likeliest, bool `[L - 1]`."""
        return self._generator.logprobs(self.rows(rows))

    def text(self, sample: Sample) -> str | None:
        """A sample as text; `None` without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode(sample.ids)

    def rows(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        """Prompts, or a single one, as lists of token ids.

        **Raises:**

        [`TrainerError`](#trainererror) for a text without a tokenizer.
        """
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], numbers.Integral))
        each: Any = [prompts] if is_one else prompts
        return [self._ids(prompt) for prompt in each]

    def _ids(self, prompt: Prompt) -> Ids:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise SpecError(
                f"the prompt is text, and the model's {self.config.vocab} tokens have no tokenizer here: give token ids"
            )
        try:
            return self.tokenizer.encode(prompt)
        except UnicodeEncodeError:
            raise SpecError(f"the prompt {prompt!r} is not UTF-8 text") from None


def load(
    folder: str,
    *,
    step: int | Literal["best"] | None = None,
    ema: bool = False,
    precision: spec.Precision | None = None,
    mesh: Asked = None,
    note: Callable[[str], None] = print,
) -> TextModel:
    """The model of a folder of checkpoints, by default its newest undamaged step, or of a Hugging Face folder.

    `ema` takes the moving average. `precision` is by default the training's, and fp32 for a Hugging Face folder; `mesh`
    the training's where it fits the devices that are here, else all of them split the weights. `note` gets sentences
    about what is not as asked. Raises CheckpointError where no step is usable, SpecError for what is not supported.
    """
    if remote.is_remote(folder):
        remote.check("the folder of weights", folder)
    if _is_published(folder):
        if step is not None or ema:
            raise SpecError(f"{folder} is a Hugging Face folder, which holds neither steps nor a moving average")
        return _published(folder, precision or "fp32", mesh)
    return _checkpoint(folder, step, ema, precision, mesh, note)


def _is_published(folder: str) -> bool:
    config = epath.Path(folder) / "config.json"
    if not remote.is_remote(folder):
        return bool(config.exists())
    with remote.storage(f"reading {folder}", SpecError):
        return bool(config.exists())


def _published(folder: str, precision: spec.Precision, mesh: Asked) -> TextModel:
    config = folders.read_model(folder).model_copy(update={"init_from": folder})
    network = Network(config, _mesh(mesh, None), precision)
    weights = network.laid_out(published.load_parameters(config, network.abstract))
    tokenizer = tokenizers.of(network.config.vocab, None, saved_files.read_tokenizer(epath.Path(folder)), folder)
    return TextModel(Generator(network, weights, _ends(folder, tokenizer)), tokenizer, None)


def _ends(folder: str | None, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that end a text: as the folder says, and as the tokenizer does."""
    return tuple({*(folders.end_tokens(folder) if folder else ()), *(tokenizer.ends if tokenizer else ())})


def _checkpoint(
    folder: str,
    step: int | Literal["best"] | None,
    ema: bool,
    precision: spec.Precision | None,
    mesh: Asked,
    note: Callable[[str], None],
) -> TextModel:
    found = reader.find(folder, step, note)
    config = stored_model.model(found)
    recorded = found.meta.get("train", {})
    of: Any = precision or pydantic.TypeAdapter(spec.Precision).validate_python(found.meta.get("precision", "fp32"))
    network = Network(config, _mesh(mesh, recorded.get("mesh")), of)
    stored: Mapping[str, Any] = stored_model.parameters(found, ema)
    if (lora := stored_model.lora(found)) is not None:
        where = f"step {found.step} of {folder}"
        stored = merge_stored(network.config, lora, found.meta.get("base"), stored, where)
    weights = network.laid_out(_Read(network, stored))
    tokenizer = tokenizers.of(config.vocab, recorded.get("data"), saved_files.saved_tokenizer(folder), folder)
    return TextModel(Generator(network, weights, _ends(config.init_from, tokenizer)), tokenizer, found.step)


class _Read(dict[str, Any]):
    """The parameters of a checkpoint by name, each read when it is taken: no two are in memory at a time."""

    def __init__(self, network: Network, stored: Mapping[str, Any]) -> None:
        odd = sorted(network.abstract.keys() ^ stored.keys())
        if odd:
            raise SpecError(f"the checkpoint's parameters are not the model's: {', '.join(odd[:5])}")
        super().__init__(stored)
        self._abstract = network.abstract

    def pop(self, name: str, *default: Any) -> Array:
        like, whole = self._abstract[name], _whole(super().pop(name))
        return jax.make_array_from_callback(like.shape, like.sharding, lambda at: whole[at].astype(like.dtype))


def _whole(stored: Any) -> np.ndarray[Any, Any]:
    """A stored parameter; a stack is read layer by layer, as what merges adapters gives it."""
    axes = [slice(None)] * len(stored.shape)
    if len(axes) < 3 or isinstance(stored, reader.StoredArray):
        return np.asarray(stored[tuple(axes)])
    return np.stack([np.asarray(stored[(layer, *axes[1:])]) for layer in range(stored.shape[0])])


def _mesh(asked: Asked, recorded: Mapping[str, Any] | None) -> jax.sharding.Mesh:
    """The mesh asked for; else that of the training where it fits, else all devices as fsdp."""
    if asked is not None:
        return meshes.asked(asked)
    devices = jax.devices()
    sizes = {axis: size for axis, size in (recorded or {}).items() if isinstance(size, int)}
    if recorded and -1 not in sizes.values() and math.prod(sizes.values()) == len(devices):
        return meshes.build(spec.Mesh.model_validate(recorded))
    return meshes.build(spec.Mesh(fsdp=len(devices)))


def end_also(loaded: TextModel, ids: Sequence[int]) -> None:
    """Ends the texts of a model at these tokens as well."""
    generator = loaded._generator
    generator.ends = tuple({*generator.ends, *ids})


def described(samples: Sequence[Sequence[Sample]], texts: Callable[[Sample], str | None]) -> list[list[dict[str, Any]]]:
    """Samples as JSON: `text` where there is a tokenizer, `ids`, `score` and whether they `ended`."""

    def one(sample: Sample) -> dict[str, Any]:
        """One of them."""
        text = texts(sample)
        known = {} if text is None else {"text": text}
        return {**known, "ids": sample.ids, "score": sample.score, "ended": sample.ended}

    return [[one(sample) for sample in of_prompt] for of_prompt in samples]


def _before(stop: Sequence[str], ids: Ids, decode: Callable[[Sequence[int]], str]) -> Ids:
    """The most tokens whose text ends where the first text of `stop` begins, or before; all of them without one."""
    whole = decode(ids)
    places = [place for text in stop if (place := whole.find(text)) >= 0]
    if not places:
        return ids
    return next(ids[:count] for count in range(len(ids), -1, -1) if len(decode(ids[:count])) <= min(places))


LOST = "\ufffd"  # stands for a character whose last bytes are still to come


def streamed(loaded: TextModel, prompt: Ids, how: SamplingOptions, say: Callable[[str], None]) -> Sample:
    """The sample of a prompt; `say` gets its text piece by piece, or its ids where there is no tokenizer."""
    said, last = "", Sample([], 0.0, False)
    for last in loaded.stream(prompt, **how):
        text = _shown(loaded, last).rstrip(LOST)
        if len(text) > len(said):
            say(text[len(said) :])
            said = text
    if rest := _shown(loaded, last)[len(said) :]:
        say(rest)
    return last


def _shown(loaded: TextModel, sample: Sample) -> str:
    text = loaded.text(sample)
    return "".join(f"{each} " for each in sample.ids) if text is None else text
