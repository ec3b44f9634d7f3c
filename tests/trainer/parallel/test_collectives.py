"""The collectives of a compiled step are the ones intended, so that a lost sharding shows."""

import functools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxlaunch.trainer import spec
from tests.trainer.parallel import collectives
from tests.trainer.parallel.collectives import Collective
from tests.trainer.tiny import DECODER, EXPERTS, GPT2, VIT, Counting, Pictures, compiled_step

pytestmark = pytest.mark.usefixtures("named")


class Portraits(Pictures):
    """Images of 9 patches, which a class token makes 10."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        batch = super().batch(step)
        return batch | {"image": batch["image"][:, :6, :6]}


BATCH, WIDTH, LAYERS = 16, 32, 2
TOKENS = (BATCH, 16)
VOCAB = {"vocab": 40}  # no share of it looks like rows of the batch
TASKS: dict[str, tuple[Any, Any, int]] = {  # what trains, and an example's places
    "decoder": (Counting(), DECODER.model_copy(update=VOCAB), 16),
    "gpt2": (Counting(), GPT2.model_copy(update=VOCAB), 16),
    "vit-cls": (
        Portraits(),
        VIT.model_copy(update={"image": [6, 6], "patch": 2, "pool": "cls"}),
        10,
    ),
}
MESHES: dict[str, dict[str, int]] = {
    "dp8": {"dp": 8},
    "fsdp8": {"fsdp": 8},
    "dp4-mp2": {"dp": 4, "mp": 2},
    "dp2-fsdp2-mp2": {"dp": 2, "fsdp": 2, "mp": 2},
}


@functools.cache
def step_collectives(
    name: str, mesh: str, *, scan: bool = True, chunks: Any = "auto"
) -> tuple[list[Collective], dict[str, Any]]:
    """Return the collectives of a step, and the parameters that it trains."""
    task, model, _ = TASKS[name]
    model, loss = model.model_copy(update={"scan": scan}), spec.Loss(chunks=chunks)
    step = compiled_step(task, mesh=MESHES[mesh], model=model, loss=loss)
    return list(collectives.count_collectives(step)), step.abstract.params


def streams(name: str, mesh: str, counts: list[Collective]) -> Counter[str]:
    """How often this device's share of the residual stream is sent, by kind."""
    rows = BATCH // math.prod(MESHES[mesh].get(axis, 1) for axis in ("dp", "fsdp"))
    length = TASKS[name][2]
    share, flat = (
        (rows, length, WIDTH),
        (rows * length, WIDTH),
    )  # a product has one axis of both; weights may look so
    return Counter(
        c.kind for c in counts if c.shape == share or (c.shape == flat and c.is_of_neighbours)
    )


def weights(name: str, mesh: str, counts: list[Collective]) -> Counter[tuple[int, ...]]:
    """Return the shapes of the gathered arrays that are not shares of the stream."""
    gathers = [c for c in counts if c.kind == "all-gather"]
    return Counter(
        c.shape for c in gathers if not streams(name, mesh, [c._replace(is_of_neighbours=False)])
    )


def one_layers(params: dict[str, Any], mesh: str, *, backward: bool) -> Counter[tuple[int, ...]]:
    """The shapes of the weights of a layer that a pass reads and fsdp splits, as mp leaves them."""
    read = {
        name: param for name, param in params.items() if not (backward and name.endswith("bias"))
    }
    return Counter(shape for shape, axes in _layers_of(read, MESHES[mesh]) if "fsdp" in axes)


def _layers_of(
    params: dict[str, Any], mesh: dict[str, int]
) -> Iterator[tuple[tuple[int, ...], set[str]]]:
    for name, param in params.items():
        if name.startswith("blocks."):
            by_place = [
                set(np.atleast_1d(entry or ()).tolist()) for entry in param.sharding.spec[1:]
            ]
            sizes = zip(param.shape[1:], by_place, strict=True)
            yield (
                tuple(size // (mesh.get("mp", 1) if "mp" in on else 1) for size, on in sizes),
                set().union(*by_place),
            )


def passing(counts: list[Collective], *, backward: bool) -> list[Collective]:
    return [c for c in counts if c.is_backward == backward]


def in_layers(counts: list[Collective]) -> list[Collective]:
    return [c for c in counts if c.in_layer]


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("mesh", MESHES)
def test_layer_gathers_stream_twice_each_way_under_mp(name: str, mesh: str) -> None:
    counts = in_layers(step_collectives(name, mesh)[0])
    # Where a device can, the sum and the cut that follows it become one reduce-scatter; XLA's CPU
    # cannot.
    expected = {"all-gather": 2, "all-reduce": 2} if "mp" in MESHES[mesh] else {}
    assert streams(name, mesh, passing(counts, backward=False)) == expected
    if (
        "mp" in MESHES[mesh]
    ):  # one for each product that read the stream: a decoder's query, key and value, gate and up
        expected["all-reduce"] = 5 if name == "decoder" else 2
    assert streams(name, mesh, passing(counts, backward=True)) == expected


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_layer_gathers_weights_once_per_pass_under_fsdp(
    name: str, mesh: str, backward: bool
) -> None:
    counts, params = step_collectives(name, mesh)
    # Let go after the forward pass, or all layers' would be held at once, and so gathered again. A
    # bias is only added: the backward pass does not read it.
    gathered = weights(name, mesh, passing(in_layers(counts), backward=backward))
    assert gathered == one_layers(params, mesh, backward=backward)
    assert bool(gathered) == ("fsdp" in MESHES[mesh])


@pytest.mark.parametrize(
    ("name", "chunks"), [*((name, "auto") for name in TASKS), ("decoder", 4), ("gpt2", 4)]
)
def test_outer_matrix_is_gathered_once_per_step(name: str, chunks: Any) -> None:
    counts, params = step_collectives(name, "fsdp8", chunks=chunks)
    outside = weights(
        name,
        "fsdp8",
        [c for c in counts if not c.in_layer and len(c.shape) > 1 and min(c.shape) > 1],
    )
    matrices = [
        p.shape for key, p in params.items() if not key.startswith("blocks.") and len(p.shape) > 1
    ]
    if name == "decoder":  # whose table has more rows than a device has tokens
        del outside[TOKENS]
        matrices.remove(params["embedding"].shape)
    # The backward pass keeps what was gathered, as it begins there; a tied head is the table that
    # was looked up in.
    expected = [
        (math.prod(shape[:-1]), shape[-1]) for shape in matrices
    ]  # as the product with patches reads them
    assert sorted(map(sorted, outside.elements())) == sorted(map(sorted, expected))
    once = sum(
        (one_layers(params, "fsdp8", backward=backward) for backward in (False, True)), Counter()
    )
    assert (
        weights(name, "fsdp8", in_layers(counts)) == once
    )  # nor does the loop over a loss's chunks gather anything


@pytest.mark.parametrize(("name", "mesh"), [("decoder", "dp2-fsdp2-mp2"), ("vit-cls", "fsdp8")])
def test_unrolled_layers_communicate_like_scan(name: str, mesh: str) -> None:
    (written, _), (scanned, _) = (
        step_collectives(name, mesh, scan=False),
        step_collectives(name, mesh),
    )
    scanned = scanned + in_layers(scanned) * (LAYERS - 1)
    assert not in_layers(written)
    for backward in (False, True):
        ours, theirs = (passing(counts, backward=backward) for counts in (written, scanned))
        assert streams(name, mesh, ours) == streams(name, mesh, theirs)
        if backward:  # the compiler sees that a weight was gathered before, and may keep it instead
            assert weights(name, mesh, ours) <= weights(name, mesh, theirs)
        else:
            assert weights(name, mesh, ours) == weights(name, mesh, theirs)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("mesh", MESHES)
def test_no_full_parameter_or_batch_is_gathered(name: str, mesh: str) -> None:
    counts, params = step_collectives(name, mesh)
    gathered = {c.shape for c in counts if c.kind in ("all-gather", "all-to-all")}
    assert not gathered & {
        param.shape for key, param in params.items() if key.startswith("blocks.")
    }
    parameters = {param.shape[key.startswith("blocks.") :] for key, param in params.items()}
    parameters |= {
        (math.prod(shape[:-1]), shape[-1]) for shape in parameters
    }  # as the product with patches reads them
    whole = {
        shape
        for shape in gathered
        if shape[:1] in ((BATCH,), (BATCH * TASKS[name][2],)) and len(shape) > 1
    }
    assert whole <= parameters | ({TOKENS, (*TOKENS, 1)} if name in ("decoder", "gpt2") else set())
    if "fsdp" not in MESHES[mesh]:
        assert not {shape for shape in gathered & parameters if len(shape) > 1}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("mesh", MESHES)
def test_activations_keep_their_split_axis(name: str, mesh: str) -> None:
    """Rows of a table with more of them than a device has tokens, and their gradient, are apart."""
    each_way = [
        [c for c in passing(step_collectives(name, mesh)[0], backward=b) if c.kind == "all-to-all"]
        for b in (False, True)
    ]
    expected = {"decoder": [True, True], "gpt2": [False, True]} if mesh == "fsdp8" else {}
    assert [bool(exchanges) for exchanges in each_way] == expected.get(name, [False, False])
    assert not in_layers(sum(each_way, []))


@pytest.mark.parametrize("axes", [{"dp": 2, "ep": 4}, {"dp": 8}], ids=str)
def test_experts_exchange_tokens_twice_each_way_under_ep(
    axes: dict[str, int],
) -> None:
    model = EXPERTS.model_copy(update={"layers": 2, "dense_layers": [], **VOCAB})
    step = compiled_step(Counting(), mesh=axes, model=model)
    sizes = in_layers(list(collectives.count_collectives(step)))
    kinds = [
        Counter(c.kind for c in passing(sizes, backward=backward)) for backward in (False, True)
    ]
    # Which experts the rows that come are of: a few integers, which have no gradient.
    counts = [c.shape for c in passing(sizes, backward=False) if c.kind == "all-gather"]
    assert counts == ([(4, 4, 1)] if "ep" in axes else [])
    del kinds[0]["all-gather"], kinds[1]["all-reduce"]  # the gradients
    # On a CPU what goes to each device is an array of its own.
    assert kinds == [Counter({"all-to-all": 2 * 4} if "ep" in axes else {})] * 2


@pytest.mark.parametrize("name", TASKS)
def test_data_parallel_devices_exchange_only_gradients(name: str) -> None:
    counts, params = step_collectives(name, "dp8")
    assert {c.kind for c in counts} == {"all-reduce"}
    exchanged = sum(math.prod(c.shape) * (LAYERS if c.in_layer else 1) for c in counts)
    parameters = sum(math.prod(param.shape) for param in params.values())
    assert parameters <= exchanged <= 1.05 * parameters
