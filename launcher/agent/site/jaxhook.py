"""Makes a bare `jax.distributed.initialize()` join our gang, without importing JAX before the program does.

Private names of JAX that this needs, in 0.10 and 0.11: jax._src.clusters.ClusterEnv and its list of types,
jax._src.distributed.initialize.
"""

import atexit
import functools
import importlib.abc
import importlib.util
import inspect
import os
import sys
from typing import Any


class JaxFinder(importlib.abc.MetaPathFinder):
    """Finds `jax` as everyone else does, and has `after` called once it is imported."""

    def __init__(self, after: Any) -> None:
        self._after = after

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                original(module)
                self._after(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(contract: Any, reporter: Any) -> None:
    """Hooks the first import of JAX. `reporter` may be None: then nothing is reported."""

    def after(jax: Any) -> None:
        try:
            if _platform(contract) != "tpu":  # there Google's variables rule, and JAX reads them itself
                _stand_first(contract)
            _fill_timeouts(jax, contract)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            if reporter is not None:
                reporter.note(f"jax {jax.__version__} could not be hooked: {error!r}; pass initialize its arguments")
        if reporter is not None:
            reporter.hello(jax.__version__)
            atexit.unregister(reporter.leave)
            atexit.register(reporter.leave)  # after JAX's handlers, so before them at exit

    sys.meta_path.insert(0, JaxFinder(after))


def _platform(contract: Any) -> str:
    return str(contract.AgentJob.from_json(os.environ[contract.JOB]).platform) if contract.JOB in os.environ else "cpu"


def _stand_first(contract: Any) -> None:
    """Puts our environment before JAX's own: its detection would ask Kubernetes, and count one Job's pods."""
    from jax._src.clusters import ClusterEnv

    class Gang(ClusterEnv):
        """The gang that the agent describes."""

        name = "jaxlaunch"

        @classmethod
        def is_env_present(cls) -> bool:
            return all(key in os.environ for key in (contract.COORDINATOR, contract.NUM_PROCESSES, contract.PROCESS_ID))

        @classmethod
        def get_coordinator_address(cls, *args: Any, **kwargs: Any) -> str:
            return os.environ[contract.COORDINATOR]

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ[contract.NUM_PROCESSES])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ[contract.PROCESS_ID])

        @classmethod
        def get_local_process_id(cls) -> "int | None":
            return None  # JAX reads JAX_LOCAL_DEVICE_IDS itself; without it every local device is ours

    types = ClusterEnv._cluster_types
    types.remove(Gang)
    types.insert(0, Gang)


def _fill_timeouts(jax: Any, contract: Any) -> None:
    """Wraps `initialize`: timeouts that the caller left out are the gang's, not JAX's minutes."""
    import jax._src.distributed as private

    original = private.initialize
    signature = inspect.signature(original)
    ours = {
        "initialization_timeout": int(float(os.environ.get(contract.TIMEOUT, "300"))),
        "heartbeat_timeout_seconds": contract.HEARTBEAT_TIMEOUT_S,
        "shutdown_timeout_seconds": contract.SHUTDOWN_TIMEOUT_S,
    }

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        kwargs |= {name: value for name, value in ours.items() if name in signature.parameters and name not in given}
        return original(*args, **kwargs)

    private.initialize = jax.distributed.initialize = initialize
