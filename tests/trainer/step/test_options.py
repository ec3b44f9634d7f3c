"""The options that programs are compiled with."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlaunch import contract
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.step.executable import (
    Executable,
    compile_lowered,
    setup_compiler_options,
    step_compiler_options,
)

ARGUMENT = (jax.ShapeDtypeStruct((2,), jnp.float32),)


@pytest.mark.parametrize(
    ("is_quick", "options"), [(False, {"xla_backend_optimization_level": 1}), (True, None)]
)
def test_setup_programs_are_optimized_less(is_quick: bool, options: dict[str, int] | None) -> None:
    name = "jax_disable_most_optimizations"
    previous = jax.config.read(name)
    jax.config.update(name, is_quick)
    try:
        assert (
            setup_compiler_options(
                jax.make_mesh(
                    (1,),
                    ("dp",),
                    devices=jax.devices()[:1],
                    axis_types=(jax.sharding.AxisType.Auto,),
                )
            )
            == options
        )
    finally:
        jax.config.update(name, previous)


def of_tpu(kind: str) -> dict[str, str]:
    mesh: Any = types.SimpleNamespace(
        devices=np.array([types.SimpleNamespace(platform="tpu", device_kind=kind)])
    )
    result = step_compiler_options(mesh)
    assert result is not None
    return result


def test_steps_without_jit_are_refused() -> None:
    with jax.disable_jit(), pytest.raises(SpecError, match="JAX_DISABLE_JIT is set") as caught:
        Executable("train", jnp.sin, ARGUMENT)
    assert caught.value.code == contract.BAD_SPEC
    Executable("train", jnp.sin, ARGUMENT)


def test_libtpu_flags_of_job_have_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    ours = of_tpu("TPU v5")
    monkeypatch.setenv(
        "LIBTPU_INIT_ARGS",
        "--xla_tpu_enable_async_collective_fusion=false --xla_tpu_other_kib=98304",
    )
    remaining = of_tpu("TPU v5")
    assert (
        ours.items() - remaining.items() == {("xla_tpu_enable_async_collective_fusion", "true")}
        and remaining.items() <= ours.items()
    )


def test_tpu_with_sparse_cores_keeps_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert (
        set(of_tpu("TPU7x"))
        == {"xla_jf_spmd_threshold_for_windowed_einsum_mib"}
        < set(of_tpu("TPU v6 lite"))
    )


def test_unknown_compiler_option_is_dropped_and_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected_names = {"xla_backend_optimization_level": 1}
    program = Executable(
        "train",
        lambda x: 2 * x,
        ARGUMENT,
        options={"xla_tpu_gone": "true", **expected_names, "xla_old": "1"},
    )
    assert program(jnp.ones(2)).tolist() == [2, 2]
    assert capsys.readouterr().err.splitlines() == [
        f"this version of the compiler does not know the option {name}: left out"
        for name in ("xla_tpu_gone", "xla_old")
    ]


def test_failing_compiler_options_are_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    inputs: list[dict[str, str]] = []

    def compile_as_libtpu(compiler_options: dict[str, str]) -> str:
        inputs.append(compiler_options)
        if "xla_tpu_enable_async_collective_fusion" in compiler_options:
            raise jax.errors.JaxRuntimeError(
                "INTERNAL: RET_CHECK failure (llo_program_shared_registry.cc:156)"
            )
        return "compiled"

    lowered: Any = types.SimpleNamespace(compile=compile_as_libtpu)
    ours = of_tpu("TPU v5")
    assert compile_lowered(lowered, ours) == "compiled"
    assert inputs == [ours, of_tpu("TPU7x")]
    assert (
        capsys.readouterr().err
        == "the compiler fails with the options that hide collectives: left out\n"
    )
