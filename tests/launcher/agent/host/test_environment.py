"""The environment variables of a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract, isolated
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
    ("job", "shell", "user_path"),
    [
        ({}, {}, ""),
        ({contract.CODE_ROOT: "/code"}, {"PYTHONPATH": "src:lib"}, "/code:src:lib"),
        ({contract.CODE_ROOT: "/home/me/project"}, {}, "/home/me/project"),
        ({}, {"PYTHONPATH": "/opt/lib"}, "/opt/lib"),
    ],
)
@pytest.mark.parametrize("command", [None, ("python", "train.py")])
def test_code_of_the_job_comes_before_its_search_path(
    command: tuple[str, ...] | None, job: dict[str, str], shell: dict[str, str], user_path: str
) -> None:
    result = environment.rank_variables(config(command=command), job | shell, 0, "/site")
    if command is None:
        assert (result["PYTHONPATH"], result[isolated.USER_PATH]) == ("/site", user_path)
    else:
        assert result["PYTHONPATH"] == ":".join(filter(None, ("/site", user_path)))


@pytest.mark.parametrize(
    ("folder", "is_searched"), [("tools", False), ("tools/nested", False), ("tools-2", True)]
)
def test_only_the_folder_of_the_script_is_not_searched(
    tmp_path: Path, folder: str, is_searched: bool
) -> None:
    script = tmp_path / "tools" / "isolated.py"
    for path in (tmp_path / folder, script.parent):
        path.mkdir(parents=True, exist_ok=True)
    script.write_text(Path(isolated.__file__).read_text())
    (tmp_path / folder / "probe.py").write_text("print('imported')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / folder)}
    command = [sys.executable, str(script), "probe"]
    process = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (process.stdout == "imported\n") is is_searched, process.stderr


POD = {
    contract.LEADER: "six-w-0-0.six:9401",
    contract.POD_IP: "10.1.2.3",
    contract.NODE: "node-1",
}
GANG = "localhost,127.0.0.1,::1,six-w-0-0.six,10.1.2.3,.six,.six.team.svc.cluster.local"
NETWORKS = "localhost,.svc,.cluster.local,10.0.0.0/8"


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "http_proxy", "grpc_proxy", "ALL_PROXY"])
@pytest.mark.parametrize(
    ("exceptions", "expected"),
    [
        ({}, (GANG, GANG, GANG)),
        (
            {"no_proxy": NETWORKS, "NO_PROXY": "example.org"},
            (
                f"{NETWORKS},{GANG.removeprefix('localhost,')}",
                f"example.org,{GANG}",
                f"{NETWORKS},{GANG.removeprefix('localhost,')}",
            ),
        ),
        ({"NO_PROXY": "example.org"}, (f"example.org,{GANG}",) * 3),
        (
            {"no_proxy": "a.org", "no_grpc_proxy": "b.org"},
            (f"a.org,{GANG}", f"a.org,{GANG}", f"b.org,{GANG}"),
        ),
        ({"NO_PROXY": "*"}, ("*", "*", f"*,{GANG}")),
    ],
)
def test_hosts_of_the_gang_are_excepted_from_proxies(
    name: str,
    exceptions: dict[str, str],
    expected: tuple[str, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("search team.svc.cluster.local svc.cluster.local\nnameserver 10.96.0.10\n")
    monkeypatch.setattr(environment, "RESOLVER_FILE", str(resolver))
    base = POD | {name: "http://10.77.0.99:3128"} | exceptions
    result = environment.rank_variables(config(), base, 1, "/site")
    assert (result["no_proxy"], result["NO_PROXY"], result["no_grpc_proxy"]) == expected
    assert result[name] == "http://10.77.0.99:3128"


def test_exceptions_without_a_proxy_stay_as_they_are() -> None:
    base = POD | {"no_proxy": "a.org", "https_proxy": " "}
    result = environment.rank_variables(config(), base, 1, "/site")
    assert result["no_proxy"] == "a.org"
    assert not result.keys() & {"NO_PROXY", "no_grpc_proxy"}


def test_hosts_of_a_tpu_slice_are_excepted_too() -> None:
    base = {
        "https_proxy": "http://10.77.0.99:3128",
        "TPU_WORKER_HOSTNAMES": "a-w-0-0.a,a-w-0-1.a",
        "MEGASCALE_COORDINATOR_ADDRESS": "a-w-0-0.a:8081",
    }
    result = environment.rank_variables(config(platform="tpu"), base, 1, "/site")
    assert result["no_proxy"] == "localhost,127.0.0.1,::1,a-w-0-0.a,a-w-0-1.a"


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
