import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils

from jaxlaunch.contract import MESH_AXES
from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.parallel import mesh


@dataclasses.dataclass(frozen=True)
class Chip:
    """As much of a device as a mesh looks at."""

    id: int
    process_index: int
    slice_index: int = 0
    platform: str = "cpu"


def ids(grid: jax.sharding.Mesh) -> list:
    return np.vectorize(lambda chip: chip.id)(grid.devices).tolist()


def test_mesh_axes_are_automatic() -> None:
    grid = mesh.build_mesh(spec.Mesh(fsdp=-1, ep=2, mp=2))
    assert dict(grid.shape) == {"dp": 1, "fsdp": 2, "ep": 2, "mp": 2}
    assert set(grid.axis_types) == {jax.sharding.AxisType.Auto}


def test_devices_of_process_are_adjacent() -> None:
    chips = [Chip(id=number, process_index=number % 2) for number in range(8)]
    grid = mesh.build_mesh(spec.Mesh(dp=4, mp=2), chips)
    assert ids(grid) == [[[[0, 2]]], [[[4, 6]]], [[[1, 3]]], [[[5, 7]]]]


def test_dcn_axes_are_outermost() -> None:
    chips = [Chip(number, number // 2, number // 4) for number in range(8)]
    grid = mesh.build_mesh(spec.Mesh(dp=2, fsdp=4, dcn={"fsdp": 2}), chips)
    assert ids(grid) == [[[[0]], [[1]], [[4]], [[5]]], [[[2]], [[3]], [[6]], [[7]]]]


def test_two_slices_are_laid_out_like_one() -> None:
    chips = [Chip(id=number, process_index=0) for number in range(8)]
    axes = {"dp": 2, "ep": 2, "mp": 2}
    slices = mesh.build_mesh(spec.Mesh(**axes, dcn={"dp": 2}), chips)
    assert ids(slices) == ids(mesh.build_mesh(spec.Mesh(**axes), chips))


def test_mesh_of_wrong_size_is_refused() -> None:
    with pytest.raises(SpecError, match="dp 3 × fsdp 1 × mp 1 asks for 3 devices, there are 8"):
        mesh.build_mesh(spec.Mesh(dp=3))
    with pytest.raises(SpecError, match="fsdp = 3 does not divide fsdp = 8"):
        mesh.build_mesh(spec.Mesh(fsdp=8, dcn={"fsdp": 3}))


def test_single_process_reads_all_rows() -> None:
    assert mesh.process_rows(mesh.build_mesh(spec.Mesh(dp=2, mp=4)), 6) == range(6)
    with pytest.raises(SpecError, match="batch = 6 cannot be split evenly over dp × fsdp = 8"):
        mesh.process_rows(mesh.build_mesh(spec.Mesh(fsdp=8)), 6)
    with pytest.raises(SpecError, match="batch = 6 cannot be split evenly over dp × fsdp × ep = 4"):
        mesh.process_rows(mesh.build_mesh(spec.Mesh(fsdp=2, ep=2, mp=2)), 6)


# --- a TPU's torus, of devices that are not here --------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tpu:
    """As much of a TPU device as JAX's own assignment looks at."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    slice_index: int = 0
    device_kind: str = "TPU v4"
    platform: str = "tpu"
    core_on_chip: int = 0


def pod(sides: tuple[int, int, int], slices: int = 1, kind: str = "TPU v4") -> list[Any]:
    """Return the devices of slices; a host has 2 × 2 chips with consecutive ids."""
    chips: list[Any] = []
    hosts = math.prod(sides) // 4
    places = list(itertools.product(*map(range, (sides[2], sides[1] // 2, sides[0] // 2))))
    for number in range(slices):
        for host, (z, y, x) in enumerate(places):
            for dy, dx in itertools.product(range(2), range(2)):
                place = (2 * x + dx, 2 * y + dy, z)
                chips.append(Tpu(len(chips), number * hosts + host, place, number, kind))
    return chips


def hops(grid: jax.sharding.Mesh, axis: int, sides: tuple[int, int, int]) -> int:
    """Return the most links between neighbours along an axis of the mesh, which is a ring."""
    worst = 0
    for first, other in zip(grid.devices.flat, np.roll(grid.devices, -1, axis).flat, strict=True):
        if first.slice_index == other.slice_index:
            steps = zip(first.coords, other.coords, sides, strict=True)
            links = (min(abs(a - b), side - abs(a - b)) for a, b, side in steps)
            worst = max(worst, sum(links))
    return worst


CUBE = (4, 4, 4)


@pytest.mark.parametrize(
    "axes", [{"dp": 16, "mp": 4}, {"dp": 4, "ep": 4, "mp": 4}, {"fsdp": 4, "mp": 16}]
)
def test_innermost_axis_follows_torus_links(axes: dict[str, int]) -> None:
    grid = mesh.build_mesh(spec.Mesh(**axes), pod(CUBE))
    sizes = [axes.get(axis, 1) for axis in MESH_AXES]
    assert np.array_equal(grid.devices, mesh_utils.create_device_mesh(sizes, pod(CUBE)))
    if axes["mp"] == 4:
        by_process = np.array(pod(CUBE)).reshape(sizes)
        previous = jax.sharding.Mesh(by_process, MESH_AXES)
        assert hops(grid, 3, CUBE) == 1 < hops(previous, 3, CUBE)


def test_torus_side_is_split_if_needed() -> None:
    flat, notes = (4, 4, 1), []
    chips = pod(flat, kind="TPU v5 lite")
    grid = mesh.build_mesh(spec.Mesh(dp=2, fsdp=4, mp=2), chips, notes.append)
    expected = mesh_utils.create_device_mesh((2, 4, 1, 2), chips, allow_split_physical_axes=True)
    assert np.array_equal(grid.devices, expected) and notes == []
    assert hops(grid, 3, flat) == 1


@pytest.mark.parametrize(
    ("axes", "dcn"), [({"dp": 8, "mp": 4}, {}), ({"dp": 2, "fsdp": 16}, {"fsdp": 2})]
)
def test_slices_make_hybrid_mesh(axes: dict[str, int], dcn: dict[str, int]) -> None:
    sides = (4, 4, 1)
    chips = pod(sides, slices=2, kind="TPU v5 lite")
    grid = mesh.build_mesh(spec.Mesh(**axes, dcn=dcn), chips[::-1])
    across = [2 if axis in (dcn or {"dp": 2}) else 1 for axis in MESH_AXES]
    inside = [axes.get(axis, 1) // count for axis, count in zip(MESH_AXES, across, strict=True)]
    expected = mesh_utils.create_hybrid_device_mesh(
        inside, across, chips[::-1], allow_split_physical_axes=bool(dcn)
    )
    assert np.array_equal(grid.devices, expected)
    spanning = across.index(2)
    halves = np.split(grid.devices, 2, axis=spanning)
    assert [{chip.slice_index for chip in half.flat} for half in halves] == [{0}, {1}]


@pytest.mark.parametrize(
    ("slices", "axes", "dcn"),
    [
        (2, {"fsdp": 32}, {"fsdp": 2}),
        (2, {"fsdp": 8, "mp": 4}, {"fsdp": 2}),
        (2, {"ep": 8, "mp": 4}, {"ep": 2}),
        (2, {"mp": 32}, {"mp": 2}),
        (4, {"dp": 2, "fsdp": 32}, {"dp": 2, "fsdp": 2}),
        (3, {"dp": 2, "fsdp": 24}, {"fsdp": 3}),
        (2, {"dp": 4, "fsdp": 8}, {"dp": 2}),
    ],
)
def test_axes_are_divided_over_slices_with_note(
    slices: int, axes: dict[str, int], dcn: dict[str, int]
) -> None:
    notes: list[str] = []
    chips = pod((4, 4, 1), slices, kind="TPU v5 lite")
    grid = mesh.build_mesh(spec.Mesh(**axes), chips[::-1], notes.append)
    same = mesh.build_mesh(spec.Mesh(**axes, dcn=dcn), chips[::-1])
    assert np.array_equal(grid.devices, same.devices)
    parts = ", ".join(f"{axis}: {count}" for axis, count in dcn.items())
    (note,) = notes
    assert f"divided over the {slices} slices as dcn: {{{parts}}} says" in note


def test_innermost_axis_follows_torus_in_each_slice() -> None:
    notes: list[str] = []
    chips = pod(CUBE, 2)
    grid = mesh.build_mesh(spec.Mesh(dp=2, fsdp=16, mp=4), chips, notes.append)
    assert {chip.slice_index for chip in grid.devices[0].flat} == {0} and "{dp: 2}" in notes[0]
    assert hops(grid, 3, CUBE) == 1


def test_processes_are_granules_without_slices() -> None:
    chips = [
        dataclasses.replace(chip, process_index=chip.slice_index, slice_index=0)
        for chip in pod((2, 2, 1), 2)
    ]
    grid = mesh.build_mesh(spec.Mesh(fsdp=8, dcn={"fsdp": 2}), chips)
    shape = (1, 4, 1, 1), (1, 2, 1, 1)
    expected = mesh_utils.create_hybrid_device_mesh(*shape, chips, process_is_granule=True)
    assert np.array_equal(grid.devices, expected)


def test_devices_without_torus_are_ordered_with_note() -> None:
    notes: list[str] = []
    chips = pod(CUBE)[1:49]
    grid = mesh.build_mesh(spec.Mesh(dp=12, mp=4), chips[::-1], notes.append)
    assert [chip.id for chip in grid.devices.flat] == list(range(1, 49))
    assert len(notes) == 1 and notes[0].startswith("train.mesh does not follow the TPU's torus")


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_other_devices_are_ordered_like_hybrid_mesh(platform: str) -> None:
    kind = "NVIDIA H100 80GB HBM3"
    chips: list[Any] = [Tpu(n, n // 4, (0, 0, 0), n // 8, kind, platform) for n in range(16)]
    shapes = {2: ((2, 4, 1, 1), (2, 1, 1, 1)), 4: ((1, 4, 1, 1), (4, 1, 1, 1))}
    for count, shape in shapes.items():
        grid = mesh.build_mesh(spec.Mesh(dp=4, fsdp=4, dcn={"dp": count}), chips[::-1])
        expected = mesh_utils.create_hybrid_device_mesh(
            *shape, chips, process_is_granule=count == 4
        )
        assert np.array_equal(grid.devices, expected)


@pytest.mark.parametrize(
    ("sides", "axes", "dcn"),
    [
        (CUBE, {"dp": 64}, {}),
        (CUBE, {"dp": 16, "mp": 4}, {}),
        (CUBE, {"dp": 4, "ep": 4, "mp": 4}, {}),
        ((4, 4, 1), {"fsdp": 16}, {}),
        ((4, 4, 1), {"dp": 2, "fsdp": 4, "mp": 2}, {}),
        ((4, 8, 1), {"fsdp": 64}, {"fsdp": 2}),
        ((4, 8, 1), {"dp": 4, "fsdp": 16}, {}),
    ],
)
def test_every_row_is_read_by_its_holders(
    sides: tuple[int, int, int], axes: dict[str, int], dcn: dict[str, int]
) -> None:
    slices = math.prod(axes.values()) // math.prod(sides)
    kind = "TPU v5 lite" if sides[2] == 1 else "TPU v4"
    grid = mesh.build_mesh(spec.Mesh(**axes, dcn=dcn), pod(sides, slices, kind))
    shards = mesh.count_shards(grid)
    stored: dict[int, set[int]] = {}
    for part, chips in enumerate(grid.devices.reshape(shards, -1)):
        for chip in chips:
            stored.setdefault(chip.process_index, set()).add(part)
    read = {process: mesh.process_rows(grid, 2 * shards, process) for process in stored}
    for process, parts in stored.items():
        assert len(read[process]) == 2 * len(parts)
    assert set().union(*read.values()) == set(range(2 * shards))
    # Processes read the same rows where they hold the same parts, else none in common.
    for first, other in itertools.combinations(stored, 2):
        assert (read[first] == read[other]) is (stored[first] == stored[other])
        assert read[first] == read[other] or not set(read[first]) & set(read[other])


def test_overlapping_batch_parts_are_refused() -> None:
    processes = 0, 1, 0, 1, 0, 1, 1, 1
    chips = np.array([Chip(number, process) for number, process in enumerate(processes)])
    grid = jax.sharding.Mesh(chips.reshape(1, 4, 1, 2), MESH_AXES)
    assert mesh.process_rows(grid, 8, 0) == range(6) and mesh.process_rows(grid, 8, 1) == range(8)
    order = [0, 1, 6, 7, 2, 3, 4, 5]
    gap = jax.sharding.Mesh(chips[order].reshape(1, 4, 1, 2), MESH_AXES)
    words = "process 0 holds the parts 0, 2, 3 of the batch, which overlap with others'"
    with pytest.raises(SpecError, match=words):
        mesh.process_rows(gap, 8, 0)
