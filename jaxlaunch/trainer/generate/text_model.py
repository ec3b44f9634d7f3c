"""A trained language model, loaded from a checkpoint or a Hugging Face folder.

The module also samples the prompts of `eval.samples` at each evaluation of a training.
"""

from __future__ import annotations

import contextlib
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
from jaxlaunch.trainer.adapters import base_weights
from jaxlaunch.trainer.adapters.frozen_base import (
    MergingParameters,
    check_digest,
    check_origin,
    merge_stored,
    read_base,
)
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.checkpoint import reader, saved_files
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.decoding import Sampling, SamplingOptions
from jaxlaunch.trainer.generate.generator import Generator, Ids, Sample, check_prompts
from jaxlaunch.trainer.generate.module_network import COST_NOTE, ModuleNetwork, build_network
from jaxlaunch.trainer.generate.network import Network, Weights
from jaxlaunch.trainer.huggingface import folder as folders
from jaxlaunch.trainer.models.language_model import LanguageModel
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.sources.open import tokenizer_files
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.text import tokenizer as tokenizers
from jaxlaunch.trainer.text.tokenizer import Tokenizer

Prompt = str | Ids
AnyMesh = Mapping[str, int] | spec.Mesh | jax.sharding.Mesh | None


class TextModel:
    """A loaded language model, with its weights on the devices.

    A prompt (`Prompt = str | list[int]`) is a text or a list of token ids.

    - `config`: the sizes of the model, by the keys of `train.model`.
    - `tokenizer`: an object with `encode(text)` and `decode(ids)`, or `None` if another program
      made the tokens.
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
        """A copy of the parameters by name, stacked as `[layers, …]`; each access makes one."""
        return self._generator.network.stack_params(self._generator.weights)

    @property
    def model(self) -> LanguageModel:
        """A flax.nnx module with a copy of the parameters, from tokens to logits `[B, L, V]`."""
        return self._generator.network.build_model(self.params)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        stop: Sequence[str] = (),
        **options: Unpack[SamplingOptions],
    ) -> list[list[Sample]]:
        """Continues each prompt.

        **Arguments:**

        - `prompts`: a prompt or a list of them, each a text or a list of token ids.
        - `stop`: texts at which a sample ends; it does not contain them.
        - `max_tokens=128`: the largest number of tokens in a sample.
        - `temperature=0.0`: the temperature of the sampling; 0 always takes the likeliest token.
        - `top_k=None`, `top_p=None`: draw from the `top_k` likeliest tokens, or from the fewest
          tokens whose
            probabilities add up to `top_p`.
        - `min_p=None`: draw from the tokens whose probability is at least `min_p` times that of the
          likeliest.
        - `beams=1`: the number of beams in a search for the likeliest text.
        - `n=1`: the number of samples for each prompt; more than one needs a temperature or beams.
        - `seed=0`: the seed of the random draws.

        **Returns:**

        A list of `n` [samples](#sample) for each prompt; with beams, the best is first.

        **Raises:**

        [`TrainerError`](#trainererror) if a text is given without a tokenizer, or if a prompt does
        not fit the model.
        """
        rows = self.rows(prompts)
        if not stop:
            return self._generator.generate(rows, Sampling(**options))
        if self.tokenizer is None:
            raise SpecError("stop is text, and the model has no tokenizer here")
        if options.get("beams", 1) > 1:
            raise SpecError("stop ends a sample, and beams are compared whole: leave one out")
        decode = self.tokenizer.decode
        groups = self._generator.generate(
            rows, Sampling(**options), lambda ids: any(text in decode(ids) for text in stop)
        )
        return [
            [sample._replace(ids=_cut_at_stop(stop, sample.ids, decode)) for sample in group]
            for group in groups
        ]

    def stream(self, prompt: Prompt, **options: Unpack[SamplingOptions]) -> Iterator[Sample]:
        """One sample of a prompt, after every few tokens; for the arguments see `generate`.

        **Raises:**

        [`TrainerError`](#trainererror) for beams and for several samples.
        """
        sampling = Sampling(**options)
        if sampling.beams > 1 or sampling.n > 1:
            raise SpecError(
                f"stream gives one sample as it grows, not beams = {sampling.beams} and n = "
                f"{sampling.n}; call generate"
            )
        for samples in self._generator.stream(self.rows([prompt]), sampling, every=4):
            yield samples[0]

    def logprobs(self, rows: Prompt | Sequence[Prompt]) -> list[np.ndarray]:
        """Return the log-probability of every token after the first, given the tokens before it.

        A row is a text or token ids. The arrays are float32 `[L - 1]`, in nats.
        """
        return [logprob_L for logprob_L, _ in self.scored(rows)]

    def scored(self, rows: Prompt | Sequence[Prompt]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The same, and whether each token was the likeliest, bool `[L - 1]`."""
        return self._generator.compute_logprobs(self.rows(rows))

    def text(self, sample: Sample) -> str | None:
        """A sample as text; `None` without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode(sample.ids)

    def rows(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        """Prompts, or a single one, as lists of token ids.

        **Raises:**

        [`TrainerError`](#trainererror) for a text without a tokenizer.
        """
        is_text = isinstance(prompts, str)
        is_single = is_text or (len(prompts) > 0 and isinstance(prompts[0], numbers.Integral))
        rows: Any = [prompts] if is_single else prompts
        return [
            self._encode_prompt(row) if isinstance(row, str) else [*map(int, row)] for row in rows
        ]

    def _encode_prompt(self, prompt: str) -> Ids:
        if self.tokenizer is None:
            raise SpecError(
                f"the prompt is text, and the model's {self.config.vocab} tokens have no tokenizer "
                "here: give token ids"
            )
        try:
            return self.tokenizer.encode(prompt)
        except UnicodeEncodeError:
            raise SpecError(f"the prompt {prompt!r} is not UTF-8 text") from None


def add_end_tokens(model: TextModel, ids: Sequence[int]) -> None:
    """Let the model also end a text at these tokens."""
    generator = model._generator
    generator.ends = tuple({*generator.ends, *ids})


def _cut_at_stop(stop: Sequence[str], ids: Ids, decode: Callable[[Sequence[int]], str]) -> Ids:
    """Return the longest prefix of `ids` that decodes to text before the first text of `stop`."""
    full_text = decode(ids)
    stop_positions = [start for text in stop if (start := full_text.find(text)) >= 0]
    count = len(ids)
    while stop_positions and len(decode(ids[:count])) > min(stop_positions):
        count -= 1
    return ids[:count]


def load_text_model(
    folder: str,
    *,
    step: int | Literal["best"] | None = None,
    ema: bool = False,
    precision: spec.Precision | None = None,
    mesh: AnyMesh = None,
    note: Callable[[str], None] = print,
) -> TextModel:
    """Load the model from a folder of checkpoints or a Hugging Face folder.

    Args:
        folder: Folder or URL.
        step: Step to load, by default the newest undamaged one.
        ema: Whether to use the moving average of the parameters.
        precision: By default that of the training, or fp32 for a Hugging Face folder.
        mesh: By default that of the training if it fits the devices. Otherwise all devices split
            the weights.
        note: Function that receives sentences for the user.

    Raises:
        CheckpointError: No step is usable.
        SpecError: The request is not supported.
    """
    path = epath.Path(folder)
    storage: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if remote.is_remote(folder):
        remote.check_url("the folder of weights", folder)
        storage = remote.convert_errors(f"reading {folder}", SpecError)
    with storage:
        is_published = (path / "config.json").exists()
    if is_published:
        if step is not None or ema:
            raise SpecError(
                f"{folder} is a Hugging Face folder, which holds neither steps nor a moving average"
            )
        config: Any = folders.read_model(folder).model_copy(update={"init_from": folder})
        network = build_network(config, _choose_mesh(mesh, None), precision or "fp32")
        loaded_step = None
        params = dict(base_weights.iterate_parameters(config, network.abstract, seed=0))
        data, files, ends_folder = None, saved_files.read_tokenizer(path), folder
    else:
        stored = reader.find_step(folder, step, note)
        config = reader.recorded_model(stored)
        train = stored.meta.get("train", {})
        loaded_step = stored.step
        saved_precision = stored.meta.get("precision", "fp32")
        if precision is None:
            precision = pydantic.TypeAdapter(spec.Precision).validate_python(saved_precision)
        lora = reader.recorded_lora(stored)
        network = build_network(config, _choose_mesh(mesh, train.get("mesh")), precision, lora)
        owner = f"step {stored.step} of {folder}"
        params = _StoredParameters(network, _stored_arrays(network, stored, lora, ema, owner))
        data = train.get("data")
        files = saved_files.read_saved_tokenizer(folder)
        ends_folder = config.init_from
    if isinstance(network, ModuleNetwork):
        note(COST_NOTE)
    tokenizer = tokenizers.find_tokenizer(network.config.vocab, data, files, folder)
    # Both the folder and the tokenizer may define tokens that end a text.
    ends = {*(folders.end_tokens(ends_folder) if ends_folder else ())}
    ends |= {*(tokenizer.ends if tokenizer else ())}
    generator = Generator(network, network.unstack_params(params), tuple(ends))
    return TextModel(generator, tokenizer, loaded_step)


def _stored_arrays(
    network: Network, stored: reader.StoredStep, lora: spec.Lora | None, ema: bool, owner: str
) -> Mapping[str, Any]:
    """Return the arrays of a checkpoint's model by name, together with the base of its adapters.

    Raises SpecError, and CheckpointError if the folder of the base has other weights.
    """
    arrays: Mapping[str, Any] = reader.evaluated_parameters(stored, ema)
    base = stored.meta.get("base")
    if not isinstance(network, ModuleNetwork):
        return arrays if lora is None else merge_stored(network.config, lora, base, arrays, owner)
    buffers = reader.evaluated_buffers(stored, ema)
    arrays = {**arrays, **{name: buffers[name] for name in network.abstract if name in buffers}}
    if lora is None:
        return arrays
    check_origin(base, network.config, owner)
    missing = {name: leaf for name, leaf in network.abstract.items() if name not in arrays}
    params, record = read_base(network.config, missing, seed=0)
    check_digest(base or {}, record, owner)
    return {**arrays, **params}


class _StoredParameters(dict[str, Any]):
    """The parameters of a checkpoint by name, each read when it is popped."""

    def __init__(self, network: Network, stored: Mapping[str, Any]) -> None:
        if mismatched := sorted(network.abstract.keys() ^ stored.keys()):
            names = ", ".join(mismatched[:5])
            raise SpecError(f"the checkpoint's parameters are not the model's: {names}")
        super().__init__(stored)
        self._abstract = network.abstract

    def pop(self, name: str, *default: Any) -> Array:
        target, stored = self._abstract[name], super().pop(name)
        if isinstance(stored, Array):
            # A parameter of the base is already on the devices.
            return stored
        axes = [slice(None)] * len(stored.shape)
        if len(axes) < 3 or isinstance(stored, reader.StoredArray):
            array = np.asarray(stored[tuple(axes)])
        else:
            # Parameters with merged adapters can only be read layer by layer.
            layers = range(stored.shape[0])
            array = np.stack([np.asarray(stored[(layer, *axes[1:])]) for layer in layers])
        return jax.make_array_from_callback(
            target.shape, target.sharding, lambda index: array[index].astype(target.dtype)
        )


def _choose_mesh(mesh: AnyMesh, training_mesh: Mapping[str, Any] | None) -> jax.sharding.Mesh:
    """Return the requested mesh, or that of the training if it fits, or all devices as fsdp."""
    if mesh is not None:
        return meshes.resolve_mesh(mesh)
    devices = jax.devices()
    sizes = {axis: size for axis, size in (training_mesh or {}).items() if isinstance(size, int)}
    if training_mesh and -1 not in sizes.values() and math.prod(sizes.values()) == len(devices):
        return meshes.build_mesh(spec.Mesh.model_validate(training_mesh))
    return meshes.build_mesh(spec.Mesh(fsdp=len(devices)))


# --- samples of a training ------------------------------------------------------------------------


def sampling_bytes_per_device(
    train: TrainSpec, samples: spec.Samples, mesh: jax.sharding.Mesh
) -> int:
    """Return the bytes of weights, keys and values on a device while a training samples.

    A token has at least one byte, so the bytes of the prompts bound their tokens, and no tokenizer
    is needed.
    """
    prompts = [prompt.encode() if isinstance(prompt, str) else prompt for prompt in samples.prompts]
    network = build_network(train.model, mesh, train.precision, train.lora)
    return network.bytes_per_device(len(prompts), max(map(len, prompts)) + samples.max_tokens)


class TrainingSamples:
    """Generates samples for the prompts of `eval.samples` during a training.

    Raises SpecError if the model or the tokenizer does not support the prompts.
    """

    def __init__(self, train: TrainSpec, samples: spec.Samples, mesh: jax.sharding.Mesh) -> None:
        self._prompts, self._lora = samples.prompts, train.lora
        try:
            network = build_network(train.model, mesh, train.precision, train.lora)
            files = tokenizer_files(train.data)
            self._tokenizer = tokenizers.find_tokenizer(
                network.config.vocab, train.data.model_dump(), files, "train.data.tokenizer"
            )
            self._sampling = Sampling(samples.max_tokens, samples.temperature, seed=train.seed)
            self._rows = [
                self._encode_prompt(prompt) if isinstance(prompt, str) else prompt
                for prompt in samples.prompts
            ]
            check_prompts(network, self._rows, samples.max_tokens)
        except SpecError as error:
            raise SpecError(f"train.eval.samples: {error}") from None
        ends = self._tokenizer.ends if self._tokenizer else ()
        self._generator = Generator(network, Weights({}, ()), ends)

    def take_samples(self, params: Mapping[str, Array]) -> list[dict[str, Any]]:
        """Return a sample of each prompt as JSON, for the stacked parameters of the training.

        Every process must call this. During sampling the devices hold a copy of the parameters in
        the compute dtype, with merged adapters.
        """
        network = self._generator.network
        decode = self._tokenizer.decode if self._tokenizer else None
        merged = MergingParameters(params, network.config, self._lora)
        self._generator.weights = network.unstack_params(merged)
        groups = self._generator.generate(self._rows, self._sampling)
        self._generator.weights = Weights({}, ())
        return [
            {"prompt": prompt, "sample": decode(sample.ids) if decode else sample.ids}
            for prompt, (sample,) in zip(self._prompts, groups, strict=True)
        ]

    def _encode_prompt(self, prompt: str) -> Ids:
        if self._tokenizer is None:
            raise SpecError(f"{prompt!r} is text, and train.data has no tokenizer; give token ids")
        return self._tokenizer.encode(prompt)
