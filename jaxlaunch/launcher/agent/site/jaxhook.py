"""Make `jax.distributed.initialize()` join the gang, with or without arguments.

Once the program has imported JAX, the hook registers a cluster environment, and wraps `initialize`
to set the arguments that the launcher knows.

At its end, a process waits in JAX's shutdown barrier until the other processes have ended, too. The
hook reports this to the agent. It also makes `os._exit(0)` wait in the barrier, because JAX aborts
the other ranks if one of them ends without it.

This needs private names of JAX 0.10 and 0.11: jax._src.clusters.ClusterEnv and its list of types,
jax._src.distributed.initialize, .global_state and ._jax.get_distributed_runtime_client,
jax._src.xla_bridge._jax.make_gloo_tcp_collectives.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os

# Time for process 0 to open its port, because its imports may take longer than those of the others.
LISTEN_TIMEOUT_S = 30.0

# Importing `typing` for this constant would slow down every Python below the agent.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def make_callback(contract: Any, site_reporter: Any) -> Callable[[Any], None]:
    """Return the function to call with `jax` once it is imported.

    Args:
        contract: The module of the contract.
        site_reporter: The module of the reporter, whose attribute `reporter` may be None.
    """

    def set_up_jax(jax: Any) -> None:
        if not isinstance(getattr(jax, "__version__", None), str):
            # The program has a `jax.py` of its own.
            return
        reporter = site_reporter.reporter
        try:
            # On TPU, JAX reads the variables of Google Cloud.
            if _job_platform(contract) != "tpu":
                _register_cluster(contract)
            _wrap_initialize(jax, contract, site_reporter)
            if reporter is not None and reporter.runs_at_exit:
                _wrap_shutdown(reporter)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            if reporter is not None:
                fault = f"jax.distributed.initialize() of jax {jax.__version__}: {error!r}"
                hint = "pass it coordinator_address, num_processes and process_id"
                reporter.note(f"jaxlaunch cannot set up {fault}; {hint}")
        # A worker process that loads data may import JAX before the program does.
        is_worker = reporter is not None and reporter.role is None and site_reporter.is_worker()
        if reporter is not None and not is_worker:
            reporter.take_role(contract.Role.IMPORTED_JAX, jax.__version__)

    return set_up_jax


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

    # If JAX lacks this private name, Gloo uses the address of the host name, as it does by default.
    library: Any = getattr(xla_bridge, "_jax", None)
    make_collectives = getattr(library, "make_gloo_tcp_collectives", None)
    host = contract.loopback_host(coordinator)
    if make_collectives is not None and host is not None:
        library.make_gloo_tcp_collectives = functools.partial(make_collectives, hostname=host)


def _register_cluster(contract: Any) -> None:
    """Register our ClusterEnv before those of JAX, one of which would query Kubernetes."""
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


def _wrap_initialize(jax: Any, contract: Any, site_reporter: Any) -> None:
    """Wrap `initialize`, so that it joins the gang whatever its arguments are.

    The coordinator, the process count and the process id are always the launcher's, so a program
    that was written for Slurm or MPI need not change. The timeouts are the gang's by default. The
    wrapper waits until process 0 listens. Only one process of a rank may join. A second call in
    that process does nothing, whereas JAX would raise an error if a computation came before.
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
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        # The trainer has joined already, or a notebook cell runs a second time.
        if private.global_state.client is not None:
            return None
        reporter = site_reporter.reporter
        if reporter is not None:
            if not reporter.lock_rank():
                _reject_second_process(contract, reporter, is_worker=site_reporter.is_worker())
                return None
            reporter.take_role(contract.Role.JOINED)
            if names := _set_gang_arguments(contract, arguments):
                call = f"jax.distributed.initialize({', '.join(names)})"
                reporter.note(
                    f"{call}: the job's own values are used, so leave these arguments out"
                )
            reporter.report_joining(is_waiting=True)
        missing = signature.parameters.keys() - arguments.keys()
        arguments |= {name: value for name, value in gang_defaults.items() if name in missing}
        timeout_s = arguments.get("shutdown_timeout_seconds")
        try:
            _wait_for_coordinator(jax, contract, arguments)
            with _client_shutdown_timeout(private, timeout_s):
                return original(**arguments)
        finally:
            if reporter is not None:
                reporter.report_joining(is_waiting=False)

    private.initialize = jax.distributed.initialize = initialize


@contextlib.contextmanager
def _client_shutdown_timeout(private: Any, timeout_s: int | None) -> Any:
    """Make JAX create clients with the shutdown timeout, which it passes only to its service.

    Otherwise each client stops waiting after 300 s, however long the service waits.
    """
    library = getattr(private, "_jax", None)
    make_client = getattr(library, "get_distributed_runtime_client", None)
    if library is None or make_client is None or timeout_s is None:
        yield
        return

    def make_patient_client(*args: Any, **kwargs: Any) -> Any:
        try:
            return make_client(*args, **{"shutdown_timeout": timeout_s, **kwargs})
        except TypeError:
            return make_client(*args, **kwargs)

    library.get_distributed_runtime_client = make_patient_client
    try:
        yield
    finally:
        library.get_distributed_runtime_client = make_client


def _wrap_shutdown(reporter: Any) -> None:
    """Report when this process waits in JAX's shutdown barrier, and make `os._exit(0)` do so."""
    import functools
    import threading

    import jax._src.distributed as private

    state: Any = private.global_state
    os_module: Any = os
    exit_process = os._exit
    shutdown = state.shutdown

    @functools.wraps(shutdown)
    def report_shutdown() -> None:
        if state.client is None:
            shutdown()
            return
        if reporter.has_left:
            _close_connections(state.coordinator_address)
        reporter.report_wait(is_waiting=True)
        try:
            shutdown()
        finally:
            reporter.report_wait(is_waiting=False)

    @functools.wraps(exit_process)
    def leave_gang_and_exit(status: int) -> Any:
        if status == 0 and reporter.is_in_process:
            reporter.leave()
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and state.client is not None:
                # A failure of the barrier must not change that the program ends with 0.
                with contextlib.suppress(Exception):
                    _close_connections(state.coordinator_address)
                    shutdown()
        exit_process(status)

    state.shutdown = report_shutdown
    os_module._exit = leave_gang_and_exit
    # JAX registers an exit handler when it is imported, and waits for the other processes in it. It
    # must run after all handlers of the program, which would otherwise be delayed.
    from jax._src import api

    if (clean_up := getattr(api, "clean_up", None)) is None:
        atexit.register(reporter.leave)
    else:
        atexit.unregister(clean_up)
        reporter.clean_up = clean_up


def _close_connections(coordinator: str) -> None:
    """Close the connections of C++ libraries, except those of JAX's coordination service.

    A peer that waits for this process in a collective of Gloo or NCCL must fail when this process
    ends. While it waits in the barrier, an array in a global variable could keep them open.
    """
    import gc
    import socket

    port = int(coordinator.rpartition(":")[2])
    sockets = [item for item in gc.get_objects() if type(item) is socket.socket]
    python_fds = {str(item.fileno()) for item in sockets}
    fds = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    for name in {*fds} - python_fds:
        # The descriptor is not a socket, or has been closed.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            ports = {connection.getsockname()[1], connection.getpeername()[1]}
            if connection.family in (socket.AF_INET, socket.AF_INET6) and port not in ports:
                connection.shutdown(socket.SHUT_RDWR)


def _wait_for_coordinator(jax: Any, contract: Any, arguments: dict[str, Any]) -> None:
    """Wait until process 0 listens, and prepare the environment and the remaining arguments."""
    address = arguments.get("coordinator_address")
    if address is None and _job_platform(contract) != "tpu":
        address = os.environ.get(contract.COORDINATOR)
    _connect_cpus_on_loopback(jax, contract, address or "")
    process = arguments.get("process_id", os.environ.get(contract.PROCESS_ID))
    # The program or its wrapper may have set a proxy after it was started.
    host = (address or "").rpartition(":")[0].strip("[]")
    hosts = [*contract.gang_hosts(os.environ), host]
    if exceptions := contract.bypass_proxies(os.environ, hosts):
        os.environ.update(exceptions)
        # Otherwise JAX warns that the proxies may cause a hang.
        with contextlib.suppress(AttributeError):
            jax.config.update("jax_check_proxy_envs", False)
    if address is not None and process is not None and int(process) != 0:
        wait_for_listener(address, LISTEN_TIMEOUT_S)
    if address is not None and address != os.environ.get(contract.COORDINATOR):
        # Otherwise JAX uses the bind address of the gang's coordinator.
        arguments.setdefault("coordinator_bind_address", "[::]:" + address.rpartition(":")[2])


def _reject_second_process(contract: Any, reporter: Any, *, is_worker: bool) -> None:
    """End the job, unless the process is a worker, which continues without the gang."""
    call = "jax.distributed.initialize()"
    if is_worker:
        reporter.note(
            f"a worker of multiprocessing called {call} as it imported the main module; it did not "
            "join. Guard the call with `if __name__ == '__main__':`"
        )
        return
    rank = os.environ.get(contract.PROCESS_ID, "0")
    reporter.refuse(
        f"a second process of rank {rank} (pid {reporter.pid}) called {call} while the first one "
        "runs: set `processes_per_host` to the number of processes, or, if it only helps the first "
        "one, guard the call with `if __name__ == '__main__':`"
    )


def _set_gang_arguments(contract: Any, arguments: dict[str, Any]) -> list[str]:
    """Replace arguments of `initialize` by the launcher's, and return those that differed.

    On TPU, JAX gets these values from libtpu, so only the method of detection is removed.
    """
    names = []
    method = arguments.get("cluster_detection_method")
    if method not in (None, "deactivate"):
        del arguments["cluster_detection_method"]
        names.append(f"cluster_detection_method={method!r}")
    gang = {
        "coordinator_address": os.environ.get(contract.COORDINATOR),
        "num_processes": os.environ.get(contract.NUM_PROCESSES),
        "process_id": os.environ.get(contract.PROCESS_ID),
    }
    if _job_platform(contract) == "tpu" or None in gang.values():
        return names
    # The bind address of the coordinator is the launcher's, too.
    bind_address = arguments.pop("coordinator_bind_address", None)
    if bind_address not in (None, os.environ.get(contract.COORDINATOR_BIND)):
        names.append("coordinator_bind_address")
    for name, text in gang.items():
        value: Any = text if name == "coordinator_address" else int(str(text))
        if arguments.get(name) not in (None, value):
            names.append(name)
        arguments[name] = value
    return names
