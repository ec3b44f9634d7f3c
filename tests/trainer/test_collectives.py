"""The collectives of a compiled step are the ones intended, so that a lost sharding shows."""

from collections import Counter
from typing import Any

import pytest

from tests.trainer import collectives
from tests.trainer.collectives import Collective
from tests.trainer.tiny import GPT2, Counting, Pictures, compiled

TASKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "decoder": (Counting(), {}),
    "gpt2": (Counting(), {"model": GPT2}),
    "vit": (Pictures(), {}),
}
BATCH, LENGTH, WIDTH, LAYERS = 16, 16, 32, 2
MESHES: dict[str, dict[str, int]] = {
    "dp8": {"dp": 8},
    "fsdp8": {"fsdp": 8},
    "dp4-mp2": {"dp": 4, "mp": 2},
    "dp2-fsdp2-mp2": {"dp": 2, "fsdp": 2, "mp": 2},
}


def found(name: str, mesh: dict[str, int]) -> tuple[list[Collective], Any]:
    task, options = TASKS[name]
    step = compiled(task, mesh=mesh, **options)
    return collectives.of(step), step


def streams(all_of: list[Collective], mesh: dict[str, int], *, backward: bool) -> Counter[str]:
    """How often a layer sends this device's share of the residual stream, by kind."""
    rows = BATCH // (mesh.get("dp", 1) * mesh.get("fsdp", 1))
    share, flat = (rows, LENGTH, WIDTH), (rows * LENGTH, WIDTH)  # a product has one axis of both; weights may look so
    sent = [c for c in all_of if c.shape == share or (c.shape == flat and c.is_of_neighbours)]
    return Counter(c.kind for c in sent if c.in_layer and c.is_backward == backward)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_a_layer_gathers_and_sums_the_stream_twice_each_way_and_only_under_mp(name: str, mesh: dict[str, int]) -> None:
    all_of, _ = found(name, mesh)
    # Where a device can, the sum and the cut that follows it become one reduce-scatter; XLA's CPU cannot.
    wanted = {"all-gather": 2, "all-reduce": 2} if "mp" in mesh else {}
    assert streams(all_of, mesh, backward=False) == wanted
    if "mp" in mesh:  # one for each product that read the stream: a decoder's query, key and value, gate and up
        wanted["all-reduce"] = 5 if name == "decoder" else 2
    assert streams(all_of, mesh, backward=True) == wanted


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_nothing_gathers_a_whole_parameter_or_the_activations_of_the_whole_batch(
    name: str, mesh: dict[str, int]
) -> None:
    all_of, step = found(name, mesh)
    gathered = [c for c in all_of if c.kind in ("all-gather", "all-to-all")]
    assert not [c for c in gathered if c.shape[:1] == (BATCH,) and len(c.shape) > 2]
    stacks = {param.shape for key, param in step.abstract.params.items() if key.startswith("blocks.")}
    assert not [c for c in gathered if c.shape in stacks]
    if "fsdp" not in mesh:
        params = step.abstract.params.items()  # positions' gradient is the sum over a split sequence: small, and meant
        parameters = {param.shape[key.startswith("blocks.") :] for key, param in params if key != "positions"}
        assert not [c for c in gathered if c.shape in parameters and len(c.shape) > 1]
    else:  # a layer's own weights, each once a pass
        assert not [c for c in gathered if c.in_layer and c.shape[:1] == (LAYERS,) and len(c.shape) > 3]


@pytest.mark.parametrize("name", TASKS)
def test_gradients_are_all_that_data_parallel_devices_exchange(name: str) -> None:
    all_of, step = found(name, {"dp": 8})
    assert {c.kind for c in all_of} == {"all-reduce"}
    exchanged = sum(_size(c.shape) * (LAYERS if c.in_layer else 1) for c in all_of)
    parameters = sum(_size(param.shape) for param in step.abstract.params.values())
    assert parameters <= exchanged <= 1.05 * parameters


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size
