"""Let only the first process of a gang compile, for the JAX processes that tests start.

JAX can do so itself (JAX_SHARE_BINARY_BETWEEN_HOSTS), by a key that every process has to compute
alike. On CPU it does not (jax 0.10): the key holds the devices of the process alone. Here it holds
the kinds of all devices instead.

And they look for garbage seldom: imports and traces make many objects that stay.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.util
import sys
from typing import Any

import jaxcache


def hash_all_devices(cache_key: Any) -> None:
    cache_key._hash_accelerator_config = cache_key._hash_devices


CHANGES = {"jax._src.cache_key": hash_all_devices, "jax._src.lru_cache": jaxcache.install}


class Finder(importlib.abc.MetaPathFinder):
    """Changes JAX's modules when they are imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        change = CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def changed(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


gc.set_threshold(100_000)
sys.meta_path.insert(0, Finder())
