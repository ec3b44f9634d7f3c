"""Seconds from the loss of a host to the next training step, on the cluster of tests/cluster.

Three hosts train the digits job and save every 10 steps. A failure is injected, and the time until
the next step is measured. The failures are: a killed process, which starts again in its pod; a
killed agent, which ends its pod; a pod that is deleted by force or evicted as in a drain, and
replaced alone, by a spare, or with its whole gang; and a deleted Job. Each row is the median of
`--rounds` failures. Each round has new jobs, because Kubernetes recreates the pod of a host after
10 s the first time, and after twice as long each further time.

The benchmark also checks that the training losses of every run are bitwise equal to those of an
undisturbed run, and prints the restarts that JobSet counted. `--queued` submits all jobs through
Kueue, and `--only agent` only measures the failures with that word.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.table import log_progress, median
from tests.cluster import nodes, preparations, processes
from tests.cluster.access import Access
from tests.cluster.gangs import PATIENCE_S, Gang, Workspace, make_workspace
from tests.cluster.harness import build, cluster, image, places
from tests.cluster.test_recovery import (
    SAVED,
    job_keys,
    newest_step,
    read_losses,
    wait_for_checkpoint,
)
from tests.cluster.waiting import wait_until
from tests.compiled import QUICK_COMPILES

HOSTS, STEPS = 3, 600
JOB = job_keys(STEPS, lr=1e-3)
ALONE: Mapping[str, Any] = {"hosts": HOSTS, "restarts": {"in_place": 9, "crash": 9}}
SPARE: Mapping[str, Any] = {**ALONE, "spares": 1}
WHOLE: Mapping[str, Any] = {"hosts": HOSTS, "restarts": {"in_place": 0, "crash": 9}}


class Failure(NamedTuple):
    """A failure to inject.

    Attributes:
        inject: Function that injects the failure into a pod.
        host: Index of the victim among the hosts with ranks.
    """

    inject: Callable[[Workspace, Gang, Any], None]
    host: int


def kill_trainer(workspace: Workspace, gang: Gang, pod: Any) -> None:
    processes.kill_processes(processes.find_trainer(pod))


def kill_agent(workspace: Workspace, gang: Gang, pod: Any) -> None:
    processes.kill_processes(processes.find_agent(pod))


def delete_pod(workspace: Workspace, gang: Gang, pod: Any) -> None:
    name = pod["metadata"]["name"]
    workspace.access.api.delete(
        f"/api/v1/namespaces/{workspace.namespace}/pods/{name}?gracePeriodSeconds=0"
    )


def drain_pod(workspace: Workspace, gang: Gang, pod: Any) -> None:
    nodes.evict_pod(workspace.access, workspace.namespace, pod["metadata"]["name"])


def delete_job(workspace: Workspace, gang: Gang, pod: Any) -> None:
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
    path = f"/apis/batch/v1/namespaces/{workspace.namespace}/jobs/{gang.name}-w-0"
    workspace.access.api.call("DELETE", path, options)


Gangs = Mapping[str, tuple[Mapping[str, Any], Mapping[str, Failure]]]

# Name of a job -> its keys, and the failures that are injected one after the other. The name of a
# row is that of the failure and of the job.
GANGS: Gangs = {
    "nothing": (WHOLE, {}),
    "alone": (
        ALONE,
        {
            "process": Failure(kill_trainer, 1),
            "pod deleted": Failure(delete_pod, 1),
            "drained": Failure(drain_pod, 2),
        },
    ),
    "alone, of a second job": (
        ALONE,
        {"agent killed": Failure(kill_agent, 1), "pod of host 0 deleted": Failure(delete_pod, 0)},
    ),
    "spare": (SPARE, {"pod deleted": Failure(delete_pod, 1), "drained": Failure(drain_pod, 2)}),
    "whole gang": (
        WHOLE,
        {
            "pod deleted": Failure(delete_pod, 1),
            "drained": Failure(drain_pod, 2),
            "Job deleted": Failure(delete_job, 0),
        },
    ),
}


class Run:
    """A running job that can be held between steps, and into which failures are injected.

    While a file exists on its volume, the job waits before its next batch. It is held most of the
    time, so that it does not finish before all failures have been injected.
    """

    def __init__(
        self, workspace: Workspace, volume: Path, name: str, keys: Mapping[str, Any]
    ) -> None:
        self._workspace, self.folder, self._hold_file = (
            workspace,
            volume / name,
            volume / f"{name}.hold",
        )
        env = {**QUICK_COMPILES, "HOLD": f"/checkpoints/{self._hold_file.name}"}
        self.gang = workspace.start(name, SAVED, env=env, **JOB, **keys)

    def measure_recovery(self, failure: Failure) -> float:
        """Inject a failure, and return the seconds until the next training step."""
        self.hold_after_save()
        pod = self.wait_for_pods()[failure.host]
        self.train_a_step()
        failed_at = time.time()
        failure.inject(self._workspace, self.gang, pod)
        wait_until(
            self._attempt_started_at, lambda at: at > failed_at, "the next attempt has begun", 600
        )
        end = time.monotonic() + PATIENCE_S
        # An attempt may also train after the failure until it ends, so only the steps of the next
        # one count.
        while not (
            new_steps := [at for at in self.step_times() if at > self._attempt_started_at()]
        ):
            assert time.monotonic() < end, (
                f"{self.gang.name} trains no step after a loss: {self.gang.read_lines()}"
            )
            time.sleep(0.02)
        # The remaining steps are needed for the next failures.
        self.hold()
        return new_steps[0] - failed_at

    def hold(self) -> None:
        """Let the run wait before its next batch."""
        self._hold_file.touch()

    def hold_after_save(self) -> None:
        """Let the run wait after its next save, unless it is already waiting."""
        if not self._hold_file.exists():
            wait_for_checkpoint(self.folder, after=newest_step(self.folder))
            self.hold()

    def train_a_step(self) -> None:
        """Let the run continue, and wait until it has trained a step."""
        released_at = time.time()
        self.release()
        wait_until(
            self.step_times, lambda times: times[-1] > released_at, "a step is under way", 600
        )

    def release(self) -> None:
        """Let the run continue."""
        self._hold_file.unlink(missing_ok=True)

    def wait_for_pods(self) -> Sequence[Any]:
        """Wait until the pods of all hosts are ready, and return those with ranks, by rank."""
        pods = wait_until(
            lambda: self.gang.pods, self._are_ready, f"all pods of {self.gang.name} are ready", 600
        )
        by_host = {pod_index(pod): pod for pod in pods if is_alive(pod)}
        status = json.loads(self._workspace.launcher("status", self.gang.name, "-o", "json").stdout)
        hosts = range(HOSTS) if status["members"] is None else parse_hosts(status["members"])
        return [by_host[host] for host in hosts]

    def _are_ready(self, pods: Sequence[Any]) -> bool:
        host_count = sum(
            job["template"]["spec"]["parallelism"]
            for job in self.gang.jobset["spec"]["replicatedJobs"]
        )
        return sum(map(is_alive, pods)) == host_count

    def _attempt_started_at(self) -> float:
        """Return the Unix time at which the newest attempt, or its leading agent, started."""
        attempt = json.loads((self.folder / ".jaxlaunch" / "summary.json").read_text())["of"]
        return float(attempt["started"])

    def step_times(self) -> list[float]:
        """Return when each recorded step was trained, in Unix seconds."""
        file = self.folder / ".jaxlaunch" / "metrics.jsonl"
        times = []
        for line in file.read_text().splitlines() if file.exists() else ():
            # The last line may be incomplete.
            with suppress(ValueError):
                times.append(json.loads(line)["time"])
        return times or [0.0]


def pod_index(pod: Any) -> int:
    return int(pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"])


def is_alive(pod: Any) -> bool:
    ready = any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in pod["status"].get("conditions", ())
    )
    return ready and "deletionTimestamp" not in pod["metadata"]


def parse_hosts(text: str) -> Iterator[int]:
    """Yield the hosts in a list such as `0-2,5`, as `status` writes it."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def choose_gangs(only: str) -> Gangs:
    """Return the jobs with a failure whose name contains `only`, and the undisturbed job."""
    gangs = dict[str, tuple[Mapping[str, Any], Mapping[str, Failure]]]()
    for name, (keys, failures) in GANGS.items():
        selected = {failure: failures[failure] for failure in failures if only in failure}
        if selected or not failures:
            gangs[name] = keys, selected
    return gangs


def measure_failures(
    workspace: Workspace, rounds: int, keys: Mapping[str, Any], gangs: Gangs
) -> dict[str, list[float]]:
    """Return the seconds of recovery in each round, by failure and job."""
    folder = preparations.make_claim(workspace.access, workspace.namespace, size="10Gi")
    seconds = dict[str, list[float]]()
    undisturbed: Mapping[int, float] = {}
    for number in range(rounds):
        for name, (keys_of_job, failures) in gangs.items():
            if not failures and number:
                continue
            run = Run(
                workspace,
                folder,
                f"{name.replace(',', '').replace(' ', '-')}-{number}",
                {**keys_of_job, **keys},
            )
            for failure_name, failure in failures.items():
                label = f"{failure_name}, {name}"
                recovery_s = run.measure_recovery(failure)
                seconds.setdefault(label, []).append(recovery_s)
                log_progress(f"{label}: {recovery_s:.1f} s; restarts {run.gang.counters}")
            run.release()
            assert run.gang.wait_for_end() == "Completed", run.gang.read_lines()
            undisturbed = undisturbed or read_losses(folder, run.folder.name)
            assert read_losses(folder, run.folder.name) == undisturbed, (
                f"{run.folder.name} has other losses"
            )
            workspace.launcher("delete", run.folder.name, "--yes")
    return seconds


@contextmanager
def open_workspace() -> Iterator[Workspace]:
    """Yield a workspace on the tests' cluster, which is started if necessary, with our image."""
    with cluster.use_cluster():
        access = Access(places.ADMIN, build.programs_folder() / "kubectl", is_ours=True)
        image.load_image()
        with make_workspace(access, image.IMAGE) as workspace:
            yield workspace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", default="", metavar="WORD", help="measure the losses whose name has this word"
    )
    parser.add_argument("--queued", action="store_true", help="submit all jobs through Kueue")
    arguments = parser.parse_args()
    with open_workspace() as workspace:
        keys = {}
        if arguments.queued:
            preparations.make_queue(
                workspace.access, workspace.namespace, {"cpu": "1", "memory": "8Gi"}
            )
            keys = {"queue": "queue"}
        seconds_by_failure = measure_failures(
            workspace, arguments.rounds, keys, choose_gangs(arguments.only)
        )
    print("| lost, and replaced | seconds until the next step | all |\n|---|---|---|")
    for name, seconds in seconds_by_failure.items():
        print(
            f"| {name} | {median(seconds):.1f} | "
            f"{' '.join(f'{value:.1f}' for value in sorted(seconds))} |"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
