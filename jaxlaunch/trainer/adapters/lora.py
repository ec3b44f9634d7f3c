"""What `train.lora` makes of a model: adapters at its products, everything else frozen, in any dtype or in int8.

Also the frozen copy that a training with preferences compares its model with: the model that it began from. No
checkpoint holds it; with adapters there is none, for without them the model is what it was.

B batch, L length, I inputs, O outputs, R rank; I and O may be several axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer.adapters import peft
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.models.layers import Drop, product
from jaxlaunch.trainer.numerics import memory
from jaxlaunch.trainer.parallel.sharding import constrain
from jaxlaunch.trainer.spec import Lora, Published, TrainSpec

STREAM = 0x10A  # folded into the key of the initial weights: the model's own are what they are without adapters
OWN = "frozen_kernel"  # the attribute of FrozenKernel that holds what the model had: its parameter keeps its name


class Adapters:
    """The adapters of a training by the names of its parameters. Raises SpecError for a target that matches nothing."""

    def __init__(self, spec: TrainSpec, params_dtype: jnp.dtype) -> None:
        assert isinstance(spec.model, Published) and spec.lora is not None, "the spec checks it"
        self._model, self._lora = spec.model, spec.lora
        # Of what is frozen and not in int8.
        self._frozen_dtype = params_dtype if spec.lora.base is None else jnp.dtype("bfloat16")
        self._kernels = peft.find_kernels(spec.model)
        self._adapted = peft.select_kernels(spec.model, spec.lora)

    def attach(self, model: Any, key: Array) -> None:
        """Put adapters, drawn from `key`, into a new `model`, and its kernels into int8 where the job says so."""
        rngs, adapted = nnx.Rngs(jax.random.fold_in(key, STREAM)), {kernel.name for kernel in self._adapted}
        for kernel in self._kernels:
            *path, attribute = kernel.name.split(".")
            owner = model
            for part in path:
                owner = getattr(owner, part)
            lora, is_int8 = self._lora if kernel.name in adapted else None, self._lora.base == "int8"
            frozen = FrozenKernel(getattr(owner, attribute), len(kernel.inputs), lora, rngs, is_int8=is_int8)
            setattr(owner, attribute, frozen)

    def cast_frozen(self, name: str, param: Array) -> Array:
        """Return a frozen parameter in the dtype that it is kept in."""
        is_float = jnp.issubdtype(param.dtype, jnp.floating) and not name.endswith(peft.SCALE)
        return param.astype(self._frozen_dtype) if is_float else param

    @property
    def cast_late(self) -> frozenset[str]:
        """Parameters that their product casts itself: a copy of all layers in the compute dtype is never made."""
        return frozenset(name for kernel in self._kernels for name in (kernel.name, kernel.name + peft.SCALE))

    def read_start(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        """Read the adapters of the peft folder that the job starts from; empty without one. Raises SpecError."""
        return peft.read_adapters(self._lora, self._adapted, wanted) if self._lora.init_from is not None else {}

    def note(self, params: Mapping[str, Any], opt: Any, saved: Any) -> str:
        """Return how much is trained, and the bytes of the optimizer and of a checkpoint, as a sentence."""
        trained = sum(leaf.size for name, leaf in params.items() if peft.is_adapter(name))
        whole = sum(leaf.size for name, leaf in params.items() if not name.endswith(peft.SCALE))
        modules = ", ".join(peft.module_names(self._model, self._adapted))
        return (
            f"train.lora: rank {self._lora.rank} at {modules}; {trained:,} of {whole:,} parameters are trained "
            f"({trained / whole:.2%}), optimizer {memory.total_bytes(opt):,} bytes, "
            f"checkpoint {memory.total_bytes(saved):,} bytes"
        )


class FrozenKernel(nnx.Module):
    """x → x · kernel + scaling × (dropout(x) · A) · B in place of a stacked kernel; without a `lora` no adapter."""

    def __init__(
        self, kernel: nnx.Param[Array], inputs: int, lora: Lora | None, rngs: nnx.Rngs, *, is_int8: bool
    ) -> None:
        axes, whole = tuple(kernel.get_metadata()["axes"]), kernel[...]
        assert whole.ndim == 1 + len(axes), "a kernel is stacked over the layers"
        frozen, scale = quantize(whole, inputs) if is_int8 else (whole, None)
        self.frozen_kernel = nnx.Param(frozen, axes=axes)
        self.int8_scale = None if scale is None else nnx.Param(scale, axes=axes[inputs:])
        a, b = (None, None) if lora is None else _initial_matrices(whole.shape, inputs, lora.rank, rngs)
        self.lora_a = None if a is None else nnx.Param(a, axes=(*axes[:inputs], "rank"))
        self.lora_b = None if b is None else nnx.Param(b, axes=("rank", *axes[inputs:]))
        self.scaling = 1.0 if lora is None else lora.scaling
        self.is_adapted = lora is not None  # False: the kernel alone, as a reference has it
        rate = 0.0 if lora is None else lora.dropout
        # It draws for each layer by itself.
        layered: Any = nnx.vmap(lambda rngs: Drop(rate, False, rngs))
        self.drop: Drop | None = layered(rngs.split(whole.shape[0])) if rate else None

    def __getitem__(self, where: Any) -> FrozenKernel:
        """Return itself, where a model takes the array of its parameter to hand it to `layers.product`."""
        return self

    def product(self, x: Array, axes: int) -> Array:
        """Return x [B, L, I] times the kernel, and what the adapter adds: [B, L, O], in the dtype of x."""
        scale = None if self.int8_scale is None else self.int8_scale[...]
        output = frozen_product(x, self.frozen_kernel[...], scale, axes)
        if self.lora_a is None or self.lora_b is None or not self.is_adapted:
            return output
        dropped = x if self.drop is None else self.drop(x)
        low_BLR = constrain(product(dropped, self.lora_a[...], axes), "batch", "length", "rank")
        return output + self.scaling * product(low_BLR, self.lora_b[...])


def _initial_matrices(shape: tuple[int, ...], inputs: int, rank: int, rngs: nnx.Rngs) -> tuple[Array, Array]:
    """Return A and B of a stacked kernel's adapter before the first step: drawn as peft draws A, and zeros."""
    layers, sizes_in, sizes_out = shape[0], shape[1 : 1 + inputs], shape[1 + inputs :]
    bound = 1 / math.sqrt(math.prod(sizes_in))  # of torch's nn.Linear
    a = jax.random.uniform(rngs.params(), (layers, *sizes_in, rank), jnp.float32, -bound, bound)
    return a, jnp.zeros((layers, rank, *sizes_out), jnp.float32)


def quantize(kernel: Array, inputs: int) -> tuple[Array, Array]:
    """Return a kernel [layers, I, O] in int8, symmetric, and float32 factors [layers, O]: a column's largest is 127."""
    wide = kernel.astype(jnp.float32)
    largest = jnp.abs(wide).max(tuple(range(1, 1 + inputs)), keepdims=True)
    scale = jnp.where(largest == 0, 1.0, largest / 127)
    return jnp.round(wide / scale).astype(jnp.int8), scale.reshape(scale.shape[0], *scale.shape[1 + inputs :])


def dequantize(kernel: Array, scale: Array, inputs: int) -> Array:
    """Return the inverse of `quantize` but for rounding, in float32."""
    return kernel.astype(jnp.float32) * jnp.expand_dims(scale, tuple(range(1, 1 + inputs)))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def frozen_product(x: Array, kernel: Array, scale: Array | None, axes: int) -> Array:
    """Return x [B, L, I] times a kernel [I, O] of another dtype, and `scale` [O]: [B, L, O] in the dtype of x.

    No gradient of the kernel. The backward pass reads the kernel as it is stored: what a cast makes of it for a moment
    is kept nowhere, neither over the layers nor until then.
    """
    dtype = x.dtype
    # Of int8 the sums are up to 127 times a column's largest number too large: float16 does not hold them.
    wide = jnp.float32 if dtype == jnp.float16 and scale is not None else dtype
    output = jnp.tensordot(x, kernel.astype(dtype), axes, preferred_element_type=wide)
    return _scale_outputs(output, scale).astype(dtype)


def _forward(x: Array, kernel: Array, scale: Array | None, axes: int) -> tuple[Array, Any]:
    return frozen_product(x, kernel, scale, axes), (kernel, scale)


def _backward(axes: int, residuals: tuple[Array, Array | None], gradient: Array) -> tuple[Array, None, None]:
    kernel, scale = residuals
    scaled = _scale_outputs(gradient, scale)
    outputs = tuple(range(2, scaled.ndim)), tuple(range(axes, kernel.ndim))
    return jnp.tensordot(scaled, kernel.astype(scaled.dtype), outputs), None, None


frozen_product.defvjp(_forward, _backward)


def _scale_outputs(outputs: Array, scale: Array | None) -> Array:
    return outputs if scale is None else (outputs.astype(jnp.float32) * scale[None, None]).astype(outputs.dtype)


# --- the reference of preferences -------------------------------------------------------------------------------------

REFERENCE = "reference"  # the attribute of the model that holds it
REFERENCE_PREFIX = f"{REFERENCE}."  # of its parameters' names


def attach_reference(model: nnx.Module, reference: nnx.Module) -> None:
    """Give `model` its frozen copy. Raises SpecError for a model that uses the name itself."""
    if hasattr(model, REFERENCE):
        name = type(model).__name__
        raise SpecError(f"{name} has an attribute {REFERENCE}, where its frozen copy is kept; rename it")
    setattr(model, REFERENCE, reference)


def reference_of(model: nnx.Module) -> Any:
    """Return the reference of `model`, as in evaluation: its frozen copy, or itself without its adapters."""
    reference: Any = getattr(model, REFERENCE, None)
    if reference is None:
        graph, arrays = nnx.split(model)
        reference = nnx.merge(graph, arrays)  # another object of the same arrays: the model's own adapters stay on
        for _, module in nnx.iter_modules(reference):
            if isinstance(module, FrozenKernel):
                module.is_adapted = False
    reference.eval()
    return reference
