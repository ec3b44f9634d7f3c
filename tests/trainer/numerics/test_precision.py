import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlaunch.trainer.numerics import precision
from jaxlaunch.trainer.spec import Policy

FLOAT32, BFLOAT16, FLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("float16")


@pytest.mark.parametrize(
    ("name", "compute", "matmul"),
    [
        ("fp32", FLOAT32, "highest"),
        ("tf32", FLOAT32, "tensorfloat32"),
        ("bf16", BFLOAT16, None),
        ("fp16", FLOAT16, None),
    ],
)
def test_a_name_keeps_parameters_and_output_in_float32(
    name: str, compute: jnp.dtype, matmul: str | None
) -> None:
    assert precision.resolve_precision(name) == precision.Precision(
        FLOAT32, compute, FLOAT32, matmul
    )


def test_a_policy_in_full_is_taken_as_written() -> None:
    written = Policy(params="bfloat16", compute="bfloat16", output="bfloat16", matmul="highest")
    assert precision.resolve_precision(written) == precision.Precision(
        BFLOAT16, BFLOAT16, BFLOAT16, "highest"
    )


@pytest.mark.parametrize(
    ("name", "asked"), [("fp32", "HIGHEST"), ("tf32", "HIGH"), ("bf16", "DEFAULT")]
)
def test_forward_and_backward_products_ask_a_gpu_for_the_precision(name: str, asked: str) -> None:
    x = jnp.ones((4, 4))
    with jax.default_matmul_precision(precision.resolve_precision(name).matmul):
        traced = jax.jit(jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))).trace(x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 2
    assert all(f"precision = [{asked}, {asked}]" in line for line in products)


def test_a_float32_product_is_true_to_float32_on_the_host() -> None:
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 64, 64)).astype(np.float32)
    with jax.default_matmul_precision(precision.resolve_precision("fp32").matmul):
        found = jax.jit(jnp.matmul)(a, b)
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(found - wanted).max() < 1e-5  # TF32 would be off by about 1e-2
