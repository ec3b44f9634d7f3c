"""The environment variables of a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.host import environment


def config(**fields: Any) -> Config:
    return Config(("lead", 1), 2, 1, "u", 0, "pod", AgentJob("t", **fields), "spec", b"key")


@pytest.mark.parametrize(
    ("fields", "rank", "expected"),
    [
        (
            {"devices_per_process": 4},
            1,
            {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu", "JAX_PROCESS_ID": "1"},
        ),
        ({"platform": "cuda"}, 1, {"JAX_LOCAL_DEVICE_IDS": None, "JAX_PLATFORMS": None}),
        ({"platform": "rocm", "processes_per_host": 8}, 9, {"JAX_LOCAL_DEVICE_IDS": "1"}),
        (
            {"platform": "cuda", "processes_per_host": 4, "devices_per_process": 2},
            7,
            {"JAX_LOCAL_DEVICE_IDS": "6,7", "JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "7"},
        ),
        (
            {"timeouts_s": {"rendezvous": 42.5}},
            1,
            {"JAXLAUNCH_INIT_TIMEOUT": "42", "PYTHONPATH": "/site", "JAXLAUNCH_BEHIND": "/code"},
        ),
    ],
)
def test_rank_variables_describe_rank_and_devices(
    fields: dict[str, Any], rank: int, expected: dict[str, str | None]
) -> None:
    result = environment.rank_variables(config(**fields), {"PYTHONPATH": "/code"}, rank, "/site")
    assert {name: result.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (
            {"LD_LIBRARY_PATH": "/opt/lib", "PATH": "/bin"},
            ("/driver/lib:/opt/lib", "/driver/bin:/bin"),
        ),
        ({}, ("/driver/lib", f"/driver/bin:{os.defpath}")),
    ],
)
def test_search_path_of_the_driver_comes_first(
    base: dict[str, str], expected: tuple[str, str]
) -> None:
    paths = {"LD_LIBRARY_PATH": "/driver/lib", "PATH": "/driver/bin"}
    environ = environment.rank_variables(config(search_paths=paths), base, 0, "/site")
    assert (environ["LD_LIBRARY_PATH"], environ["PATH"]) == expected


@pytest.mark.parametrize(
    ("platform", "base", "level"),
    [
        ("cuda", {contract.TRAIN_SPEC: "{}"}, "O1"),
        ("cuda", {contract.TRAIN_SPEC: "{}", "JAX_OPTIMIZATION_LEVEL": "O0"}, "O0"),
        ("cuda", {}, None),
        ("cpu", {contract.TRAIN_SPEC: "{}"}, None),
        ("tpu", {contract.TRAIN_SPEC: "{}"}, None),
    ],
)
def test_train_block_sets_variables_of_its_platform(
    platform: str, base: dict[str, str], level: str | None
) -> None:
    variables = environment.rank_variables(config(platform=platform), base, 0, "/site")
    assert variables.get("JAX_OPTIMIZATION_LEVEL") == level


FAULTS = """
import resource, jax, jax.numpy as jnp
step = jax.jit(lambda x: (x @ x.T) @ x)  # by way of 64 MiB
x = jnp.ones((4096, 16))
def faults():
    step(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(min(-faults() + faults() for _ in range(4)))
"""


def test_cpu_variables_keep_memory_between_steps() -> None:
    def faults(base: dict[str, str]) -> int:
        environ = environment.rank_variables(config(), {**os.environ, **base}, 0, "/site")
        return int(subprocess.check_output([sys.executable, "-c", FAULTS], env=environ))

    assert faults({contract.TRAIN_SPEC: "{}"}) < 0.1 * faults({})


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_memory_fraction_of_the_job_replaces_the_default(name: str) -> None:
    base = {contract.TRAIN_SPEC: "{}", name: "0.5"}
    result = environment.rank_variables(config(platform="cuda"), base, 0, "/site")
    shares = {key: value for key, value in result.items() if key.endswith("MEM_FRACTION")}
    assert shares == {name: "0.5"}


@pytest.mark.parametrize(
    ("coordinator", "listens", "expected"),
    [
        ("127.0.0.1:20001", "127.0.0.1", "127.0.0.1:20001"),
        ("digits-w-0-0.digits:20001", "10.1.2.3", "10.1.2.3:20001"),
        ("digits-w-0-0.digits:20001", "fd00::7", "[fd00::7]:20001"),
        ("digits-w-0-0.digits:20001", None, None),
    ],
)
def test_coordinator_listens_on_the_address_of_host_0(
    coordinator: str, listens: str | None, expected: str | None
) -> None:
    result = environment.attempt_variables(3, coordinator, listens)
    assert result["JAX_COORDINATOR_ADDRESS"] == coordinator
    assert result.get("JAX_COORDINATOR_BIND_ADDRESS") == expected


def test_device_variables_of_the_job_win() -> None:
    base = {"JAX_PLATFORMS": "cuda", "JAX_NUM_CPU_DEVICES": "1"}
    result = environment.rank_variables(config(devices_per_process=4), base, 1, "/site")
    assert result.items() >= base.items()


@pytest.mark.parametrize("saved", [None, 0, 40])
def test_attempt_variables_have_the_saved_step(saved: int | None) -> None:
    result = environment.attempt_variables(3, "127.0.0.1:20001", None, saved)
    assert result.get("JAXLAUNCH_SAVED") == (None if saved is None else str(saved))


@pytest.mark.parametrize(
    ("timeouts", "wait"),
    [({}, "30"), ({"init": 20.0}, "10"), ({"init": None, "restore": 9.0}, "4.5")],
)
def test_storage_wait_is_within_the_timeouts_of_a_start(
    timeouts: dict[str, float | None], wait: str
) -> None:
    result = environment.rank_variables(config(timeouts_s=timeouts), {}, 0, "/site")
    assert result["JAXLAUNCH_STORAGE_WAIT"] == wait
