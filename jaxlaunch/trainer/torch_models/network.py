"""A module of transformers as a model of flax.nnx.

Its parameters keep their published names. At each call they are handed to the module by
`torch.func.functional_call`, where torchax runs torch's operators as JAX's.

B batch, L length, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer.attention.implementations import (
    ATTENTION_OUTPUT,
    Keys,
    Visible,
    as_visible,
)
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.models.language_model import Features
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.numerics.remat import remat_layer
from jaxlaunch.trainer.parallel.sharding import Axes, constrain, gather_weight
from jaxlaunch.trainer.torch_models import adapters, attention, axes, modules, operators
from jaxlaunch.trainer.torch_models import head as heads

# Keyword arguments of every call: only tuples of arrays leave a module.
CALL_OPTIONS = {"use_cache": False, "return_dict": False}


def build_torch_module(config: Any, auto_class: str = modules.CAUSAL_LM) -> Any:
    """Return the module of a configuration of transformers, with our attention if it allows that.

    Raises SpecError if there is no such class of this architecture.
    """
    operators.register_operators()
    attention.register_names()
    try:
        return modules.build_module(config, attention.NAME, auto_class)
    except (modules.UnsupportedAttentionError, KeyError):
        # A few architectures look their attention up in a table of their own.
        return modules.build_module(config, modules.EAGER, auto_class)


class TorchModel(nnx.Module):
    """A model whose arithmetic is that of a torch module.

    The parameters and the buffers of checkpoints are attributes by the parts of their names.

    Attributes:
        torch_module: The module, without weights.
        packs_rows: Whether the examples of packed rows are independent of each other.
        has_adapters: Whether the module has adapters of peft.
        is_adapted: Whether it computes with them; the reference of preferences does not.
        head_name: The output matrix, if a loss can compute logits with it in chunks.
    """

    # A cap of the family is part of its code.
    logit_cap: float | None = None

    def __init__(
        self,
        module: Any,
        rngs: nnx.Rngs,
        options: ModelOptions,
        *,
        packs_rows: bool = True,
        has_adapters: bool = False,
    ) -> None:
        self.torch_module = module
        self.has_adapters = self.is_adapted = has_adapters
        self.packs_rows = packs_rows
        self.attention_name = options.attention
        self.output, self.loss = options.output, options.loss
        self.head_name = heads.find_head(module)
        # nnx's train() and eval() set the attribute of this name.
        self.deterministic = False
        self.streams = nnx.Rngs(dropout=rngs.dropout())
        axes_by_name = axes.parameter_axes(module)
        # Below adapters, the whole model is frozen.
        unused = frozenset() if has_adapters else list_unused(module)
        variables = _zero_parameters(module, axes_by_name, unused) | _persistent_buffers(module)
        # Static data of nnx has to be hashable.
        self.torch_names = tuple(
            (published, name)
            for name, published in adapters.parameter_names(module).items()
            if name in variables
        )
        tree = _nest({published: variables[name] for published, name in self.torch_names})
        self.roots = tuple(tree)
        for root, branch in tree.items():
            setattr(self, root, nnx.data(branch))
        layers = _prepare_layers(module, axes_by_name, options)
        self.outer_axes = {
            name: value for name, value in axes_by_name.items() if not name.startswith(layers)
        }

    def variables(self) -> dict[str, nnx.Variable[Array]]:
        """Return the variables of the parameters and the buffers by their published names."""
        return _flatten({root: getattr(self, root) for root in self.roots})

    def call(self, visible: Visible, keywords: Mapping[str, Any]) -> tuple[Array, ...]:
        """Call the module with arrays as keyword arguments, and return its outputs."""
        variables = self.variables()
        weights = {
            name: self._gather_outer(name, variables[published].get_value())
            for published, name in self.torch_names
        }
        return self._call_module(weights, visible, keywords, self.streams.dropout())

    def _call_module(
        self,
        weights: Mapping[str, Array],
        visible: Visible,
        keywords: Mapping[str, Any],
        dropout_key: Array,
    ) -> tuple[Array, ...]:
        import torch
        import torchax
        from torchax import interop

        arrays = {name: jnp.asarray(array) for name, array in self.torch_module.named_buffers()}
        environment = torchax.default_env()
        self.torch_module.train(not self.deterministic)
        if self.has_adapters:
            adapters.enable_adapters(self.torch_module, self.is_adapted)
        with (
            environment,
            environment.override_property(prng=dropout_key),
            attention.use_attention(attention.Call(self.attention_name, visible)),
        ):
            outputs = torch.func.functional_call(
                self.torch_module,
                interop.torch_view(arrays | {**weights}),
                (),
                interop.torch_view({**keywords, **CALL_OPTIONS}),
            )
        results: tuple[Array, ...] = interop.jax_view(outputs)
        return results

    def _gather_outer(self, name: str, value: Array) -> Array:
        """Gather a weight that is outside of the layers, which gather their own."""
        axes_of_value = self.outer_axes.get(name)
        if axes_of_value is None:
            return value
        if axes_of_value[0] == "vocab" and not axes.is_head(name):
            # With a gradient that is split over fsdp as well, XLA (jaxlib 0.10.2) adds to the first
            # row of the second half of a table what belongs to no row of that half.
            return constrain(value, *axes_of_value)
        return gather_weight(value, *axes_of_value)

    def __call__(self, tokens_BL: Array, keys: Keys = None) -> Array:
        """Return logits_BLV in the output dtype. A position sees the visible ones up to itself.

        Raises SpecError for packed rows that the layers would mix.
        """
        logits_BLV = self._call_tokens(tokens_BL, keys)[0].astype(self.output)
        return constrain(logits_BLV, "batch", "length", "vocab")

    def read(self, tokens_BL: Array, keys: Keys = None, real_BL: Array | None = None) -> Features:
        """Return the output of the base model, of which `project` makes logits.

        Raises SpecError for packed rows that the layers would mix.
        """
        from torchax import interop

        features = heads.read_features(
            self.torch_module, lambda: self._call_tokens(tokens_BL, keys)
        )
        return Features(_split_rows(interop.jax_view(features)))

    def _call_tokens(self, tokens_BL: Array, keys: Keys) -> tuple[Array, ...]:
        visible = as_visible(keys)
        if visible.segments_BL is not None and not self.packs_rows:
            raise SpecError(
                f"the data has packed rows, and {type(self.torch_module).__name__} has layers that "
                "mix their examples; set packing: none in train.data"
            )
        keywords: dict[str, Any] = {"input_ids": tokens_BL}
        if visible.positions_BL is not None:
            keywords["position_ids"] = visible.positions_BL
        return self.call(visible, keywords)

    @property
    def head_DV(self) -> Array:
        """The gathered output matrix [D, V]."""
        published_names = {name: published for published, name in self.torch_names}
        head_VD = self.variables()[published_names[str(self.head_name)]].get_value()
        return gather_weight(head_VD, "vocab", "embed").T

    def project(self, x_BLD: Array, head_DV: Array, output: jnp.dtype | None = None) -> Array:
        """Return the logits_BLV of features in dtype `output`, as the module computes them."""
        from torchax import interop

        weights = {str(self.head_name): head_DV.T}
        keywords = {"input_ids": jnp.zeros(x_BLD.shape[:2], jnp.int32)}
        # Nothing is dropped after the base model.
        key = jax.random.key(0)
        with heads.replace_features(self.torch_module, interop.torch_view(x_BLD)):
            outputs = self._call_module(weights, Visible(), keywords, key)
        logits_BLV = outputs[0].astype(output or self.output)
        return constrain(logits_BLV, "batch", "length", "vocab")


class TorchClassifier(TorchModel):
    """A classifier of texts, with the head of AutoModelForSequenceClassification.

    Attributes:
        pad_token: The token that follows a text, by which a decoder knows its last token.
    """

    def __init__(self, module: Any, rngs: nnx.Rngs, options: ModelOptions, **keywords: Any) -> None:
        super().__init__(module, rngs, options, **keywords)
        self.pad_token = int(module.config.get_text_config().pad_token_id)

    def __call__(self, tokens_BL: Array, keys: Keys = None) -> Array:
        """Return logits_BV in the output dtype, for texts whose lengths the keys have."""
        visible = as_visible(keys)
        index_BL = jax.lax.broadcasted_iota(jnp.int32, tokens_BL.shape, 1)
        is_text_BL = jnp.ones(tokens_BL.shape, bool)
        if visible.lengths_B is not None:
            is_text_BL = index_BL < visible.lengths_B[:, None]
        keywords = {
            "input_ids": jnp.where(is_text_BL, tokens_BL, self.pad_token),
            "attention_mask": is_text_BL.astype(jnp.int32),
        }
        logits_BV = self.call(visible, keywords)[0].astype(self.output)
        return constrain(logits_BV, "batch", None)


def list_unused(module: Any) -> frozenset[str]:
    """Return the parameters that no text uses: those of an image model next to the decoder."""
    if module.config.get_text_config() is module.config:
        return frozenset()
    # All heads are outside of the base model.
    unused_ids = {*map(id, module.base_model.parameters())}
    unused_ids -= {*map(id, module.get_decoder().parameters())}
    return frozenset(
        name for name, parameter in module.named_parameters() if id(parameter) in unused_ids
    )


def _zero_parameters(
    module: Any, axes_by_name: Mapping[str, Axes | None], unused: Collection[str]
) -> dict[str, Any]:
    """Return parameters of zeros, which the weights of a folder replace.

    Unused ones are not parameters of the training, in which weight decay would change them.
    """
    return {
        name: (nnx.Variable if name in unused else nnx.Param)(
            jnp.zeros(tuple(parameter.shape), jnp.float32), axes=axes_by_name[name]
        )
        for name, parameter in module.named_parameters()
    }


def _persistent_buffers(module: Any) -> dict[str, Any]:
    """Return the buffers that a folder's weights contain."""
    persistent = module.state_dict().keys()
    return {
        name: nnx.Variable(jnp.asarray(buffer))
        for name, buffer in module.named_buffers()
        if name in persistent
    }


def _nest(variables: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, variable in variables.items():
        *parents, last = name.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = variable
    return tree


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= _flatten(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves


def _prepare_layers(
    module: Any, axes_by_name: Mapping[str, Axes | None], options: ModelOptions
) -> tuple[str, ...]:
    """Have each layer gather its weights, and recompute itself in the backward pass.

    Without this, the compiler may gather the weights of all layers at the beginning of a step.
    Returns the prefixes of the names of the layers' parameters.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    prefixes = []
    for path, layer in module.named_modules():
        if isinstance(layer, GradientCheckpointingLayer):
            prefixes.append(f"{path}.")
            layer_axes = {
                name: axes_by_name[f"{path}.{name}"] for name, _ in layer.named_parameters()
            }
            layer.forward = partial(
                _run_layer, layer, type(layer).forward, layer_axes, options.remat
            )
    return tuple(prefixes)


def _run_layer(
    layer: Any,
    forward: Callable[..., Any],
    layer_axes: Mapping[str, Axes | None],
    policy: Any,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """Run a layer with gathered weights; in training its backward pass runs it again.

    Args:
        layer: The layer.
        forward: Its method, as its class defines it.
        layer_axes: The logical axes of each of its parameters.
        policy: The value of `train.remat`.
        *arguments: Its arguments, torch tensors of torchax or anything else.
        **keywords: Its keyword arguments.
    """
    import torch
    import torchax
    from torchax import interop

    environment = torchax.default_env()
    values = {"arguments": arguments, "keywords": keywords}
    leaves, tree = jax.tree.flatten(values, is_leaf=lambda leaf: isinstance(leaf, torch.Tensor))
    is_array = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    spans = [getattr(leaf, attention.SPAN, None) for leaf in leaves]

    def run(arrays: list[Array], weights: Mapping[str, Array], key: Array) -> Any:
        remaining = iter(arrays)
        filled = [
            _with_span(next(remaining), span) if is_one else leaf
            for leaf, is_one, span in zip(leaves, is_array, spans, strict=True)
        ]
        call = jax.tree.unflatten(tree, filled)
        gathered = {
            name: gather_weight(weight, *(layer_axes[name] or (None,) * weight.ndim))
            for name, weight in weights.items()
        }
        with (
            environment.override_property(prng=key),
            torch.nn.utils.stateless._reparametrize_module(layer, interop.torch_view(gathered)),
        ):
            outputs = forward(layer, *call["arguments"], **call["keywords"])
        return interop.jax_view(outputs)

    arrays = [
        _split_rows(interop.jax_view(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)
    ]
    weights = interop.jax_view(dict(layer.named_parameters()))
    if layer.training:
        run = remat_layer(run, policy, (ATTENTION_OUTPUT,), scanned=False)
    return interop.torch_view(run(arrays, weights, environment.get_and_rotate_prng_key()))


def _split_rows(array: Array) -> Array:
    """Split the rows of activations [B, L, D] over the devices, and nothing else."""
    is_activation = array.ndim == 3 and jnp.issubdtype(array.dtype, jnp.floating)
    return constrain(array, "batch", "length", "embed") if is_activation else array


def _with_span(array: Array, span: Any) -> Any:
    from torchax import interop

    tensor = interop.torch_view(array)
    if span is not None:
        setattr(tensor, attention.SPAN, span)
    return tensor
