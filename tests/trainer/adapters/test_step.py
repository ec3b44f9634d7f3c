"""Adapters on meshes, in other precisions, over a base in bf16 or int8, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlaunch.trainer import plan, spec
from jaxlaunch.trainer.adapters import peft
from jaxlaunch.trainer.adapters.lora import frozen_product, quantize_kernel
from jaxlaunch.trainer.numerics import flops, memory
from jaxlaunch.trainer.optim.transforms import muon_axes
from jaxlaunch.trainer.plan import Plan
from jaxlaunch.trainer.tasks.lm import NextToken
from tests.trainer import references, tiny
from tests.trainer.adapters import folders

CASE = "lora_qwen2_tiny"


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.mark.parametrize(
    ("mesh", "keys"),
    [
        ({"dp": 8}, {}),
        ({"dp": 2, "fsdp": 2, "mp": 2}, {"remat": "full", "accumulate": 2}),
        ({"fsdp": 4, "mp": 2}, {"model": {"scan": False}, "remat": "dots"}),
    ],
)
def test_every_mesh_gives_the_curve_of_peft(
    mesh: dict[str, int], keys: dict[str, Any], at: Path
) -> None:
    said, state = folders.run(folders.step(CASE, at, 8, mesh=mesh, **keys), CASE)
    np.testing.assert_allclose(
        said["loss"], references.tensors(CASE, "curve")["loss"], rtol=0, atol=2e-5
    )
    if "fsdp" in mesh:
        for name in ("blocks.attention.query.lora_a", "blocks.mlp.down.lora_b", "blocks.mlp.up"):
            leaf = state.params[name]
            assert leaf.addressable_shards[0].data.size < leaf.size, name


def test_dropout_draws_equally_on_every_mesh_and_not_in_evaluation(at: Path) -> None:
    found = []
    for devices, mesh in ((1, {}), (4, {"fsdp": 2, "mp": 2})):
        step = folders.step(CASE, at, devices, {"dropout": 0.3}, mesh=mesh)
        said, state = folders.run(step, CASE, 3)
        rows = step.put_batch(folders.batches(CASE)[0])
        step.compile_eval(rows)
        total, weight = step.evaluate(step.init_state(), rows)[0]["loss"]
        found.append([*said["loss"], float(total / weight)])
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-5)
    whole = references.tensors(CASE, "curve")["loss"]
    assert abs(found[0][0] - whole[0]) > 1e-4
    np.testing.assert_allclose(found[0][3], whole[0], rtol=0, atol=2e-5)


def test_an_int8_base_takes_a_quarter_and_trains_as_well(at: Path) -> None:
    plain, small = (
        folders.step(CASE, at, 2, lora, mesh={"fsdp": 2}) for lora in (None, {"base": "int8"})
    )
    said, state = folders.run(small, CASE)
    curve = references.tensors(CASE, "curve")["loss"]
    assert np.abs(said["loss"] - curve).max() < 0.05 and said["loss"][-1] < said["loss"][0]
    kernels = {name for name, leaf in state.params.items() if leaf.dtype == jnp.int8}
    assert (
        kernels == {name for name in state.params if f"{name}.int8_scale" in state.params}
        and len(kernels) == 7
    )
    bytes_of = {name: leaf.nbytes for name, leaf in state.params.items()}
    for name, leaf in plain.abstract.params.items():
        wide = 4 if name.endswith(("lora_a", "lora_b")) else 1 if name in kernels else 2
        assert bytes_of[name] == wide * leaf.size, name
    outputs = {"query": 64, "key": 32, "value": 32, "out": 64, "gate": 160, "up": 160, "down": 64}
    assert sum(of for name, of in bytes_of.items() if name.endswith("int8_scale")) == 2 * 4 * sum(
        outputs.values()
    )
    planned = memory.bytes_per_device(small.abstract.params)
    first = jax.devices()[0]
    shards = [
        shard
        for leaf in state.params.values()
        for shard in leaf.addressable_shards
        if shard.device == first
    ]
    assert planned == sum(shard.data.nbytes for shard in shards)
    rows = small.put_batch(folders.batches(CASE)[0])
    scales = (
        2 * 4 * sum(outputs.values())
    )  # which its backward pass reads; no kernel is kept as the product reads it
    assert small.residual_bytes(rows) <= plain.residual_bytes(rows) + scales


def test_a_base_in_bfloat16_is_cast_by_no_copy(at: Path) -> None:
    step = folders.step(CASE, at, lora={"base": "bf16"}, precision="bf16", remat="dots")
    said, state = folders.run(step, CASE)
    for name, leaf in state.params.items():
        assert leaf.dtype == (
            jnp.float32 if name.endswith(("lora_a", "lora_b")) else jnp.bfloat16
        ), name
    assert np.abs(said["loss"] - references.tensors(CASE, "curve")["loss"]).max() < 0.1
    same = folders.step(CASE, at, precision="bf16", remat="dots")
    rows = step.put_batch(folders.batches(CASE)[0])
    assert step.residual_bytes(rows) <= same.residual_bytes(rows)


def test_a_quantized_product_is_that_of_the_rounded_kernel() -> None:
    draw = np.random.default_rng(0)
    kernel = jnp.asarray(
        draw.normal(size=(2, 3, 4, 5)), jnp.float32
    )  # layers, two axes of inputs, one of outputs
    x = jnp.asarray(draw.normal(size=(2, 6, 3, 4)), jnp.float32)
    whole, scale = quantize_kernel(kernel, 2)
    assert whole.dtype == jnp.int8 and scale.shape == (2, 5)
    rounded = whole.astype(jnp.float32) * scale[:, None, None]
    assert (jnp.abs(rounded - kernel) <= scale[:, None, None] * 0.5001).all()
    ours, back = jax.vjp(lambda x: frozen_product(x, whole[1], scale[1], 2), x)
    plain, their_back = jax.vjp(lambda x: jnp.tensordot(x, rounded[1], 2), x)
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(back(ours)[0], their_back(ours)[0], rtol=1e-5, atol=1e-4)


def test_a_quantized_product_in_float16_holds_what_its_result_does() -> None:
    """A column's integers are up to 127: their sum with x passes 65504, the largest float16, before it is scaled."""
    whole, scale = quantize_kernel(jnp.full((1, 64, 2), 0.01, jnp.float32), 1)
    made = frozen_product(jnp.full((1, 1, 64), 100.0, jnp.float16), whole[0], scale[0], 1)
    assert made.dtype == jnp.float16
    np.testing.assert_allclose(made, 64.0, rtol=1e-3)


def test_adapters_start_at_nothing_and_groups_are_theirs() -> None:
    """LoRA+: B at another rate. Hayou et al. 2024."""
    asked = {
        "lora": {"rank": 2, "targets": ["all-linear"]},
        "optimizer": {"groups": [{"match": ".*lora_b", "lr": 16}]},
    }
    plain = tiny.build(tiny.Counting())
    step = tiny.compiled(tiny.Counting(), model=tiny.WIDE, **asked)
    assert "train.optimizer.groups.0 (.*lora_b): 7 arrays" in step.notes[0]
    state = step.init_state()
    assert all(not leaf.any() for name, leaf in state.params.items() if name.endswith("lora_b"))
    losses = []
    for number in range(8):
        state, metrics = step.train(state, step.put_batch(tiny.Counting().batch(number)))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert plain.trained_arrays is None and step.trained_arrays == 14


def test_gpt2_s_adapters_have_its_names() -> None:
    asked = {"lora": {"rank": 2, "targets": ["c_attn", "mlp.c_proj"]}}
    losses, state = tiny.run(tiny.Counting(), 8, model=tiny.GPT2, mesh={"mp": 2}, **asked)
    trained = {name for name in state.params if "lora" in name}
    assert trained == {
        f"blocks.{of}.lora_{each}" for of in ("attention.qkv", "mlp.down") for each in "ab"
    }
    assert losses[-1] < losses[0]


def test_a_model_with_experts_has_adapters_at_its_plain_products() -> None:
    asked = {"lora": {"rank": 2, "targets": ["q", "gate"], "dropout": 0.1}, "mesh": {"ep": 2}}
    step = tiny.compiled(tiny.Counting(), model=tiny.EXPERTS, **asked)
    state, losses = step.init_state(), []
    for number in range(8):
        state, metrics = step.train(state, step.put_batch(tiny.Counting().batch(number)))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    stems = {"blocks.attention.query", "dense_blocks.attention.query", "dense_blocks.mlp.gate"}
    assert set(step.builder.trained_params(state.params)) == {
        f"{stem}.lora_{each}" for stem in stems for each in "ab"
    }
    rows = step.put_batch(tiny.Counting().batch(0))
    whole = flops.count_flops(step.forward_jaxpr(rows))
    assert (
        2 * whole < (step.count_flops(rows) or 0) < 2.5 * whole
    )  # of routers and experts half of the backward pass, too
    stored = peft.adapter_leaves(
        peft.select_kernels(tiny.EXPERTS, spec.Lora(targets=["q", "gate"]))
    )
    names = {
        name
        for ours, leaf in stored.items()
        for name, _ in leaf.tensor_shapes(state.params[ours].shape)
    }
    modules = ["0.mlp.gate_proj", *(f"{layer}.self_attn.q_proj" for layer in range(3))]
    stem = "base_model.model.model.layers"
    assert names == {f"{stem}.{module}.lora_{each}.weight" for module in modules for each in "AB"}


@pytest.mark.parametrize(
    ("asked", "theirs"),
    [
        (["q"], ["q_proj"]),
        (["gate"], ["mlp.gate_proj"]),  # mlp.experts.0.gate_proj ends so, too, without the mlp
        (
            ["blocks.attention.query"],
            [f"model.layers.{layer}.self_attn.q_proj" for layer in (1, 2)],
        ),
        (["dense_blocks.attention.out", "k"], ["k_proj", "model.layers.0.self_attn.o_proj"]),
    ],
)
def test_peft_s_names_of_targets_find_no_other_module(asked: list[str], theirs: list[str]) -> None:
    model = tiny.EXPERTS.model_copy(update={"family": "qwen3_moe"})
    chosen = peft.select_kernels(model, spec.Lora(targets=asked))
    assert peft.module_names(model, chosen) == theirs
    again = peft.read_targets(model, theirs, "here")
    assert peft.select_kernels(model, spec.Lora(targets=again)) == chosen


def test_a_model_of_the_seed_is_drawn_as_without_adapters() -> None:
    lora = {"lora": {"rank": 2, "base": None}}
    drawn, alone = (tiny.build(tiny.Counting(), **keys).init_state().params for keys in (lora, {}))
    for name, leaf in alone.items():
        np.testing.assert_allclose(drawn[name], leaf, rtol=1e-6, err_msg=name)


def test_products_of_what_is_frozen_count_twice_in_a_plan() -> None:
    train = tiny.train_spec(tiny.Counting(), lora={"rank": 2, "targets": ["q"]}, mesh={"dp": 8})
    whole = tiny.train_spec(tiny.Counting(), mesh={"dp": 8})
    task, of = NextToken(), tiny.DECODER
    found, plain = (
        Plan(plan.with_synthetic_data(each, task), task).to_dict(sharding=False)
        for each in (train, whole)
    )
    tokens, wide = tiny.ROWS * of.length, of.width
    layer = (
        2 * wide * wide + 2 * wide * of.kv_head_count * of.head_channels + 3 * wide * of.mlp_units
    )
    pairs = 2 * of.length * of.heads * of.head_channels  # scores and what they mix, of a token
    low = 2 * wide * 2  # A and B
    forward = 2 * tokens * (of.layers * (layer + pairs + low) + wide * of.vocab)
    back = 2 * tokens * (of.layers * (layer + 2 * pairs + 2 * low) + wide * of.vocab)
    assert found["flops_per_step"] == forward + back
    assert plain["flops_per_step"] == 3 * (forward - 2 * tokens * of.layers * low)
    assert found["trained"] == 2 * of.layers * 2 * wide and plain["trained"] == plain["parameters"]
    assert found["device"]["gradients"] == 4 * found["trained"]
    assert found["device"]["optimizer"] == 8 * found["trained"] + 8
    assert found["checkpoint"] == 12 * found["trained"] + 12
    assert found["device"]["parameters"] == plain["device"]["parameters"] + 4 * found["trained"]


@pytest.mark.parametrize(
    ("axes", "cut"),
    [
        (("embed", "rank"), ((1,), (2,))),
        (("rank", "heads", "head"), ((1,), (2, 3))),
        (("heads", "head", "rank"), ((1, 2), (3,))),
    ],
)
def test_muon_takes_each_matrix_of_an_adapter_whole(axes: tuple[str, ...], cut: Any) -> None:
    leaf = jax.ShapeDtypeStruct((2,) * (1 + len(axes)), jnp.float32)
    assert (
        muon_axes("blocks.attention.query.lora", leaf, {"blocks.attention.query.lora": axes}) == cut
    )


def test_what_lora_does_not_say_is_as_documented() -> None:
    assert spec.Lora().scaling == 2.0 and spec.Lora(rslora=True).scaling == 8.0
