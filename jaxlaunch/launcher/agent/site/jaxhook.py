"""Makes `jax.distributed.initialize()` without arguments join the gang.

A finder on `sys.meta_path` waits until the program imports JAX itself. It then registers a cluster
environment, and wraps `initialize` to fill in arguments that the program has left out.

This needs private names of JAX 0.10 and 0.11: jax._src.clusters.ClusterEnv and its list of types,
jax._src.distributed.initialize, jax._src.xla_bridge._jax.make_gloo_tcp_collectives.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import sys

# Process 0 gets this long to open its port, since its imports may take longer than those of the
# others.
LISTEN_TIMEOUT_S = 30.0

# Importing `typing` for this constant would slow down every Python below the agent.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class JaxFinder:
    """Finds `jax` on the usual path, and calls a function with the module once it is imported."""

    def __init__(self, on_import: Any) -> None:
        self._on_import = on_import

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the usual spec of `jax` with a loader that calls the function, else None."""
        if name != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                original(module)
                self._on_import(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(contract: Any, reporter: Any) -> None:
    """Hook the first import of JAX. With `reporter=None` nothing is reported."""

    def set_up_jax(jax: Any) -> None:
        if not isinstance(getattr(jax, "__version__", None), str):
            # The program has a `jax.py` of its own.
            return
        try:
            # On TPU, JAX reads the variables of Google Cloud.
            if _job_platform(contract) != "tpu":
                _register_cluster(contract)
            _wrap_initialize(jax, contract)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            if reporter is not None:
                fault = f"jax.distributed.initialize() of jax {jax.__version__}: {error!r}"
                hint = "pass it coordinator_address, num_processes and process_id"
                reporter.note(f"jaxlaunch cannot set up {fault}; {hint}")
        if reporter is not None:
            reporter.hello(jax.__version__)
            atexit.unregister(reporter.leave)
            # Registered after JAX's handlers, it runs before them at exit.
            atexit.register(reporter.leave)

    sys.meta_path.insert(0, JaxFinder(set_up_jax))


def _job_platform(contract: Any) -> str:
    return str(json.loads(os.environ.get(contract.JOB, "{}")).get("platform", "cpu"))


def _connect_cpus_on_loopback(jax: Any, contract: Any, coordinator: str) -> None:
    """Make Gloo connect the CPU devices of this machine on loopback.

    The host name of a laptop or a container often has no address.

    Raises:
        RuntimeError: Other machines take part, and the host name has no address.
    """
    is_gloo = getattr(jax.config, "jax_cpu_collectives_implementation", None) == "gloo"
    if not is_gloo or _job_platform(contract) != "cpu":
        return
    if (fault := contract.host_name_fault(coordinator)) is not None:
        raise RuntimeError(fault)
    import functools

    from jax._src import xla_bridge

    # Without this private name, Gloo uses the address of the host name, as JAX does by default.
    library: Any = getattr(xla_bridge, "_jax", None)
    make_collectives = getattr(library, "make_gloo_tcp_collectives", None)
    host = contract.loopback_host(coordinator)
    if make_collectives is not None and host is not None:
        library.make_gloo_tcp_collectives = functools.partial(make_collectives, hostname=host)


def _register_cluster(contract: Any) -> None:
    """Register our ClusterEnv before those of JAX, which would query Kubernetes."""
    from jax._src.clusters import ClusterEnv

    class Gang(ClusterEnv):
        """Cluster environment that reads the variables of the agent."""

        name = "jaxlaunch"

        @classmethod
        def is_env_present(cls) -> bool:
            keys = contract.COORDINATOR, contract.NUM_PROCESSES, contract.PROCESS_ID
            return all(key in os.environ for key in keys)

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
        def get_local_process_id(cls) -> int | None:
            # JAX reads JAX_LOCAL_DEVICE_IDS itself, and otherwise uses every local device.
            return None

    types = ClusterEnv._cluster_types
    types.remove(Gang)
    types.insert(0, Gang)


def wait_for_listener(coordinator: str, limit_s: float) -> None:
    """Wait until process 0 listens at `coordinator` (host:port), for `limit_s` seconds at most.

    JAX's own client would retry only after a second, and then with growing delays. If nothing
    listens in time, JAX reports the error.
    """
    import socket
    import time

    host, _, port = coordinator.rpartition(":")
    if not port.isdigit():
        return
    deadline, pause_s = time.monotonic() + limit_s, 0.005
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=left_s).close()
            return
        except OSError:
            time.sleep(min(pause_s, left_s))
            # The pause grows because thousands of hosts may connect.
            pause_s = min(1.5 * pause_s, 0.25)


def _wrap_initialize(jax: Any, contract: Any) -> None:
    """Wrap `initialize`, which waits for process 0 and has the gang's timeouts by default.

    With a coordinator address of the caller, the coordinator listens on its port on every
    interface: JAX would take the bind address of the gang's coordinator. A second call does nothing
    unless it has another address; JAX would refuse it because it comes after a computation.
    """
    import functools
    import inspect

    import jax._src.distributed as private

    original = private.initialize
    signature = inspect.signature(original)
    gang_defaults: dict[str, Any] = {
        "initialization_timeout": int(float(os.environ.get(contract.INIT_TIMEOUT, "300"))),
        "heartbeat_timeout_seconds": contract.HEARTBEAT_TIMEOUT_S,
        "shutdown_timeout_seconds": contract.SHUTDOWN_TIMEOUT_S,
    }

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        arguments, joined = signature.bind(*args, **kwargs).arguments, private.global_state
        address, defaults = arguments.get("coordinator_address"), {**gang_defaults}
        # The trainer has joined already, or a notebook cell runs again.
        if joined.client is not None:
            if address in (None, joined.coordinator_address):
                return None
            fault = f"this process has joined {joined.coordinator_address}"
            hint = "leave this call out, or its arguments"
            raise RuntimeError(f"jax.distributed.initialize({address!r}): {fault}; {hint}")
        gang_address = os.environ.get(contract.COORDINATOR)
        _connect_cpus_on_loopback(jax, contract, address or gang_address or "")
        process = arguments.get("process_id", os.environ.get(contract.PROCESS_ID))
        if address is None and _job_platform(contract) != "tpu":
            address = gang_address
        # The program or its wrapper may have set a proxy since it was started.
        host = (address or "").rpartition(":")[0].strip("[]")
        hosts = [*contract.gang_hosts(os.environ), host]
        os.environ.update(contract.bypass_proxies(os.environ, hosts))
        if address is not None and process is not None and int(process) != 0:
            wait_for_listener(address, LISTEN_TIMEOUT_S)
        if address is not None and address != gang_address:
            defaults["coordinator_bind_address"] = "[::]:" + address.rpartition(":")[2]
        missing = signature.parameters.keys() - arguments.keys()
        kwargs |= {name: value for name, value in defaults.items() if name in missing}
        return original(*args, **kwargs)

    private.initialize = jax.distributed.initialize = initialize
