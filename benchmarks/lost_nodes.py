"""The consequences of the loss of a node, by the second: `python -m benchmarks.lost_nodes`.

Three hosts train the digits job on two nodes, one of them on a node of its own
(tests/cluster/harness/second_node), and save every 10 steps. That node loses its kubelet, which
stops what Kubernetes knows of it and nothing that runs there; or it is gone: no packet leaves it,
its kubelet, its containerd and its processes end, and its Node object is deleted once it is not
ready, as a cloud's controller does. It is not ready after 50 s, Kubernetes' default. Each is seen
alone and with a spare. For each the seconds from the loss to what followed: the gang's own end of
the attempt, the node not ready, its pod deleted, the pod's object gone, another pod, the next step.
The losses must be to the bit those of a run that lost nothing.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.lost_hosts import ALONE, SPARE, WHOLE, Run, open_workspace, pod_index
from benchmarks.table import log_progress
from tests.cluster import preparations, processes
from tests.cluster.gangs import Workspace
from tests.cluster.harness import build, image, images, second_node
from tests.cluster.harness.api import RefusedError
from tests.cluster.test_recovery import read_losses
from tests.cluster.waiting import wait_until
from tests.gang.run_files import RunFiles

PATIENCE_S = 400.0
Seen = dict[str, float]  # seconds from the loss, by what followed


class Watch:
    """The consequences of a loss, each with the seconds until it was there."""

    def __init__(self, run: Run, pod: Any, *, is_silent: bool) -> None:
        self.run, self.pod, self.is_silent, self.seen = run, pod, is_silent, Seen()
        self.files = RunFiles(run.folder / ".jaxlaunch")
        self._number, self.began = len(self.files.records()), time.time()
        self._first = {pod["metadata"]["uid"] for pod in run.gang.pods}

    def look(self) -> Seen:
        """Record what is new."""
        current_time, pods = time.time() - self.began, self.run.gang.pods
        if (
            self.is_silent
            and current_time > second_node.GRACE_S
            and "node not ready" not in self.seen
        ):
            second_node.mark_unknown()
        own_pods = [pod for pod in pods if pod["metadata"]["uid"] == self.pod["metadata"]["uid"]]
        ended_attempts = self.files.records()[self._number :]
        steps = [
            at for at in self.run.times() if ended_attempts and at > ended_attempts[0]["ended"]
        ]
        observations = {
            "attempt ended": ended_attempts[0]["ended"] - self.began if ended_attempts else None,
            "node not ready": current_time
            if self.is_silent and second_node.ready_condition() in ("Unknown", "False", "")
            else None,
            "pod deleted": current_time
            if not own_pods or "deletionTimestamp" in own_pods[0]["metadata"]
            else None,
            "pod's object gone": current_time if not own_pods else None,
            "another pod": current_time
            if any(pod["metadata"]["uid"] not in self._first for pod in pods)
            else None,
            "next step": steps[0] - self.began if steps else None,
        }
        for name, at in observations.items():
            if at is not None and name not in self.seen:
                self.seen[name] = round(at, 1)
                log_progress(f"{self.run.gang.name}: {name} after {at:.1f} s")
        return self.seen


def find_victim(run: Run, *, spares: int) -> Any:
    """Return the pod on the second node once the run has saved.

    None if it holds no rank, or if it leads and no spare can.
    """
    # By then it is settled who holds ranks: a pod that came last may be the spare.
    run.hold_after_save()
    ready_pods = run.ready()[1 if spares else 0 :]
    return next((pod for pod in ready_pods if pod["spec"]["nodeName"] == second_node.NODE), None)


def silence_kubelet(workspace: Workspace, run: Run, pod: Any, home: Path) -> Seen:
    """Stop the kubelet until its pod is deleted, and start it again; the training is held."""
    watch = Watch(run, pod, is_silent=True)
    second_node.stop_kubelet()
    run.steps_on()
    watch.seen["a step"] = round(run.times()[-1] - watch.began, 1)
    run.hold()
    wait_until(watch.look, lambda seen: "pod deleted" in seen, "its pod is deleted", PATIENCE_S)
    run.steps_on()
    watch.seen["a step after that"] = round(run.times()[-1] - watch.began, 1)
    assert "attempt ended" not in watch.look(), watch.files.records()
    back = Watch(run, pod, is_silent=False)
    second_node.start_kubelet(home)
    wait_until(back.look, lambda seen: "next step" in seen, "a next step", PATIENCE_S)
    return {
        **watch.seen,
        **{f"{name}, from the kubelet's start on": at for name, at in back.seen.items()},
    }


def lose_node(workspace: Workspace, run: Run, pod: Any, home: Path) -> Seen:
    """Lose the node; delete its object once it is not ready."""
    watch = Watch(run, pod, is_silent=True)
    second_node.lose_node(processes.find_processes(pod))
    wait_until(
        watch.look, lambda seen: "node not ready" in seen, "the node is not ready", PATIENCE_S
    )
    with suppress(RefusedError):
        workspace.access.api.delete(second_node.PATH)
    expected = {"next step", "another pod", "pod's object gone"}

    def is_whole(seen: Seen) -> bool:
        # With a spare it may end before.
        return expected <= seen.keys() or bool(run.gang.status.get("terminalState"))

    wait_until(watch.look, is_whole, "the gang is whole", PATIENCE_S)
    return watch.seen


LOSSES: Mapping[str, Callable[[Workspace, Run, Any, Path], Seen]] = {
    "kubelet stopped": silence_kubelet,
    "node gone": lose_node,
}
TOLERATES: Mapping[str, Any] = {"tolerations": [{"key": second_node.TAINT, "operator": "Exists"}]}
# A rank that got its batch just before the others were held waits for them in its step, which is no
# hang.
WAITS: Mapping[str, Any] = {**TOLERATES, "timeouts": {"step": "20m"}}
JOBS: Mapping[str, Mapping[str, Any]] = {"alone": {**ALONE, **WAITS}, "spare": {**SPARE, **WAITS}}


def measure_loss(
    workspace: Workspace,
    volume: Path,
    home: Path,
    loss: str,
    job: str,
    undisturbed: Mapping[int, float],
) -> Seen:
    """Measure one loss of one job."""
    with second_node.join_node(home, image.IMAGE, images.BASE):
        for number in itertools.count():
            run = Run(
                workspace, volume, f"{loss} {job}".replace(" ", "-") + f"-{number}", JOBS[job]
            )
            if (pod := find_victim(run, spares=JOBS[job].get("spares", 0))) is not None:
                break
            workspace.launcher("delete", run.gang.name, "--yes")  # another try
        log_progress(f"{run.gang.name}: host {pod_index(pod)} is on {second_node.NODE}")
        run.steps_on()
        observations = LOSSES[loss](workspace, run, pod, home)
        run.release()
        assert run.gang.wait_for_end() == "Completed", run.gang.read_lines()
        log_progress(f"{run.gang.name}: restarts {run.gang.counters}")
        assert read_losses(volume, run.folder.name) == undisturbed, (
            f"{run.folder.name} has other losses"
        )
        workspace.launcher("delete", run.gang.name, "--yes")
    return observations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help="what has this word in its name")
    arguments = parser.parse_args()
    with open_workspace() as workspace:
        home = build.build_programs()
        volume = preparations.make_claim(workspace.access, workspace.namespace, size="10Gi")
        nothing = Run(workspace, volume, "nothing", WHOLE)
        assert nothing.gang.wait_for_end() == "Completed", nothing.gang.read_lines()
        undisturbed = read_losses(volume, "nothing")
        results = {
            f"{loss}, {job}": measure_loss(workspace, volume, home, loss, job, undisturbed)
            for loss in LOSSES
            for job in JOBS
            if arguments.only in f"{loss}, {job}"
        }
    print("| lost | what followed, in seconds from the loss |\n|---|---|")
    for name, seen in results.items():
        print(f"| {name} | {', '.join(f'{loss} {at:g}' for loss, at in seen.items())} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
