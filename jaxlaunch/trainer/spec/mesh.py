"""The mesh block: devices per axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from jaxlaunch.contract import MESH_AXES
from jaxlaunch.trainer.spec.block import Block, Positive


class Mesh(Block):
    """Devices per axis. An axis that is left out is 1; one axis may be -1 and takes the remaining devices.

    ```yaml
    slices: 2
    accelerator: {type: v5e, topology: 4x4}
    train:
      task: lm
      mesh: {dp: 2, fsdp: -1, mp: 4, dcn: {dp: 2}}  # -1 is 32 / (2 × 4) = 4; dp spans the two slices
    ```
    """

    dp: int = Field(1, description="data parallel: the batch is split, the state is copied")
    fsdp: int = Field(1, description="the batch and the state are split")
    ep: int = Field(1, description="the batch and the experts of a mixture are split")
    mp: int = Field(1, description="model parallel: weights and activations are split")
    dcn: dict[Literal["dp", "fsdp", "ep", "mp"], Positive] = Field(
        {},
        description="the factor of an axis that spans slices; left out: the outermost axes, as far as they divide",
    )

    @model_validator(mode="after")
    def _axes(self) -> Mesh:
        sizes = [getattr(self, axis) for axis in MESH_AXES]
        if any(size == 0 or size < -1 for size in sizes):
            raise ValueError("an axis is a positive number of devices, or -1 for the remaining ones")
        if sizes.count(-1) > 1:
            raise ValueError("only one axis may be -1")
        return self

    def resolve(self, devices: int) -> tuple[int, int, int, int]:
        """Sizes of dp, fsdp, ep, mp over `devices`. Raises ValueError when they do not multiply to that."""
        sizes = [getattr(self, axis) for axis in MESH_AXES]
        known = 1
        for size in sizes:
            known *= size if size > 0 else 1
        if devices % known or (-1 not in sizes and known != devices):
            shape = said(dict(zip(MESH_AXES, sizes, strict=True)))
            asked = f"asks for a multiple of {known}" if -1 in sizes else f"asks for {known}"
            raise ValueError(f"{shape} {asked} devices, there {'is' if devices == 1 else 'are'} {devices}")
        dp, fsdp, ep, mp = (size if size > 0 else devices // known for size in sizes)
        return dp, fsdp, ep, mp


def said(sizes: Mapping[str, int]) -> str:
    """Sizes of axes for a reader: `dp 4 × fsdp 1 × mp 2`, with ep where it is not 1."""
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if axis != "ep" or size != 1)
