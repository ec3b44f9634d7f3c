"""LoRA adapters on the kernels of a model whose other parameters are frozen.

An adapter adds scaling × A · B to a kernel. Only A and B are trained and saved. The frozen kernel
may be kept in int8.

Training on preferences also needs a frozen reference, the model at the start of the training.
Without adapters the reference is a copy, which checkpoints do not contain. With adapters no copy is
needed, because the model without its adapters is the reference.

B batch, L length, I inputs, O outputs, R rank. I and O may be several axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer.adapters import peft
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.models.layers import Drop, apply_kernel
from jaxlaunch.trainer.numerics import memory
from jaxlaunch.trainer.parallel.sharding import constrain
from jaxlaunch.trainer.spec import Lora, PublishedModel, TrainSpec
from jaxlaunch.trainer.torch_models.network import TorchModel

# Folded into the key of the adapters' initial weights, so that adapters do not change the draws of
# the model's own weights.
RNG_STREAM = 0x10A
# Attribute of FrozenKernel for the model's parameter, which keeps its name.
KERNEL_ATTRIBUTE = "frozen_kernel"


class Adapters:
    """The adapters of a training.

    Raises:
        SpecError: A target matches no kernel.
    """

    def __init__(self, spec: TrainSpec, params_dtype: jnp.dtype) -> None:
        assert isinstance(spec.model, PublishedModel), "the spec checks it"
        assert spec.lora is not None, "the job has adapters"
        self._model, self._lora = spec.model, spec.lora
        # The dtype of frozen parameters except for kernels in int8.
        self._frozen_dtype = params_dtype if spec.lora.base is None else jnp.dtype("bfloat16")
        self._kernels = peft.find_kernels(spec.model)
        self._adapted = peft.select_kernels(spec.model, spec.lora)

    def attach_to_model(self, model: Any, key: Array) -> None:
        """Add adapters drawn from `key` to a new `model`, and quantize its kernels if asked to."""
        rngs = nnx.Rngs(jax.random.fold_in(key, RNG_STREAM))
        adapted = {kernel.name for kernel in self._adapted}
        for kernel in self._kernels:
            *path, attribute = kernel.name.split(".")
            module = model
            for name in path:
                module = getattr(module, name)
            frozen = FrozenKernel(
                getattr(module, attribute),
                len(kernel.inputs),
                self._lora if kernel.name in adapted else None,
                rngs,
                is_int8=self._lora.base == "int8",
            )
            setattr(module, attribute, frozen)

    def cast_frozen(self, name: str, param: Array) -> Array:
        """Cast a frozen parameter to the dtype in which it is kept."""
        is_float = jnp.issubdtype(param.dtype, jnp.floating)
        is_scale = name.endswith(peft.SCALE_SUFFIX)
        return param.astype(self._frozen_dtype) if is_float and not is_scale else param

    @property
    def late_cast_names(self) -> frozenset[str]:
        """Names of the parameters that are cast in their product, so that no cast copy is kept."""
        names = [kernel.name for kernel in self._kernels]
        return frozenset([*names, *(name + peft.SCALE_SUFFIX for name in names)])

    @property
    def target_names(self) -> Sequence[str]:
        """Names of the adapted modules, for messages."""
        assert isinstance(self._model, PublishedModel), "the spec checks it"
        return peft.module_names(self._model, self._adapted)

    def read_initial_adapters(
        self, abstract_params: Mapping[str, jax.ShapeDtypeStruct], base: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return the adapters that are not drawn: those of the job's peft folder, if it has one.

        Args:
            abstract_params: Shapes and shardings of the adapters.
            base: The frozen parameters of a folder, which some adapters start from.
        """
        if self._lora.init_from is None:
            return {}
        return peft.read_adapters(self._lora, self._adapted, abstract_params)

    def describe_training(self, params: Mapping[str, Any], opt: Any, saved: Any) -> str:
        """Return a sentence with the number of trained parameters and the bytes of their state."""
        sizes = {name: leaf.size for name, leaf in params.items()}
        trained = sum(size for name, size in sizes.items() if peft.is_adapter(name))
        total = sum(size for name, size in sizes.items() if not name.endswith(peft.SCALE_SUFFIX))
        targets = ", ".join(self.target_names)
        return (
            f"train.lora: rank {self._lora.rank} at {targets}; {trained:,} of {total:,} parameters "
            f"are trained ({trained / total:.2%}), optimizer {memory.total_bytes(opt):,} bytes, "
            f"checkpoint {memory.total_bytes(saved):,} bytes"
        )


class FrozenKernel(nnx.Module):
    """A stacked kernel with an optional adapter: x · kernel + scaling × (dropout(x) · A) · B.

    It replaces the parameter of a module. `inputs` is the number of input axes of the kernel.
    """

    def __init__(
        self,
        kernel: nnx.Param[Array],
        inputs: int,
        lora: Lora | None,
        rngs: nnx.Rngs,
        *,
        is_int8: bool,
    ) -> None:
        axes, stacked = tuple(kernel.get_metadata()["axes"]), kernel[...]
        assert stacked.ndim == 1 + len(axes), "a kernel is stacked over the layers"
        frozen, scale = quantize_kernel(stacked, inputs) if is_int8 else (stacked, None)
        self.frozen_kernel = nnx.Param(frozen, axes=axes)
        self.int8_scale = None if scale is None else nnx.Param(scale, axes=axes[inputs:])
        a = b = None
        if lora is not None:
            a, b = _initial_matrices(stacked.shape, inputs, lora.rank, rngs)
        self.lora_a = None if a is None else nnx.Param(a, axes=(*axes[:inputs], "rank"))
        self.lora_b = None if b is None else nnx.Param(b, axes=("rank", *axes[inputs:]))
        self.scaling = 1.0 if lora is None else lora.scaling
        # The reference of preferences sets this to False.
        self.is_adapted = lora is not None
        rate = 0.0 if lora is None else lora.dropout
        # Each layer has its own random stream.
        make_drops: Any = nnx.vmap(lambda rngs: Drop(rate, False, rngs))
        self.drop: Drop | None = make_drops(rngs.split(stacked.shape[0])) if rate else None

    def __getitem__(self, key: Any) -> FrozenKernel:
        """Return self. Models write `parameter[...]` before they multiply with a parameter."""
        return self

    def product(self, x: Array, axes: int) -> Array:
        """Return x [B, L, I] times kernel and adapter: [B, L, O], in the dtype of x."""
        scale = None if self.int8_scale is None else self.int8_scale[...]
        output = frozen_product(x, self.frozen_kernel[...], scale, axes)
        if self.lora_a is None or self.lora_b is None or not self.is_adapted:
            return output
        dropped = x if self.drop is None else self.drop(x)
        hidden_BLR = apply_kernel(dropped, self.lora_a[...], axes)
        hidden_BLR = constrain(hidden_BLR, "batch", "length", "rank")
        delta = apply_kernel(hidden_BLR, self.lora_b[...])
        # As in torch, only the scaled product is rounded to the dtype of x, not the scaling itself.
        return output + (self.scaling * delta.astype(jnp.float32)).astype(delta.dtype)


def _initial_matrices(
    shape: tuple[int, ...], inputs: int, rank: int, rngs: nnx.Rngs
) -> tuple[Array, Array]:
    """Return the initial A, drawn as in peft, and B, which is zero, for a stacked kernel."""
    layers, input_sizes, output_sizes = shape[0], shape[1 : 1 + inputs], shape[1 + inputs :]
    # torch's nn.Linear has the same bound.
    bound = 1 / math.sqrt(math.prod(input_sizes))
    a = jax.random.uniform(rngs.params(), (layers, *input_sizes, rank), jnp.float32, -bound, bound)
    return a, jnp.zeros((layers, rank, *output_sizes), jnp.float32)


def quantize_kernel(kernel: Array, inputs: int) -> tuple[Array, Array]:
    """Quantize a kernel [layers, I, O] to int8; return it with float32 factors [layers, O]."""
    kernel_f32, axes = kernel.astype(jnp.float32), tuple(range(1, 1 + inputs))
    max_abs = jnp.abs(kernel_f32).max(axes, keepdims=True)
    scale = jnp.where(max_abs == 0, 1.0, max_abs / 127)
    return jnp.round(kernel_f32 / scale).astype(jnp.int8), scale.squeeze(axes)


def dequantize_kernel(kernel: Array, scale: Array, inputs: int) -> Array:
    """Return the float32 kernel of a quantized one, without the digits lost to rounding."""
    return kernel.astype(jnp.float32) * jnp.expand_dims(scale, tuple(range(1, 1 + inputs)))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def frozen_product(x: Array, kernel: Array, scale: Array | None, axes: int) -> Array:
    """Return x [B, L, I] times a kernel [I, O] and `scale` [O]: [B, L, O] in the dtype of x.

    The kernel has no gradient. The backward pass casts the stored kernel again, so that no cast
    copy is kept until then.
    """
    dtype = x.dtype
    # Before scaling, sums of int8 values are up to 127 times larger, which would overflow float16.
    output_dtype = jnp.float32 if dtype == jnp.float16 and scale is not None else dtype
    output = jnp.tensordot(x, kernel.astype(dtype), axes, preferred_element_type=output_dtype)
    return _scale_outputs(output, scale).astype(dtype)


def _frozen_product_forward(
    x: Array, kernel: Array, scale: Array | None, axes: int
) -> tuple[Array, Any]:
    return frozen_product(x, kernel, scale, axes), (kernel, scale)


def _frozen_product_backward(
    axes: int, residuals: tuple[Array, Array | None], gradient: Array
) -> tuple[Array, None, None]:
    kernel, scale = residuals
    scaled = _scale_outputs(gradient, scale)
    contracted_axes = tuple(range(2, scaled.ndim)), tuple(range(axes, kernel.ndim))
    return jnp.tensordot(scaled, kernel.astype(scaled.dtype), contracted_axes), None, None


frozen_product.defvjp(_frozen_product_forward, _frozen_product_backward)


def _scale_outputs(outputs: Array, scale: Array | None) -> Array:
    if scale is None:
        return outputs
    return (outputs.astype(jnp.float32) * scale[None, None]).astype(outputs.dtype)


# --- the reference model of preferences -----------------------------------------------------------

# The attribute of a model that holds its frozen copy, and the prefix of the copy's parameters.
REFERENCE = "reference"
REFERENCE_PREFIX = f"{REFERENCE}."


def attach_reference(model: nnx.Module, reference: nnx.Module) -> None:
    """Attach the frozen reference to `model`. Raises SpecError if the name is in use."""
    if hasattr(model, REFERENCE):
        problem = f"has an attribute {REFERENCE}, where its frozen copy is kept"
        raise SpecError(f"{type(model).__name__} {problem}; rename it")
    setattr(model, REFERENCE, reference)


def evaluation_reference(model: nnx.Module) -> Any:
    """Return the reference for evaluation: a frozen copy, or the model without adapters."""
    reference: Any = getattr(model, REFERENCE, None)
    if reference is None:
        graph, arrays = nnx.split(model)
        # A second module with the same arrays, so that the adapters of the model stay active.
        reference = nnx.merge(graph, arrays)
        for _, module in nnx.iter_modules(reference):
            if isinstance(module, FrozenKernel | TorchModel):
                module.is_adapted = False
    reference.eval()
    return reference
