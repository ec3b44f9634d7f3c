"""Seconds from the loss of a host to the next step, on the cluster of tests/cluster.

Three hosts train the digits job and save every 10 steps. Each row is the median of `--rounds`
losses: of a process, which starts again in its pod; of an agent, which ends its pod; of a pod that
is deleted with force or evicted as by a drain, and replaced alone, by a spare or with its whole
gang; of the Job. Each round has jobs of its own: Kubernetes makes a pod again 10 s after its host's
first loss, and twice as long after each further one. Also seen: that the losses of every run are to
the bit those of a run that lost nothing, and what JobSet counted. `--queued` submits all jobs
through Kueue, `--only agent` measures the losses with that word alone.
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


class Strike(NamedTuple):
    """A loss, and its victim: the place of a host among those that hold ranks."""

    what: Callable[[Workspace, Gang, Any], None]
    place: int


def strike_process(workspace: Workspace, gang: Gang, pod: Any) -> None:
    processes.kill_processes(processes.find_trainer(pod))


def strike_agent(workspace: Workspace, gang: Gang, pod: Any) -> None:
    processes.kill_processes(processes.find_agent(pod))


def delete_pod(workspace: Workspace, gang: Gang, pod: Any) -> None:
    name = pod["metadata"]["name"]
    workspace.access.api.delete(
        f"/api/v1/namespaces/{workspace.namespace}/pods/{name}?gracePeriodSeconds=0"
    )


def drain_pod(workspace: Workspace, gang: Gang, pod: Any) -> None:
    nodes.evict_pod(workspace.access, workspace.namespace, pod["metadata"]["name"])


def restart_job(workspace: Workspace, gang: Gang, pod: Any) -> None:
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
    path = f"/apis/batch/v1/namespaces/{workspace.namespace}/jobs/{gang.name}-w-0"
    workspace.access.api.call("DELETE", path, options)


Gangs = Mapping[str, tuple[Mapping[str, Any], Mapping[str, Strike]]]

# By job: its keys, and what it loses, one after the other. Each row's name is that of the loss and
# of the job.
GANGS: Gangs = {
    "nothing": (WHOLE, {}),
    "alone": (
        ALONE,
        {
            "process": Strike(strike_process, 1),
            "pod deleted": Strike(delete_pod, 1),
            "drained": Strike(drain_pod, 2),
        },
    ),
    "alone, of a second job": (
        ALONE,
        {"agent killed": Strike(strike_agent, 1), "pod of host 0 deleted": Strike(delete_pod, 0)},
    ),
    "spare": (SPARE, {"pod deleted": Strike(delete_pod, 1), "drained": Strike(drain_pod, 2)}),
    "whole gang": (
        WHOLE,
        {
            "pod deleted": Strike(delete_pod, 1),
            "drained": Strike(drain_pod, 2),
            "Job deleted": Strike(restart_job, 0),
        },
    ),
}


class Run:
    """One of the jobs, which is struck and watched."""

    def __init__(
        self, workspace: Workspace, volume: Path, name: str, keys: Mapping[str, Any]
    ) -> None:
        self._here, self.folder, self._hold = workspace, volume / name, volume / f"{name}.hold"
        env = {**QUICK_COMPILES, "HOLD": f"/checkpoints/{self._hold.name}"}
        self.gang = workspace.start(name, SAVED, env=env, **JOB, **keys)

    def struck(self, strike: Strike) -> float:
        """Strike the run and return the seconds until the next trained step."""
        self.hold_after_save()
        pod = self.ready()[strike.place]
        self.steps_on()
        struck = time.time()
        strike.what(self._here, self.gang, pod)
        wait_until(self._begun, lambda at: at > struck, "the next attempt has begun", 600)
        end = time.monotonic() + PATIENCE_S
        while not (
            steps_after := [at for at in self.times() if at > self._begun()]
        ):  # the last one may train until it ends
            assert time.monotonic() < end, (
                f"{self.gang.name} trains no step after a loss: {self.gang.read_lines()}"
            )
            time.sleep(0.02)
        self.hold()  # soon: its steps are few, for the losses that are still to come
        return steps_after[0] - struck

    def hold(self) -> None:
        """Hold the run before its next batch."""
        self._hold.touch()

    def hold_after_save(self) -> None:
        """Hold the run, if it is not held, once it has saved."""
        if not self._hold.exists():
            wait_for_checkpoint(self.folder, after=newest_step(self.folder))
            self.hold()

    def steps_on(self) -> None:
        """Let the run train until it has taken a step."""
        first = time.time()
        self.release()
        wait_until(self.times, lambda times: times[-1] > first, "a step is under way", 600)

    def release(self) -> None:
        """Let the run train to its end."""
        self._hold.unlink(missing_ok=True)

    def ready(self) -> Sequence[Any]:
        """Return the pods of hosts that hold ranks, by rank, once every host is there."""
        pods = wait_until(
            lambda: self.gang.pods, self._are_ready, f"all pods of {self.gang.name} are ready", 600
        )
        by_host = {pod_index(pod): pod for pod in pods if is_alive(pod)}
        status = json.loads(self._here.launcher("status", self.gang.name, "-o", "json").stdout)
        hosts = range(HOSTS) if status["members"] is None else parse_hosts(status["members"])
        return [by_host[host] for host in hosts]

    def _are_ready(self, pods: Sequence[Any]) -> bool:
        host_count = sum(
            job["template"]["spec"]["parallelism"]
            for job in self.gang.jobset["spec"]["replicatedJobs"]
        )
        return sum(map(is_alive, pods)) == host_count

    def _begun(self) -> float:
        """Return when the newest attempt began, or the agent that leads it."""
        attempt = json.loads((self.folder / ".jaxlaunch" / "summary.json").read_text())["of"]
        return float(attempt["started"])

    def times(self) -> list[float]:
        """Return when each recorded step was trained."""
        file = self.folder / ".jaxlaunch" / "metrics.jsonl"
        times = []
        for line in file.read_text().splitlines() if file.exists() else ():
            with suppress(ValueError):  # it is being written
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
    """Return the hosts that `status` writes as `0-2,5`."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def choose_gangs(only: str) -> Gangs:
    """Return the jobs with a loss that contains this word, and the one without a loss."""
    gangs = dict[str, tuple[Mapping[str, Any], Mapping[str, Strike]]]()
    for name, (keys, strikes) in GANGS.items():
        if (losses := {loss: strikes[loss] for loss in strikes if only in loss}) or not strikes:
            gangs[name] = keys, losses
    return gangs


def measure_losses(
    workspace: Workspace, rounds: int, keys: Mapping[str, Any], gangs: Gangs
) -> dict[str, list[float]]:
    """Return the seconds of every loss, by what was lost and how it was replaced."""
    folder = preparations.make_claim(workspace.access, workspace.namespace, size="10Gi")
    seconds = dict[str, list[float]]()
    undisturbed: Mapping[int, float] = {}
    for number in range(rounds):
        for name, (keys_of_job, strikes) in gangs.items():
            if not strikes and number:
                continue
            run = Run(
                workspace,
                folder,
                f"{name.replace(',', '').replace(' ', '-')}-{number}",
                {**keys_of_job, **keys},
            )
            for loss, strike in strikes.items():
                seconds.setdefault(f"{loss}, {name}", []).append(run.struck(strike))
                log_progress(
                    f"{loss}, {name}: {seconds[f'{loss}, {name}'][-1]:.1f} s; restarts "
                    f"{run.gang.counters}"
                )
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
    """Open the tests' cluster, started if necessary, as a workspace with the product's image."""
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
        seconds_by_loss = measure_losses(
            workspace, arguments.rounds, keys, choose_gangs(arguments.only)
        )
    print("| lost, and replaced | seconds until the next step | all |\n|---|---|---|")
    for name, seconds in seconds_by_loss.items():
        print(
            f"| {name} | {median(seconds):.1f} | "
            f"{' '.join(f'{value:.1f}' for value in sorted(seconds))} |"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
