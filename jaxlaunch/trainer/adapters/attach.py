"""What `train.lora` makes of a model: adapters at its products, everything else frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer.adapters import peft, targets
from jaxlaunch.trainer.adapters.kernel import FrozenKernel
from jaxlaunch.trainer.numerics import memory
from jaxlaunch.trainer.spec import Lora, Published, TrainSpec

STREAM = 0x10A  # folded into the key of the initial weights: the model's own are what they are without adapters


class Adapters:
    """The adapters of a training by the names of its parameters. Raises SpecError for a target that matches nothing."""

    def __init__(self, model: Published, lora: Lora, params: jnp.dtype) -> None:
        self.model, self.lora = model, lora
        self.dtype = params if lora.base is None else jnp.dtype("bfloat16")  # of what is frozen and no int8
        self.chosen = targets.chosen(model, lora)
        self.kernels = targets.kernels(model)

    @classmethod
    def of(cls, spec: TrainSpec, params: jnp.dtype) -> Adapters | None:
        """Those that the job asks for; `params` is the dtype of parameters. None where it asks for none."""
        if spec.lora is None:
            return None
        assert isinstance(spec.model, Published), "the spec checks it"
        return cls(spec.model, spec.lora, params)

    def attach(self, model: Any, key: Array) -> None:
        """Puts adapters, drawn from `key`, into a new `model`, and its kernels into int8 where the job says so."""
        rngs, chosen = nnx.Rngs(jax.random.fold_in(key, STREAM)), {kernel.name for kernel in self.chosen}
        for kernel in self.kernels:
            path, _, last = kernel.name.rpartition(".")
            owner = model
            for part in path.split("."):
                owner = getattr(owner, part)
            lora = self.lora if kernel.name in chosen else None
            frozen = FrozenKernel(
                getattr(owner, last), len(kernel.inputs), lora, rngs, is_int8=self.lora.base == "int8"
            )
            setattr(owner, last, frozen)

    def stored(self, name: str, param: Array) -> Array:
        """A frozen parameter in the dtype that it is kept in."""
        is_float = jnp.issubdtype(param.dtype, jnp.floating) and not name.endswith(targets.SCALE)
        return param.astype(self.dtype) if is_float else param

    @property
    def cast_late(self) -> frozenset[str]:
        """Parameters that their product casts itself: a copy of all layers in the compute dtype is never made."""
        return frozenset(name for kernel in self.kernels for name in (kernel.name, kernel.name + targets.SCALE))

    def start(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        """The adapters of the peft folder that the job starts from; empty without one. Raises SpecError."""
        return peft.read(self.lora, self.chosen, wanted) if self.lora.init_from is not None else {}

    def note(self, params: Mapping[str, Any], opt: Any, saved: Any) -> str:
        """What a run says of its adapters: how much is trained, and the bytes of the optimizer and of a checkpoint."""
        trained = sum(leaf.size for name, leaf in params.items() if targets.is_adapter(name))
        whole = sum(leaf.size for name, leaf in params.items() if not name.endswith(targets.SCALE))
        where = ", ".join(targets.modules(self.model, self.chosen))
        return (
            f"train.lora: rank {self.lora.rank} at {where}; {trained:,} of {whole:,} parameters are trained "
            f"({trained / whole:.2%}), optimizer {memory.total_bytes(opt):,} bytes, "
            f"checkpoint {memory.total_bytes(saved):,} bytes"
        )
