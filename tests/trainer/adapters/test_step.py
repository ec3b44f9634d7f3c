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
        ({"dp": 2, "fsdp": 2, "mp": 2}, {"remat": "full", "accumulate": 2}),
        ({"fsdp": 4, "mp": 2}, {"model": {"scan": False}, "remat": "dots"}),
    ],
)
def test_curve_equals_peft_on_every_mesh(
    mesh: dict[str, int], keys: dict[str, Any], at: Path
) -> None:
    output, state = folders.train(folders.step(CASE, at, 8, mesh=mesh, **keys), CASE)
    expected = references.tensors(CASE, "curve")["loss"]
    np.testing.assert_allclose(output["loss"], expected, rtol=0, atol=2e-5)
    for name in ("blocks.attention.query.lora_a", "blocks.mlp.down.lora_b", "blocks.mlp.up"):
        leaf = state.params[name]
        assert leaf.addressable_shards[0].data.size < leaf.size, name


def test_dropout_is_equal_on_every_mesh_and_off_in_evaluation(at: Path) -> None:
    actual = []
    for devices, mesh in ((1, {}), (4, {"fsdp": 2, "mp": 2})):
        step = folders.step(CASE, at, devices, {"dropout": 0.3}, mesh=mesh)
        output, state = folders.train(step, CASE, 3)
        rows = step.put_batch(folders.batches(CASE)[0])
        step.compile_eval(rows)
        total, weight = step.evaluate(step.init_state(), rows)[0]["loss"]
        actual.append([*output["loss"], float(total / weight)])
    np.testing.assert_allclose(actual[0], actual[1], rtol=0, atol=1e-5)
    whole = references.tensors(CASE, "curve")["loss"]
    assert abs(actual[0][0] - whole[0]) > 1e-4
    np.testing.assert_allclose(actual[0][3], whole[0], rtol=0, atol=2e-5)


def test_int8_base_needs_a_quarter_and_trains(at: Path) -> None:
    plain = folders.step(CASE, at, 2, None, mesh={"fsdp": 2})
    small = folders.step(CASE, at, 2, {"base": "int8"}, mesh={"fsdp": 2})
    output, state = folders.train(small, CASE)
    curve = references.tensors(CASE, "curve")["loss"]
    assert np.abs(output["loss"] - curve).max() < 0.05 and output["loss"][-1] < output["loss"][0]
    kernels = {name for name, leaf in state.params.items() if leaf.dtype == jnp.int8}
    assert kernels == {name for name in state.params if f"{name}.int8_scale" in state.params}
    assert len(kernels) == 7
    bytes_of = {name: leaf.nbytes for name, leaf in state.params.items()}
    for name, leaf in plain.abstract.params.items():
        wide = 4 if name.endswith(("lora_a", "lora_b")) else 1 if name in kernels else 2
        assert bytes_of[name] == wide * leaf.size, name
    outputs = {"query": 64, "key": 32, "value": 32, "out": 64, "gate": 160, "up": 160, "down": 64}
    scale_bytes = sum(size for name, size in bytes_of.items() if name.endswith("int8_scale"))
    assert scale_bytes == 2 * 4 * sum(outputs.values())
    planned = memory.bytes_per_device(small.abstract.params)
    first = jax.devices()[0]
    shards = [shard for leaf in state.params.values() for shard in leaf.addressable_shards]
    shards = [shard for shard in shards if shard.device == first]
    assert planned == sum(shard.data.nbytes for shard in shards)
    rows = small.put_batch(folders.batches(CASE)[0])
    # The backward pass reads the scales; no kernel is kept as the product reads it.
    scales = 2 * 4 * sum(outputs.values())
    assert small.residual_bytes(rows) <= plain.residual_bytes(rows) + scales


def test_bfloat16_base_is_not_copied(at: Path) -> None:
    step = folders.step(CASE, at, lora={"base": "bf16"}, precision="bf16", remat="dots")
    output, state = folders.train(step, CASE)
    for name, leaf in state.params.items():
        is_adapter = name.endswith(("lora_a", "lora_b"))
        assert leaf.dtype == (jnp.float32 if is_adapter else jnp.bfloat16), name
    assert np.abs(output["loss"] - references.tensors(CASE, "curve")["loss"]).max() < 0.1
    same = folders.step(CASE, at, precision="bf16", remat="dots")
    rows = step.put_batch(folders.batches(CASE)[0])
    assert step.residual_bytes(rows) <= same.residual_bytes(rows)


def test_quantized_product_equals_the_rounded_kernel() -> None:
    draw = np.random.default_rng(0)
    # Layers, two axes of inputs, one of outputs.
    kernel = jnp.asarray(draw.normal(size=(2, 3, 4, 5)), jnp.float32)
    x = jnp.asarray(draw.normal(size=(2, 6, 3, 4)), jnp.float32)
    whole, scale = quantize_kernel(kernel, 2)
    assert whole.dtype == jnp.int8 and scale.shape == (2, 5)
    rounded = whole.astype(jnp.float32) * scale[:, None, None]
    assert (jnp.abs(rounded - kernel) <= scale[:, None, None] * 0.5001).all()
    ours, back = jax.vjp(lambda x: frozen_product(x, whole[1], scale[1], 2), x)
    plain, their_back = jax.vjp(lambda x: jnp.tensordot(x, rounded[1], 2), x)
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(back(ours)[0], their_back(ours)[0], rtol=1e-5, atol=1e-4)


def test_quantized_float16_product_does_not_overflow() -> None:
    """The integers of a column sum to more than 65504, the largest float16, before the scale."""
    whole, scale = quantize_kernel(jnp.full((1, 64, 2), 0.01, jnp.float32), 1)
    outputs = frozen_product(jnp.full((1, 1, 64), 100.0, jnp.float16), whole[0], scale[0], 1)
    assert outputs.dtype == jnp.float16
    np.testing.assert_allclose(outputs, 64.0, rtol=1e-3)


def test_adapters_start_at_zero_and_have_groups() -> None:
    """LoRA+: B at another rate. Hayou et al. 2024."""
    groups = [{"match": ".*lora_b", "lr": 16}]
    requests = {"lora": {"rank": 2, "targets": ["all-linear"]}, "optimizer": {"groups": groups}}
    plain = tiny.build(tiny.Counting())
    step = tiny.compiled_step(tiny.Counting(), **requests)
    assert "train.optimizer.groups.0 (.*lora_b): 7 arrays" in step.notes[0]
    state = step.init_state()
    assert all(not leaf.any() for name, leaf in state.params.items() if name.endswith("lora_b"))
    losses = []
    for number in range(8):
        state, metrics = step.train(state, step.put_batch(tiny.Counting().batch(number)))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert plain.trained_count is None and step.trained_count == 14


def test_gpt2_adapters_have_its_names() -> None:
    requests = {"lora": {"rank": 2, "targets": ["c_attn", "mlp.c_proj"]}}
    losses, state = tiny.run(tiny.Counting(), 8, model=tiny.GPT2, mesh={"mp": 2}, **requests)
    trained = {name for name in state.params if "lora" in name}
    stems = ("blocks.attention.qkv", "blocks.mlp.down")
    assert trained == {f"{stem}.lora_{end}" for stem in stems for end in "ab"}
    assert losses[-1] < losses[0]


def test_experts_have_no_adapters() -> None:
    requests = {"lora": {"rank": 2, "targets": ["q", "gate"], "dropout": 0.1}, "mesh": {"ep": 2}}
    step = tiny.build(tiny.Counting(), model=tiny.EXPERTS, **requests)
    params = step.abstract.params
    stems = {"blocks.attention.query", "dense_blocks.attention.query", "dense_blocks.mlp.gate"}
    names = {f"{stem}.lora_{end}" for stem in stems for end in "ab"}
    assert set(step.builder.trained_params(params)) == names
    rows = step.put_batch(tiny.Counting().batch(0))
    whole = flops.count_flops(step.forward_jaxpr(rows))
    # Routers and experts need half of the backward pass, too.
    assert 2 * whole < (step.count_flops(rows) or 0) < 2.5 * whole
    kernels = peft.select_kernels(tiny.EXPERTS, spec.Lora(targets=["q", "gate"]))
    names = {
        name
        for ours, leaf in peft.adapter_leaves(kernels).items()
        for name, _ in leaf.tensor_shapes(params[ours].shape)
    }
    modules = ["0.mlp.gate_proj", *(f"{layer}.self_attn.q_proj" for layer in range(3))]
    stem = "base_model.model.model.layers"
    assert names == {f"{stem}.{module}.lora_{item}.weight" for module in modules for item in "AB"}


@pytest.mark.parametrize(
    ("requests", "theirs"),
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
def test_module_names_match_no_other_module(requests: list[str], theirs: list[str]) -> None:
    model = tiny.EXPERTS.model_copy(update={"family": "qwen3_moe"})
    chosen = peft.select_kernels(model, spec.Lora(targets=requests))
    assert peft.module_names(model, chosen) == theirs
    repeated = peft.read_targets(model, theirs, "here")
    assert peft.select_kernels(model, spec.Lora(targets=repeated)) == chosen


def test_adapters_do_not_change_the_random_base() -> None:
    lora = {"lora": {"rank": 2, "base": None}}
    drawn, alone = (tiny.build(tiny.Counting(), **keys).init_state().params for keys in (lora, {}))
    for name, leaf in alone.items():
        np.testing.assert_allclose(drawn[name], leaf, rtol=1e-6, err_msg=name)


def test_frozen_products_count_twice_in_a_plan() -> None:
    train = tiny.train_spec(tiny.Counting(), lora={"rank": 2, "targets": ["q"]}, mesh={"dp": 8})
    whole = tiny.train_spec(tiny.Counting(), mesh={"dp": 8})
    task, compiled = NextToken(), tiny.DECODER
    plans = [Plan(plan.with_synthetic_data(job, task), task) for job in (train, whole)]
    actual, plain = (item.to_dict(sharding=False) for item in plans)
    tokens, wide = tiny.ROWS * compiled.length, compiled.width
    kv_width = compiled.kv_head_count * compiled.head_channels
    layer = 2 * wide * wide + 2 * wide * kv_width + 3 * wide * compiled.mlp_units
    # Scores and what they mix, of a token.
    pairs = 2 * compiled.length * compiled.heads * compiled.head_channels
    low = 2 * wide * 2  # A and B
    forward = 2 * tokens * (compiled.layers * (layer + pairs + low) + wide * compiled.vocab)
    back = 2 * tokens * (compiled.layers * (layer + 2 * pairs + 2 * low) + wide * compiled.vocab)
    assert actual["flops_per_step"] == forward + back
    assert plain["flops_per_step"] == 3 * (forward - 2 * tokens * compiled.layers * low)
    assert actual["trained"] == 2 * compiled.layers * 2 * wide
    assert plain["trained"] == plain["parameters"]
    assert actual["device"]["gradients"] == 4 * actual["trained"]
    assert actual["device"]["optimizer"] == 8 * actual["trained"] + 8
    assert actual["checkpoint"] == 12 * actual["trained"] + 12
    assert actual["device"]["parameters"] == plain["device"]["parameters"] + 4 * actual["trained"]


@pytest.mark.parametrize(
    ("axes", "cut"),
    [
        (("embed", "rank"), ((1,), (2,))),
        (("rank", "heads", "head"), ((1,), (2, 3))),
        (("heads", "head", "rank"), ((1, 2), (3,))),
    ],
)
def test_muon_uses_whole_adapter_matrices(axes: tuple[str, ...], cut: Any) -> None:
    leaf = jax.ShapeDtypeStruct((2,) * (1 + len(axes)), jnp.float32)
    name = "blocks.attention.query.lora"
    assert muon_axes(name, leaf, {name: axes}) == cut


def test_lora_defaults_are_as_documented() -> None:
    assert spec.Lora().scaling == 2.0 and spec.Lora(rslora=True).scaling == 8.0
