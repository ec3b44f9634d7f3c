"""The agent in images that hold nothing of ours, and how it bears itself as PID 1 of a restricted pod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import PastLine, TailLine
from tests.cluster.access import Access
from tests.cluster.command import launcher, project
from tests.cluster.waiting import until

# A program that knows nothing of us.
PSUM = """
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

jax.distributed.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("host",))
ranks = np.full(jax.local_device_count(), jax.process_index() + 1, np.float32)
ranks = jax.make_array_from_process_local_data(NamedSharding(mesh, P("host")), ranks)
psum = jax.shard_map(lambda x: jax.lax.psum(x, "host"), mesh=mesh, in_specs=P("host"), out_specs=P())
print("psum over", jax.process_count(), "processes:", float(jax.jit(psum)(ranks).addressable_data(0)[0]))
"""

MANNERS = """
import getpass, json, os, subprocess, time
orphan = subprocess.run(["sh", "-c", "sleep 0.2 & echo $!"], capture_output=True, text=True).stdout.strip()
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
    "parent": os.getppid(), "user": getpass.getuser(), "uid": os.getuid(), "orphan": os.path.exists(f"/proc/{orphan}"),
    "home": can_write(os.path.expanduser("~/x")), "root": can_write("/x"),
    "token": os.path.exists("/var/run/secrets/kubernetes.io"),
}))
raise SystemExit(3)
"""


def pods(cluster: Access, namespace: str) -> list[dict[str, Any]]:
    found = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    assert isinstance(found, list)
    return found


def state(pod: dict[str, Any]) -> dict[str, Any]:
    """What the kubelet says of the pod's only container."""
    return next((one["state"] for one in pod["status"].get("containerStatuses", [])), {})


def check_psum(cluster: Access, namespace: str, folder: Path, **job: object) -> None:
    """Beside the program lie files that have names of ours."""
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
    project(folder, namespace, {"train.py": PSUM, **files}, code=".", hosts=3, **job)
    ended = launcher(cluster, folder, "submit", "job.yaml", "--wait", "--follow")
    assert ended.returncode == 0, ended.stderr
    for rank in range(3):
        assert f"[{rank}] psum over 3 processes: 6.0\n" in ended.stdout


def test_an_unmodified_program_runs_where_nothing_is_ours(
    cluster: Access, namespace: str, bare_image: str, tmp_path: Path
) -> None:
    check_psum(cluster, namespace, tmp_path, image=bare_image)
    assert {pod["spec"]["containers"][0]["command"][0] for pod in pods(cluster, namespace)} == {
        "python3"
    }


# What the image lacks of ours is `jaxlaunch.report`, which the agent brings.
HANGS = """
import time
import jaxlaunch
for step in range(1, 6):
    jaxlaunch.report(step=step)
time.sleep(3600)
"""


def test_a_program_that_reports_and_hangs_is_named_with_its_step_where_nothing_is_ours(
    cluster: Access, namespace: str, bare_image: str, tmp_path: Path
) -> None:
    keys = {
        "image": bare_image,
        "timeouts": {"step": "5s"},
        "restarts": {"crash": 0, "in_place": 0},
    }
    project(tmp_path, namespace, {"train.py": HANGS}, code=".", hosts=2, **keys)
    ended = launcher(cluster, tmp_path, "submit", "job.yaml", "--wait", "--follow")
    assert ended.returncode == 82, ended.stderr
    said = ended.stdout + ended.stderr
    assert "the step timeout of 5 s passed first on rank" in said
    assert "no progress at step 5 " in said


def test_pid_1_reaps_orphans_and_a_user_without_a_name_has_one(
    cluster: Access, namespace: str, base_image: str, tmp_path: Path
) -> None:
    restarts = {"crash": 0, "in_place": 0}
    project(
        tmp_path,
        namespace,
        {"train.py": MANNERS},
        code=".",
        image=base_image,
        hosts=2,
        restarts=restarts,
    )
    ended = launcher(cluster, tmp_path, "submit", "job.yaml", "--wait", "--follow")
    assert ended.returncode == 83, ended.stderr
    found = (
        '{"parent": 1, "user": "jaxlaunch", "uid": 1000, "orphan": false, "home": true, '
        '"root": false, "token": '
    )
    assert found + "false}" in ended.stdout


def test_every_pod_that_is_left_has_the_verdict(
    cluster: Access, namespace: str, base_image: str, tmp_path: Path
) -> None:
    program = (
        "import os, time\nif os.environ['JAX_PROCESS_ID'] == '1': raise "
        "ValueError('boom')\ntime.sleep(600)"
    )
    restarts = {"crash": 0, "in_place": 0}
    project(
        tmp_path,
        namespace,
        {"train.py": program},
        code=".",
        image=base_image,
        hosts=3,
        restarts=restarts,
    )
    ended = launcher(cluster, tmp_path, "submit", "job.yaml", "--wait")
    assert ended.returncode == 83, ended.stderr
    left = [
        log_lines.parse_termination_message(state(pod)["terminated"]["message"])
        for pod in pods(cluster, namespace)
    ]
    # The Job controller deletes pods that still end when it sees the first that failed.
    assert left and {one.host for one in left if one is not None} <= {0, 1, 2} and None not in left
    assert {one.verdict.message for one in left if one is not None} == {
        "rank 1 raised: ValueError: boom"
    }


def test_a_later_generation_tells_what_the_pods_before_it_knew(
    cluster: Access, namespace: str, checkpoints: Path, base_image: str, tmp_path: Path
) -> None:
    long = "é" * 4_000  # as JSON it is longer than what a container runtime keeps in one piece
    program = f"print('{long}')\nraise ValueError('boom')"
    defaults = {"defaults.yaml": "checkpoint: {claim: checkpoints, path: /checkpoints}"}
    restarts = {"crash": 1, "in_place": 0}
    project(
        tmp_path,
        namespace,
        {"train.py": program, **defaults},
        code=".",
        image=base_image,
        restarts=restarts,
    )
    ended = launcher(
        cluster, tmp_path, "submit", "job.yaml", "--defaults", "defaults.yaml", "--wait"
    )
    # The same exception from the same place, twice, is final.
    assert ended.returncode == 70, ended.stderr
    (pod,) = pods(cluster, namespace)
    log = cluster.kubectl("logs", "-n", namespace, pod["metadata"]["name"])
    said = [found for line in log.splitlines() if (found := log_lines.parse_line(line)) is not None]
    total, one = (line for line in said if isinstance(line, PastLine))
    assert (total.ends, total.unknown) == ({"crash": 1}, None)
    assert one.verdict is not None
    assert one.verdict.message == "rank 0 raised: ValueError: boom"
    assert one.generation == 0
    (tail,) = (line for line in said if isinstance(line, TailLine))
    assert tail.rank == 0 and tail.lines[0] == long and tail.lines[-1] == "ValueError: boom"


def test_an_image_without_python_says_what_it_lacks(
    cluster: Access, namespace: str, tmp_path: Path
) -> None:
    project(
        tmp_path,
        namespace,
        {"train.py": ""},
        code=".",
        image="localhost/pause:1",
        restarts={"crash": 0},
    )
    assert launcher(cluster, tmp_path, "submit", "job.yaml").returncode == 0

    def complaint() -> str:
        said = [state(pod) for pod in pods(cluster, namespace)]
        return next(
            (str(found) for one in said for found in one.values() if "message" in found), ""
        )

    said = until(complaint, bool, "the kubelet's complaint")
    assert '"python3": executable file not found' in said
