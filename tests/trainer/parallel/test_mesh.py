import dataclasses

import jax
import numpy as np
import pytest

from trainer import mesh, spec
from trainer.errors import SpecError


@dataclasses.dataclass(frozen=True)
class Chip:
    """As much of a device as a mesh looks at."""

    id: int
    process_index: int
    slice_index: int = 0


def ids(grid: jax.sharding.Mesh) -> list:
    return np.vectorize(lambda chip: chip.id)(grid.devices).tolist()


def test_axes_are_dp_fsdp_mp_and_leave_placement_to_the_compiler() -> None:
    grid = mesh.build(spec.Mesh(dp=2, fsdp=-1, mp=2))
    assert dict(grid.shape) == {"dp": 2, "fsdp": 2, "mp": 2}
    assert set(grid.axis_types) == {jax.sharding.AxisType.Auto}


def test_a_processs_devices_lie_together_whatever_their_ids() -> None:
    chips = [Chip(id=number, process_index=number % 2) for number in range(8)]
    assert ids(mesh.build(spec.Mesh(dp=4, mp=2), chips)) == [[[0, 2]], [[4, 6]], [[1, 3]], [[5, 7]]]


def test_dcn_axes_are_outermost() -> None:
    chips = [Chip(id=number, process_index=number // 2, slice_index=number // 4) for number in range(8)]
    grid = mesh.build(spec.Mesh(dp=2, fsdp=4, dcn={"fsdp": 2}), chips)
    assert ids(grid) == [[[0], [1], [4], [5]], [[2], [3], [6], [7]]]


def test_two_slices_that_split_the_outermost_axis_lie_as_one_slice_does() -> None:
    chips = [Chip(id=number, process_index=0) for number in range(8)]
    axes = {"dp": 2, "fsdp": 2, "mp": 2}
    assert ids(mesh.build(spec.Mesh(**axes, dcn={"dp": 2}), chips)) == ids(mesh.build(spec.Mesh(**axes), chips))


def test_a_mesh_that_is_not_made_of_the_devices_is_an_error() -> None:
    with pytest.raises(SpecError, match="dp 3 × fsdp 1 × mp 1 does not make 8 devices"):
        mesh.build(spec.Mesh(dp=3))
    with pytest.raises(SpecError, match="fsdp = 3 does not divide fsdp = 8"):
        mesh.build(spec.Mesh(fsdp=8, dcn={"fsdp": 3}))


def test_rows_of_one_process_are_all_rows() -> None:
    assert mesh.rows(mesh.build(spec.Mesh(dp=2, mp=4)), 6) == range(6)
    with pytest.raises(SpecError, match="batch = 6 does not divide over dp × fsdp = 8"):
        mesh.rows(mesh.build(spec.Mesh(fsdp=8)), 6)
