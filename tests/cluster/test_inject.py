"""The agent in images without jaxlaunch, and as PID 1 of a restricted pod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import PastLine, TailLine
from tests.cluster.access import Access
from tests.cluster.command import run_launcher, write_project
from tests.cluster.waiting import wait_until

# A program that knows nothing of us.
PSUM = """
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

jax.distributed.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("host",))
ranks = np.full(jax.local_device_count(), jax.process_index() + 1, np.float32)
ranks = jax.make_array_from_process_local_data(NamedSharding(mesh, P("host")), ranks)
psum = jax.shard_map(
    lambda x: jax.lax.psum(x, "host"), mesh=mesh, in_specs=P("host"), out_specs=P()
)
result = jax.jit(psum)(ranks).addressable_data(0)[0]
print("psum over", jax.process_count(), "processes:", float(result))
"""

MANNERS = """
import getpass, json, os, subprocess, time
started = subprocess.run(["sh", "-c", "sleep 0.2 & echo $!"], capture_output=True, text=True)
orphan = started.stdout.strip()
end = time.monotonic() + 60
while os.path.exists(f"/proc/{orphan}") and time.monotonic() < end:
    time.sleep(0.05)
def can_write(path):
    try:
        open(path, "w").close()
    except OSError:
        return False
    return True
print("found", json.dumps({
    "parent": os.getppid(), "user": getpass.getuser(), "uid": os.getuid(),
    "orphan": os.path.exists(f"/proc/{orphan}"),
    "home": can_write(os.path.expanduser("~/x")), "root": can_write("/x"),
    "token": os.path.exists("/var/run/secrets/kubernetes.io"),
}))
raise SystemExit(3)
"""


def list_pods(cluster: Access, namespace: str) -> list[dict[str, Any]]:
    items = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    assert isinstance(items, list)
    return items


def container_state(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the kubelet's state of the pod's only container."""
    return next((status["state"] for status in pod["status"].get("containerStatuses", [])), {})


def check_psum(cluster: Access, namespace: str, folder: Path, **job: object) -> None:
    """Check a program next to files that have names of jaxlaunch."""
    ours = (
        "trainer",
        "launcher",
        "jaxlaunch",
        "agent",
        "contract",
        "isolated",
        "records",
        "config",
    )
    files = {f"{name}.py": "raise SystemExit('not mine to run')" for name in ours}
    write_project(folder, namespace, {"train.py": PSUM, **files}, code=".", hosts=3, **job)
    result = run_launcher(cluster, folder, "submit", "job.yaml", "--wait", "--follow")
    assert result.returncode == 0, result.stderr
    for rank in range(3):
        assert f"[{rank}] psum over 3 processes: 6.0\n" in result.stdout


def test_unmodified_program_runs_in_an_image_without_jaxlaunch(
    cluster: Access, namespace: str, bare_image: str, tmp_path: Path
) -> None:
    check_psum(cluster, namespace, tmp_path, image=bare_image)
    assert {
        pod["spec"]["containers"][0]["command"][0] for pod in list_pods(cluster, namespace)
    } == {"python3"}


# What the image lacks of ours is `jaxlaunch.report`, which the agent brings.
HANGS = """
import time
import jaxlaunch
for step in range(1, 6):
    jaxlaunch.report(step=step)
time.sleep(3600)
"""


def test_hanging_program_is_named_in_an_image_without_jaxlaunch(
    cluster: Access, namespace: str, bare_image: str, tmp_path: Path
) -> None:
    keys = {
        "image": bare_image,
        "timeouts": {"step": "5s"},
        "restarts": {"crash": 0, "in_place": 0},
    }
    write_project(tmp_path, namespace, {"train.py": HANGS}, code=".", hosts=2, **keys)
    result = run_launcher(cluster, tmp_path, "submit", "job.yaml", "--wait", "--follow")
    assert result.returncode == 82, result.stderr
    output = result.stdout + result.stderr
    assert "the step timeout of 5 s passed first on rank" in output
    assert "no progress at step 5 " in output


def test_pid_1_reaps_orphans_and_names_an_unnamed_user(
    cluster: Access, namespace: str, base_image: str, tmp_path: Path
) -> None:
    restarts = {"crash": 0, "in_place": 0}
    write_project(
        tmp_path,
        namespace,
        {"train.py": MANNERS},
        code=".",
        image=base_image,
        hosts=2,
        restarts=restarts,
    )
    result = run_launcher(cluster, tmp_path, "submit", "job.yaml", "--wait", "--follow")
    assert result.returncode == 83, result.stderr
    match = (
        '{"parent": 1, "user": "jaxlaunch", "uid": 1000, "orphan": false, "home": true, '
        '"root": false, "token": '
    )
    assert match + "false}" in result.stdout


def test_every_remaining_pod_has_the_verdict(
    cluster: Access, namespace: str, base_image: str, tmp_path: Path
) -> None:
    program = (
        "import os, time\nif os.environ['JAX_PROCESS_ID'] == '1': raise "
        "ValueError('boom')\ntime.sleep(600)"
    )
    restarts = {"crash": 0, "in_place": 0}
    write_project(
        tmp_path,
        namespace,
        {"train.py": program},
        code=".",
        image=base_image,
        hosts=3,
        restarts=restarts,
    )
    result = run_launcher(cluster, tmp_path, "submit", "job.yaml", "--wait")
    assert result.returncode == 83, result.stderr
    reports = [
        log_lines.parse_termination_message(container_state(pod)["terminated"]["message"])
        for pod in list_pods(cluster, namespace)
    ]
    # The Job controller deletes pods that still end when it sees the first that failed.
    assert (
        reports
        and {report.host for report in reports if report is not None} <= {0, 1, 2}
        and None not in reports
    )
    assert {report.verdict.message for report in reports if report is not None} == {
        "rank 1 raised: ValueError: boom"
    }


def test_later_generation_reports_earlier_attempts(
    cluster: Access, namespace: str, checkpoints: Path, base_image: str, tmp_path: Path
) -> None:
    long = "é" * 4_000  # as JSON it is longer than what a container runtime keeps in one piece
    program = f"print('{long}')\nraise ValueError('boom')"
    defaults = {"defaults.yaml": "checkpoint: {claim: checkpoints, path: /checkpoints}"}
    restarts = {"crash": 1, "in_place": 0}
    write_project(
        tmp_path,
        namespace,
        {"train.py": program, **defaults},
        code=".",
        image=base_image,
        restarts=restarts,
    )
    result = run_launcher(
        cluster, tmp_path, "submit", "job.yaml", "--defaults", "defaults.yaml", "--wait"
    )
    # The same exception from the same place, twice, is final.
    assert result.returncode == 70, result.stderr
    (pod,) = list_pods(cluster, namespace)
    log = cluster.kubectl("logs", "-n", namespace, pod["metadata"]["name"])
    parsed_lines = [
        parsed for line in log.splitlines() if (parsed := log_lines.parse_line(line)) is not None
    ]
    total, attempt = (line for line in parsed_lines if isinstance(line, PastLine))
    assert (total.ends, total.unknown) == ({"crash": 1}, None)
    assert attempt.verdict is not None
    assert attempt.verdict.message == "rank 0 raised: ValueError: boom"
    assert attempt.generation == 0
    (tail,) = (line for line in parsed_lines if isinstance(line, TailLine))
    assert tail.rank == 0 and tail.lines[0] == long and tail.lines[-1] == "ValueError: boom"


def test_image_without_python_is_reported(cluster: Access, namespace: str, tmp_path: Path) -> None:
    write_project(
        tmp_path,
        namespace,
        {"train.py": ""},
        code=".",
        image="localhost/pause:1",
        restarts={"crash": 0},
    )
    assert run_launcher(cluster, tmp_path, "submit", "job.yaml").returncode == 0

    def find_message() -> str:
        states = [container_state(pod) for pod in list_pods(cluster, namespace)]
        return next(
            (
                str(waiting)
                for state in states
                for waiting in state.values()
                if "message" in waiting
            ),
            "",
        )

    message = wait_until(find_message, bool, "the kubelet's complaint")
    assert '"python3": executable file not found' in message
