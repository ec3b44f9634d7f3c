"""Compares an architecture under JAX with PyTorch, for a tiny random model of the same kind.

Both compute the logits, the loss and the gradients of the same tokens in float32, PyTorch on one
CPU and JAX on a mesh of dp 2 × fsdp 2 × mp 2. A second batch holds two packed rows of half the
length, whose logits must be those of the rows alone: layers that mix positions in another way than
by attention do not see where a packed row begins.

B batch, L length, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxlaunch.trainer.attention.implementations import Visible
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel.sharding import state_sharding
from jaxlaunch.trainer.spec import Mesh
from jaxlaunch.trainer.torch_models import modules
from jaxlaunch.trainer.torch_models.network import TorchModel, build_torch_module

BATCH, LENGTH = 4, 32
MESH = Mesh(dp=2, fsdp=2, mp=2)
MESH_DEVICES = 8
# Largest differences, as shares of the largest value of an array.
TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
# A gradient may differ by twice the difference between PyTorch's own in float32 and in float64: one
# of a rate of decay, for example, is a sum in which large products cancel. Measured for A_log of
# qwen3_next: 3.0e-4 from JAX to PyTorch, and to float64 3.0e-4 for PyTorch and 2.5e-4 for JAX.
ROUNDING_FACTOR, MAX_ROUNDING = 2.0, 1e-3
# A gradient is compared relative to this share of the largest one if all its values are smaller:
# rounding errors grow with what is summed, not with the result.
TINY_GRADIENT = 1e-3
# Sizes of the tiny model, for keys that a configuration has.
TINY_SIZES: Mapping[str, int] = {
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "dim": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "ffn_dim": 96,
    "hidden_dim": 96,
    "n_inner": 96,
    "ffn_hidden_size": 96,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "head_dim": 16,
    "rotary_dim": 8,
    "vocab_size": 128,
    "sliding_window": 8,
    "attention_chunk_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MIN_POSITIONS = 256
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
LAYER_LISTS = ("layer_types", "mlp_layer_types")
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
GROUPED_HEADS = 2
# The length of the reason of a library in a message.
MAX_REASON_CHARS = 300


class Comparison(NamedTuple):
    """The largest differences between JAX and PyTorch, as shares of the largest value.

    Attributes:
        architecture: Class of transformers.
        model_type: Name of the architecture in config.json.
        logits: Difference of the logits.
        gradient: Largest difference of a parameter's gradient.
        parameter: The parameter with this difference.
        packed: Difference of the logits of packed rows.
        rounding: Difference of this gradient between float32 and float64 in PyTorch; 0 if it was
            not needed.
    """

    architecture: str
    model_type: str
    logits: float
    gradient: float
    parameter: str
    packed: float
    rounding: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Whether the results agree."""
        return self.logits <= TOLERANCE and self.gradient <= gradient_limit(self.rounding)

    @property
    def packs_rows(self) -> bool:
        """Whether packed rows are independent of each other."""
        return self.packed <= TOLERANCE


def gradient_limit(rounding: float) -> float:
    """Return the largest difference of a gradient whose rounding errors have this size."""
    return max(GRADIENT_TOLERANCE, min(ROUNDING_FACTOR * rounding, MAX_ROUNDING))


def shrink_config(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config.json with the sizes of a tiny model."""
    tiny = copy.deepcopy(dict(keys))
    for block in (tiny, *(tiny[name] for name in ("text_config", "vision_config") if name in tiny)):
        _shrink_block(block)
    tiny.pop("quantization_config", None)
    return tiny


def _shrink_block(block: dict[str, Any]) -> None:
    def is_number(key: str) -> bool:
        return type(block.get(key)) is int

    heads = block.get("num_attention_heads")
    for key, size in filter(lambda item: is_number(item[0]), TINY_SIZES.items()):
        block[key] = size if key == "vocab_size" else min(size, block[key])
    if is_number("num_key_value_heads"):
        is_grouped = block["num_key_value_heads"] != heads
        block["num_key_value_heads"] = GROUPED_HEADS if is_grouped else TINY_SIZES["n_head"]
    if "qk_rope_head_dim" in block and "head_dim" in block:
        block["head_dim"] = block["qk_rope_head_dim"]
    if is_number("max_position_embeddings"):
        block["max_position_embeddings"] = max(MIN_POSITIONS, LENGTH)
    count = next((block[key] for key in LAYER_COUNTS if is_number(key)), None)
    for key in LAYER_LISTS:
        if isinstance(block.get(key), list):
            block[key] = _few_layers(block[key], count or len(block[key]))
    for key in TOKEN_KEYS:
        if block.get(key) is not None:
            block[key] = 0


def _few_layers(types: list[str], count: int) -> list[str]:
    """Return the types of `count` layers, among which each type is."""
    distinct = list(dict.fromkeys(types))
    return [distinct[index % len(distinct)] for index in range(count)]


def compare_folder(folder: str) -> Comparison:
    """Compare the architecture of a folder's config.json. Raises SpecError if it is impossible."""
    return compare_config(modules.read_config(folder).to_dict())


def compare_config(keys: Mapping[str, Any]) -> Comparison:
    """Compare the architecture of a configuration's keys. Raises SpecError."""
    import torch
    import transformers

    modules.import_libraries()
    model_type = keys.get("model_type")
    try:
        config = transformers.AutoConfig.for_model(**shrink_config(keys))
        torch.manual_seed(0)
        auto_class = modules.MASKED_LM if modules.is_encoder(config) else modules.CAUSAL_LM
        reference = getattr(transformers, auto_class).from_config(
            copy.deepcopy(config), attn_implementation=modules.EAGER, dtype=torch.float32
        )
    except Exception as error:
        # A constructor may raise anything when the tiny sizes do not fit each other.
        raise SpecError(
            f"a tiny model of model_type = {model_type} cannot be made to compare it: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_REASON_CHARS]}"
        ) from error
    _disturb(reference)
    tokens_BL = np.random.default_rng(0).integers(
        1, config.get_text_config().vocab_size - 8, (BATCH, LENGTH)
    )
    expected = _run_torch(reference, tokens_BL)
    found = _run_jax(build_torch_module(config, auto_class), reference, tokens_BL)
    least = TINY_GRADIENT * expected.largest_gradient
    gradients = {
        name: _relative_difference(found.gradients[name], gradient, least)
        for name, gradient in expected.gradients.items()
    }
    rounding = dict.fromkeys(gradients, 0.0)
    if any(share > GRADIENT_TOLERANCE for share in gradients.values()):
        with _compute_in_float64(torch):
            exact = _run_torch(_copy_in_float64(reference), tokens_BL)
        rounding = {
            name: _relative_difference(expected.gradients[name], gradient, least)
            for name, gradient in exact.gradients.items()
        }
    worst = max(gradients, key=lambda name: _excess(gradients[name], rounding[name]))
    return Comparison(
        type(reference).__name__,
        str(model_type),
        _relative_difference(found.logits, expected.logits),
        gradients[worst],
        worst,
        _relative_difference(found.packed_logits, expected.packed_logits),
        rounding[worst],
    )


def _excess(gradient: float, rounding: float) -> float:
    """Return a difference as a multiple of its limit, infinity if it is not a number."""
    return gradient / gradient_limit(rounding) if math.isfinite(gradient) else math.inf


def _copy_in_float64(module: Any) -> Any:
    import torch

    # torch has no grouped product in float64.
    double = copy.deepcopy(module).to(torch.float64)
    for config in (part.config for part in double.modules() if hasattr(part, "config")):
        config._experts_implementation = modules.EAGER
    double.zero_grad()
    return double


def _compute_in_float64(torch: Any) -> Any:
    """Return a context in which what asks torch for float32 gets float64."""

    def widen(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    class Float64(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            if function is torch.Tensor.float:
                function = torch.Tensor.double
            keywords = {name: widen(value) for name, value in (keywords or {}).items()}
            return function(*map(widen, arguments), **keywords)

    return Float64()


class Results(NamedTuple):
    """What both compute.

    Attributes:
        logits: [B, L, V].
        packed_logits: Of two packed rows of half the length each, [B, L, V].
        gradients: Gradients of the mean cross-entropy by parameter.
    """

    logits: np.ndarray[Any, Any]
    packed_logits: np.ndarray[Any, Any]
    gradients: dict[str, np.ndarray[Any, Any]]

    @property
    def largest_gradient(self) -> float:
        """The largest absolute value of all gradients."""
        return max(float(np.abs(gradient).max()) for gradient in self.gradients.values())


def _relative_difference(
    result: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], least: float = 0.0
) -> float:
    """Return the largest difference as a share of the largest expected value, or of `least`."""
    difference = float(np.abs(result - expected).max())
    largest = max(float(np.abs(expected).max()), least)
    return difference / largest if math.isfinite(difference) and largest else difference


def _disturb(module: Any) -> None:
    """Move all parameters away from their initial values, many of which are 0 or 1."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def _run_torch(module: Any, tokens_BL: np.ndarray[Any, Any]) -> Results:
    import torch

    tokens = torch.from_numpy(tokens_BL)
    # Without dropout and the noise of routers.
    module.eval()
    logits = module(input_ids=tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1)
    )
    loss.backward()
    gradients = {
        name: parameter.grad.numpy().copy()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    with torch.no_grad():
        halves = [
            module(input_ids=half, use_cache=False).logits
            for half in tokens.split(LENGTH // 2, dim=1)
        ]
    return Results(logits.detach().numpy(), torch.cat(halves, 1).numpy(), gradients)


def _run_jax(module: Any, reference: Any, tokens_BL: np.ndarray[Any, Any]) -> Results:
    mesh, weights = meshes.build_mesh(MESH), reference.state_dict()
    segments_BL = jnp.broadcast_to(jnp.arange(LENGTH)[None] // (LENGTH // 2) + 1, (BATCH, LENGTH))
    with jax.set_mesh(mesh):
        model = TorchModel(module, nnx.Rngs(0), ModelOptions())
        model.deterministic = True
        graph, *states = nnx.split(model, nnx.Param, ...)
        params, rest = states
        arrays = {}
        for path, variable in nnx.to_flat_state(params):
            name = ".".join(map(str, path))
            split = state_sharding(name, variable.shape, variable.get_metadata().get("axes"), mesh)
            arrays[path] = jax.device_put(jnp.asarray(weights[name].numpy()), split)

        def compute_loss(arrays: Any, visible: Visible, tokens_BL: Array) -> tuple[Array, Array]:
            values = [
                (path, variable.replace(arrays[path]))
                for path, variable in nnx.to_flat_state(params)
            ]
            merged = nnx.merge(graph, nnx.from_flat_state(values), rest, copy=True)
            logits_BLV: Array = merged(tokens_BL, visible).astype(jnp.float32)
            logprobs_BLV = jax.nn.log_softmax(logits_BLV[:, :-1])
            chosen_BL1 = jnp.take_along_axis(logprobs_BLV, tokens_BL[:, 1:, None], -1)
            return -chosen_BL1.mean(), logits_BLV

        rows = jax.device_put(tokens_BL.astype(np.int32), meshes.batch_sharding(mesh))
        evaluate = jax.jit(jax.value_and_grad(compute_loss, has_aux=True))
        results, gradients = evaluate(arrays, Visible(), rows)
        _, packed_BLV = jax.jit(compute_loss)(arrays, Visible(segments_BL=segments_BL), rows)
    named = {".".join(map(str, path)): np.asarray(value) for path, value in gradients.items()}
    return Results(np.asarray(results[1]), np.asarray(packed_BLV), named)
