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
        (
            {"platform": "cuda", "devices_per_process": 8},
            1,
            {"JAX_LOCAL_DEVICE_IDS": None, "JAX_PLATFORMS": None},
        ),
        (
            {"platform": "rocm", "processes_per_host": 8, "devices_per_process": 1},
            9,
            {"JAX_LOCAL_DEVICE_IDS": "1"},
        ),
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
def test_a_rank_finds_its_place_in_its_environment(
    fields: dict[str, Any], rank: int, expected: dict[str, str | None]
) -> None:
    found = environment.rank_variables(config(**fields), {"PYTHONPATH": "/code"}, rank, "/site")
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("own", "found"),
    [
        (
            {"LD_LIBRARY_PATH": "/opt/lib", "PATH": "/bin"},
            ("/driver/lib:/opt/lib", "/driver/bin:/bin"),
        ),
        ({}, ("/driver/lib", f"/driver/bin:{os.defpath}")),
    ],
)
def test_the_driver_is_found_before_what_the_image_searches(
    own: dict[str, str], found: tuple[str, str]
) -> None:
    paths = {"LD_LIBRARY_PATH": "/driver/lib", "PATH": "/driver/bin"}
    environ = environment.rank_variables(config(search_paths=paths), own, 0, "/site")
    assert (environ["LD_LIBRARY_PATH"], environ["PATH"]) == found


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
def test_xla_gets_the_optimization_level_of_the_accelerator_with_a_train_block(
    platform: str, base: dict[str, str], level: str | None
) -> None:
    assert (
        environment.rank_variables(config(platform=platform), base, 0, "/site").get(
            "JAX_OPTIMIZATION_LEVEL"
        )
        == level
    )


FAULTS = """
import resource, jax, jax.numpy as jnp
step = jax.jit(lambda x: (x @ x.T) @ x)  # by way of 64 MiB
x = jnp.ones((4096, 16))
def faults():
    step(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(min(-faults() + faults() for _ in range(4)))
"""


def test_the_memory_of_a_step_on_cpu_devices_is_kept_for_the_next_one() -> None:
    def faults(base: dict[str, str]) -> int:
        environ = environment.rank_variables(config(), {**os.environ, **base}, 0, "/site")
        return int(subprocess.check_output([sys.executable, "-c", FAULTS], env=environ))

    assert faults({contract.TRAIN_SPEC: "{}"}) < 0.1 * faults({})


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_share_of_the_memory_that_the_job_sets_is_the_only_one(name: str) -> None:
    found = environment.rank_variables(
        config(platform="cuda"), {contract.TRAIN_SPEC: "{}", name: "0.5"}, 0, "/site"
    )
    assert {key: value for key, value in found.items() if key.endswith("MEM_FRACTION")} == {
        name: "0.5"
    }


@pytest.mark.parametrize(
    ("coordinator", "listens", "expected"),
    [
        ("127.0.0.1:20001", "127.0.0.1", "127.0.0.1:20001"),
        ("digits-w-0-0.digits:20001", "10.1.2.3", "10.1.2.3:20001"),
        ("digits-w-0-0.digits:20001", "fd00::7", "[fd00::7]:20001"),
        ("digits-w-0-0.digits:20001", None, None),
    ],
)
def test_jaxs_coordinator_listens_at_the_address_of_host_0_alone(
    coordinator: str, listens: str | None, expected: str | None
) -> None:
    found = environment.attempt_variables(3, coordinator, listens)
    assert (found["JAX_COORDINATOR_ADDRESS"], found.get("JAX_COORDINATOR_BIND_ADDRESS")) == (
        coordinator,
        expected,
    )


def test_what_the_job_sets_for_jaxs_devices_wins() -> None:
    base = {"JAX_PLATFORMS": "cuda", "JAX_NUM_CPU_DEVICES": "1"}
    found = environment.rank_variables(config(devices_per_process=4), base, 1, "/site")
    assert found.items() >= base.items()


@pytest.mark.parametrize("saved", [None, 0, 40])
def test_a_process_knows_what_earlier_attempts_saved(saved: int | None) -> None:
    found = environment.attempt_variables(3, "127.0.0.1:20001", None, saved)
    assert found.get("JAXLAUNCH_SAVED") == (None if saved is None else str(saved))


@pytest.mark.parametrize(
    ("timeouts", "wait"),
    [({}, "30"), ({"init": 20.0}, "10"), ({"init": None, "restore": 9.0}, "4.5")],
)
def test_storage_is_waited_for_within_the_timeouts_of_a_start(
    timeouts: dict[str, float | None], wait: str
) -> None:
    found = environment.rank_variables(config(timeouts_s=timeouts), {}, 0, "/site")
    assert found["JAXLAUNCH_STORAGE_WAIT"] == wait
