"""JAX for the trainer's tests: 8 CPU devices, no silent promotion, cheap compilation."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src import compiler, lru_cache

from tests import compiled
from tests.site import jaxcache

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update(
    "jax_disable_most_optimizations", True
)  # tests compile far longer than they compute
jax.config.update("jax_compilation_cache_dir", os.environ[compiled.FOLDER_VARIABLE])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jaxcache.install(lru_cache)
gc.set_threshold(
    100_000
)  # a trace makes many objects that stay: looking for garbage among them takes a twentieth
as_for_users = compiler.get_compile_options


def cheap(*inputs: Any, env_options_overrides: dict[str, Any] | None = None, **more: Any) -> Any:
    """Compile cheaply: a sum in a loop may be rounded in another order than outside."""
    request = {
        **(env_options_overrides or {}),
        **compiled.QUICK_OPTIONS,
        "xla_backend_optimization_level": 0,
    }
    return as_for_users(*inputs, env_options_overrides=request, **more)


compiler.get_compile_options = cheap


@pytest.fixture
def to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fusions as a user's run has them, for a test that compares two programs bit by bit."""
    monkeypatch.setattr(compiler, "get_compile_options", as_for_users)


@pytest.fixture
def optimized(to_the_bit: None) -> Iterator[None]:
    """Compile with LLVM's optimizations, which may round a sum in a loop in another order."""
    is_quick = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", is_quick)


@pytest.fixture
def named() -> Iterator[None]:
    """Compile programs with the names of their own operations, not those of an equal program."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


@pytest.fixture
def standard() -> Iterator[None]:
    """Allow JAX's own promotion, which flax's layers and jax.nn's attention need."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
