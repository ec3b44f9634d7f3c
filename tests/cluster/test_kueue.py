"""A job in a queue of Kueue: held, admitted, preempted, stopped, and each time resumed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.launcher.diagnose.explain import explanation
from jaxlaunch.launcher.jobs.status import collect, hosts, job_status
from jaxlaunch.launcher.jobs.status.job_status import JobStatus, State
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import PODS, WORKLOADS
from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.command import PATIENCE_S, run_launcher, start_launcher, write_project
from tests.cluster.gangs import Gang, program_command, wait_for

EACH = {"cpu": "100m", "memory": "128Mi"}  # that a host asks for
TWO = {"cpu": "200m", "memory": "1Gi"}  # what the queue has: room for two hosts
WAITS = [
    "python",
    "-c",
    "import pathlib, time\nwhile not pathlib.Path('/ckpt/go').exists(): time.sleep(0.1)",
]
VOLUMES = [{"claim": "checkpoints", "path": "/ckpt"}]


class Queue:
    """A queue, and jobs that are submitted to it from a folder of their own."""

    def __init__(self, access: Access, namespace: str, folder: Path, image: str) -> None:
        self.access, self.namespace, self.folder, self.image = access, namespace, folder, image
        self.cluster = Cluster.connect()

    def write(self, name: str, command: list[str], **job: Any) -> Path:
        document = {
            "name": name,
            "image": self.image,
            "queue": "queue",
            "resources": EACH,
            "volumes": VOLUMES,
        }
        return write_project(
            self.folder / name, self.namespace, {}, **(document | job), command=command
        )

    def submit(self, name: str, command: list[str], **job: Any) -> Gang:
        done = run_launcher(self.access, self.write(name, command, **job), "submit", "job.yaml")
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"jobset.jobset.x-k8s.io/{name} created\n", done.stderr
        return Gang(self.cluster, self.namespace, name)

    def read_snapshot(self, name: str) -> Snapshot:
        return collect.read_snapshot(self.cluster, self.namespace, name)

    def state(self, name: str) -> State:
        return job_status.derive_status(self.read_snapshot(name)).state

    def wait_for_state(self, name: str, state: State) -> None:
        wait_for(f"{name} is {state.value}", lambda: self.state(name) is state)

    def wait_for_headline(self, name: str, pattern: str) -> str:
        """Wait until the first line of `launcher explain` matches, and return it."""

        def read_headline() -> str:
            line = explanation.explain_job(self.read_snapshot(name)).headline
            return line if re.search(pattern, line) else ""

        return wait_for(f"explain {name} says {pattern!r}", read_headline)


@pytest.fixture
def queue(
    cluster: Access,
    namespace: str,
    checkpoints: Path,
    tmp_path: Path,
    base_image: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Queue:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    preparations.make_queue(
        cluster, namespace, TWO, preemption={"withinClusterQueue": "LowerPriority"}
    )
    return Queue(cluster, namespace, tmp_path, base_image)


def test_job_waits_for_its_turn_and_then_runs(queue: Queue, checkpoints: Path) -> None:
    first = queue.submit("first", WAITS, hosts=2)
    first.wait_until_running()
    second = queue.submit("second", WAITS, hosts=2)
    queue.wait_for_state("second", State.QUEUED)
    assert second.jobset["spec"]["suspend"] is True
    assert second.pods == []
    (checkpoints / "go").touch()
    assert first.wait_for_end() == "Completed"
    assert second.wait_for_end() == "Completed"
    assert second.counters == (0, 0)


def test_job_of_a_higher_priority_preempts_one_that_resumes_later(
    queue: Queue, checkpoints: Path
) -> None:
    low = preparations.make_priority(queue.access, queue.namespace, 1)
    high = preparations.make_priority(queue.access, queue.namespace, 1000)
    victim = queue.submit("victim", program_command("counts.py", "/ckpt"), hosts=2, priority=low)
    victim.wait_until_running()
    victim.wait_for_line("begins at step 0")
    winner = queue.submit("winner", ["python", "-c", "print('quick')"], hosts=2, priority=high)
    assert winner.wait_for_end() == "Completed"
    saved = [int((checkpoints / f"count-{rank}").read_text()) for rank in range(2)]
    assert min(saved) > 0
    assert victim.wait_for_end() == "Completed"
    assert victim.wait_for_line("begins at step") in [f"begins at step {step}" for step in saved]
    assert victim.counters[1] == 0


def test_job_in_a_queue_is_stopped_and_resumed(queue: Queue, checkpoints: Path) -> None:
    gang = queue.submit("mine", program_command("counts.py", "/ckpt"), hosts=2)
    gang.wait_until_running()
    gang.wait_for_line("begins at step 0")
    stopped = run_launcher(queue.access, queue.folder, "stop", "mine", "-n", queue.namespace)
    assert stopped.returncode == 0, stopped.stderr
    assert "saved" in stopped.stderr
    assert queue.state("mine") is State.STOPPED
    (workload,) = queue.cluster.list(WORKLOADS, queue.namespace)
    assert workload["spec"]["active"] is False
    saved = int((checkpoints / "count-0").read_text())
    resumed = run_launcher(
        queue.access, queue.folder / "mine", "submit", "job.yaml", "--wait", "--follow"
    )
    assert resumed.returncode == 0
    assert resumed.stdout.splitlines()[0] == "jobset.jobset.x-k8s.io/mine resumed"
    assert f"[0] begins at step {saved}\n" in resumed.stdout
    assert gang.counters[1] == 0


def test_job_that_is_not_admitted_can_be_waited_for(queue: Queue, checkpoints: Path) -> None:
    queue.submit("first", WAITS, hosts=2).wait_until_running()
    folder = queue.write(
        "second", [*WAITS[:-1], WAITS[-1].replace("/go", "/seen") + "\nprint('my turn')"]
    )
    waited = run_launcher(queue.access, folder, "submit", "job.yaml", "--wait", "--timeout", "3s")
    assert waited.returncode == 124
    (checkpoints / "go").touch()
    with start_launcher(
        queue.access, folder, "submit", "job.yaml", "--wait", "--follow"
    ) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "jobset.jobset.x-k8s.io/second unchanged\n"
        (checkpoints / "seen").touch()  # not earlier: a job that has ended is not submitted again
        printed, _ = waiting.communicate(timeout=PATIENCE_S)
    assert (waiting.returncode, "[0] my turn\n" in printed) == (0, True), printed


# --- a job with roles -----------------------------------------------------------------------------

TRAINS = """
import os, pathlib, time
print('sampler at', os.environ['JAXLAUNCH_ROLE_SAMPLER_ADDRESSES'], flush=True)
while not pathlib.Path('/ckpt/end').exists(): time.sleep(0.1)
"""
SAMPLES = """
import os, socket, time
for name in os.environ['JAXLAUNCH_ROLE_TRAINER_ADDRESSES'].split(','):
    while True:
        try:
            socket.gethostbyname(name)
            break
        except OSError:
            time.sleep(0.1)
    print('found', name, flush=True)
while True: time.sleep(1)
"""
ROLES: dict[str, Any] = {
    "resources": {"cpu": "50m", "memory": "128Mi"},
    "restarts": {"in_place": 1, "crash": 2},
    "jobs": {
        "trainer": {"hosts": 2, "ends": True, "command": ["python", "-c", TRAINS]},
        "sampler": {"needs": {"trainer": "started"}, "command": ["python", "-c", SAMPLES]},
        "evaluator": {"may_fail": True, "command": ["python", "-c", "raise OSError('no data')"]},
    },
}


def test_roles_are_admitted_together_and_lose_pods_alone(queue: Queue, checkpoints: Path) -> None:
    first = queue.submit("first", WAITS, hosts=2)
    first.wait_until_running()
    folder = write_project(queue.folder / "roles", queue.namespace, {})
    document = yaml.safe_load((folder / "job.yaml").read_text()) | ROLES
    document |= {"name": "roles", "image": queue.image, "queue": "queue", "volumes": VOLUMES}
    del document["command"]
    (folder / "job.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    submitted = run_launcher(queue.access, folder, "submit", "job.yaml")
    assert submitted.returncode == 0, submitted.stderr
    gang = Gang(queue.cluster, queue.namespace, "roles")
    queue.wait_for_state("roles", State.QUEUED)
    assert gang.pods == []
    (checkpoints / "go").touch()

    def read_role(name: str) -> JobStatus:
        return job_status.derive_status(queue.read_snapshot("roles")).roles[name]

    def pods_of(name: str) -> dict[str, str]:
        """The uids of the running pods of a role by their names."""
        return {
            pod["metadata"]["name"]: pod["metadata"]["uid"]
            for pod in gang.pods
            if hosts.is_of_role(pod, name) and pod["status"]["phase"] == "Running"
        }

    wait_for("the evaluator fails", lambda: read_role("evaluator").state is State.FAILED)
    assert "OSError: no data" in (read_role("evaluator").verdict or {})["message"]
    wait_for("the trainer runs", lambda: read_role("trainer").state is State.RUNNING)
    wait_for("the sampler runs", lambda: read_role("sampler").state is State.RUNNING)
    trainer, sampler = pods_of("trainer"), pods_of("sampler")
    assert (len(trainer), len(sampler)) == (2, 1)

    queue.cluster.delete(PODS, *sampler, queue.namespace)
    wait_for("the sampler is replaced", lambda: pods_of("sampler").keys() - sampler.keys())
    sampler = pods_of("sampler")
    assert pods_of("trainer") == trainer

    lost, kept = max(trainer), min(trainer)
    queue.cluster.delete(PODS, lost, queue.namespace)
    wait_for("the trainer resumes", lambda: (read_role("trainer").attempt or 0) > 1)
    # The kubelet reports the pod after its agent has joined.
    wait_for("the new pod is reported", lambda: len(pods_of("trainer").keys() - {lost}) == 2)
    assert pods_of("trainer")[kept] == trainer[kept]
    assert pods_of("sampler") == sampler
    assert gang.counters == (0, 0)
    address = "found roles-trainer-0-1.roles"
    wait_for(
        "the sampler finds the trainer",
        lambda: address in _run(queue, "logs", "roles", "--role", "sampler"),
    )
    assert "role evaluator: failed" in _run(queue, "explain", "roles")

    (checkpoints / "end").touch()
    assert gang.wait_for_end() == "Completed"
    status = job_status.derive_status(queue.read_snapshot("roles"))
    assert (status.state, status.role) == (State.DONE, "trainer")
    states = {name: role.state for name, role in status.roles.items()}
    assert states == {
        "trainer": State.DONE,
        "sampler": State.STOPPED,
        "evaluator": State.FAILED,
    }


def _run(queue: Queue, *words: str) -> str:
    done = run_launcher(queue.access, queue.folder, *words, "-n", queue.namespace)
    assert done.returncode == 0, done.stderr
    return done.stdout
