"""Makes a bare `jax.distributed.initialize()` join our gang, without importing JAX before the program does.

Private names of JAX that this needs, in 0.10 and 0.11: jax._src.clusters.ClusterEnv and its list of types,
jax._src.distributed.initialize, jax._src.xla_bridge._jax.make_gloo_tcp_collectives.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import sys

LISTENS_S = 30.0  # for process 0 to open its port; its imports may take longer than those of the others

TYPE_CHECKING = False  # typing's, which every Python below the agent would import for this
if TYPE_CHECKING:
    from typing import Any


class JaxFinder:
    """Finds `jax` on the usual path, and calls `after` with the module once it is imported."""

    def __init__(self, after: Any) -> None:
        self._after = after

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The usual spec of `jax`, with a loader that calls `after`; None for any other module."""
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
        if not isinstance(getattr(jax, "__version__", None), str):
            return  # a `jax.py` of the program's own
        try:
            if _platform(contract) != "tpu":  # there JAX reads Google's own variables
                _register_cluster(contract)
            _fill_arguments(jax, contract)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            if reporter is not None:
                reporter.note(
                    f"jaxlaunch cannot set up jax.distributed.initialize() of jax {jax.__version__}: {error!r}; "
                    "pass it coordinator_address, num_processes and process_id"
                )
        if reporter is not None:
            reporter.hello(jax.__version__)
            atexit.unregister(reporter.leave)
            atexit.register(reporter.leave)  # after JAX's handlers, so before them at exit

    sys.meta_path.insert(0, JaxFinder(after))


def _platform(contract: Any) -> str:
    return str(json.loads(os.environ.get(contract.JOB, "{}")).get("platform", "cpu"))


def _connect_cpus(jax: Any, contract: Any, coordinator: str) -> None:
    """Has Gloo connect CPU devices of this machine on loopback, and not at the address of the host's name.

    A laptop's or a container's name often has none. Raises RuntimeError where other machines take part and it has none.
    """
    if getattr(jax.config, "jax_cpu_collectives_implementation", None) != "gloo" or _platform(contract) != "cpu":
        return
    if (fault := contract.own_name_fault(coordinator)) is not None:
        raise RuntimeError(fault)
    import functools

    from jax._src import xla_bridge

    library: Any = getattr(xla_bridge, "_jax", None)  # without it Gloo takes the name, as JAX does
    made, host = getattr(library, "make_gloo_tcp_collectives", None), contract.loopback(coordinator)
    if made is not None and host is not None:
        library.make_gloo_tcp_collectives = functools.partial(made, hostname=host)


def _register_cluster(contract: Any) -> None:
    """Puts our ClusterEnv before JAX's own: its detection would query Kubernetes, and count the pods of one Job."""
    from jax._src.clusters import ClusterEnv

    class Gang(ClusterEnv):
        """The gang, from the variables that the agent sets."""

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
        def get_local_process_id(cls) -> int | None:
            return None  # JAX reads JAX_LOCAL_DEVICE_IDS itself; without it every local device is ours

    types = ClusterEnv._cluster_types
    types.remove(Gang)
    types.insert(0, Gang)


def until_it_listens(coordinator: str, limit_s: float) -> None:
    """Waits until process 0 listens at `coordinator` (host:port), for `limit_s` seconds at most.

    The client of JAX that comes earlier tries again only after a second, and after longer and longer ones. If nothing
    listens in time, JAX says so.
    """
    import socket
    import time

    host, _, port = coordinator.rpartition(":")
    if not port.isdigit():
        return
    end, pause_s = time.monotonic() + limit_s, 0.005
    while (left_s := end - time.monotonic()) > 0:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=left_s).close()
        except OSError:
            time.sleep(min(pause_s, left_s))
            pause_s = min(1.5 * pause_s, 0.25)  # thousands of hosts may ask


def _fill_arguments(jax: Any, contract: Any) -> None:
    """Wraps `initialize`: it waits for process 0, and timeouts that the caller left out are the gang's, not JAX's
    minutes.

    A coordinator at an address of the caller's own listens as JAX has it: JAX would take the port of ours. A call after
    the first does nothing, unless its address is another: JAX would refuse it as one that comes after a computation.
    """
    import functools
    import inspect

    import jax._src.distributed as private

    original = private.initialize
    signature = inspect.signature(original)
    ours: dict[str, Any] = {
        "initialization_timeout": int(float(os.environ.get(contract.TIMEOUT, "300"))),
        "heartbeat_timeout_seconds": contract.HEARTBEAT_TIMEOUT_S,
        "shutdown_timeout_seconds": contract.SHUTDOWN_TIMEOUT_S,
    }

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        given, joined = signature.bind(*args, **kwargs).arguments, private.global_state
        address, fill = given.get("coordinator_address"), {**ours}
        if joined.client is not None:  # the trainer has joined, or a cell that is run again: there is nothing to do
            if address in (None, joined.coordinator_address):
                return None
            raise RuntimeError(
                f"jax.distributed.initialize({address!r}): this process has joined {joined.coordinator_address}; "
                "leave this call out, or its arguments"
            )
        _connect_cpus(jax, contract, address or os.environ.get(contract.COORDINATOR, ""))
        process = given.get("process_id", os.environ.get(contract.PROCESS_ID))
        if address is None and _platform(contract) != "tpu":
            address = os.environ.get(contract.COORDINATOR)
        if address is not None and process is not None and int(process) != 0:
            until_it_listens(address, LISTENS_S)
        if address is not None and address != os.environ.get(contract.COORDINATOR):
            fill["coordinator_bind_address"] = "[::]:" + address.rpartition(":")[2]
        kwargs |= {name: value for name, value in fill.items() if name in signature.parameters and name not in given}
        return original(*args, **kwargs)

    private.initialize = jax.distributed.initialize = initialize
