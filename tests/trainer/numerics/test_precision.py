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
def test_named_precisions_keep_float32_parameters_and_outputs(
    name: str, compute: jnp.dtype, matmul: str | None
) -> None:
    expected = precision.Precision(FLOAT32, compute, FLOAT32, matmul)
    assert precision.resolve_precision(name) == expected


def test_full_policy_is_used_as_written() -> None:
    written = Policy(params="bfloat16", compute="bfloat16", output="bfloat16", matmul="highest")
    expected = precision.Precision(BFLOAT16, BFLOAT16, BFLOAT16, "highest")
    assert precision.resolve_precision(written) == expected


@pytest.mark.parametrize(
    ("name", "requests"), [("fp32", "HIGHEST"), ("tf32", "HIGH"), ("bf16", "DEFAULT")]
)
def test_products_request_the_precision_on_gpus(name: str, requests: str) -> None:
    x = jnp.ones((4, 4))
    with jax.default_matmul_precision(precision.resolve_precision(name).matmul):
        traced = jax.jit(jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))).trace(x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 2
    assert all(f"precision = [{requests}, {requests}]" in line for line in products)


def test_float32_product_is_exact_on_cpu() -> None:
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 64, 64)).astype(np.float32)
    with jax.default_matmul_precision(precision.resolve_precision("fp32").matmul):
        actual = jax.jit(jnp.matmul)(a, b)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(actual - expected).max() < 1e-5  # TF32 would be off by about 1e-2
