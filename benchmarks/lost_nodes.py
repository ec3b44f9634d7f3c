"""Timeline of events after the loss of a node: `python -m benchmarks.lost_nodes`.

Three hosts train the digits job on two nodes, one of them alone on the second node
(tests/cluster/harness/second_node.py), and save every 10 steps. In one case the kubelet of that
node is stopped: Kubernetes loses sight of the node, but everything on it continues. In the other
case the node is lost: no packet leaves it, its kubelet, containerd and processes end, and its Node
object is deleted when it is not ready, as the controller of a cloud does. A node is not ready after
50 s, the default of Kubernetes. Both cases are measured without and with a spare host.

The table has the seconds from the loss until each event: the agents end the attempt, the node is
not ready, its pod is deleted, the pod's object is gone, there is another pod, and the next step is
trained. The training losses must be bitwise equal to those of an undisturbed run.
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
# Seconds from the loss until each event.
Timeline = dict[str, float]


class Watch:
    """Records the events after a loss.

    Attributes:
        run: The run.
        pod: The pod on the second node.
        is_silent: Whether the kubelet of the node no longer reports.
        started_at: Time of the loss, in Unix seconds.
        timeline: The events so far.
    """

    def __init__(self, run: Run, pod: Any, *, is_silent: bool) -> None:
        self.run, self.pod, self.is_silent, self.timeline = run, pod, is_silent, Timeline()
        self.files = RunFiles(run.folder / ".jaxlaunch")
        self._attempts, self.started_at = len(self.files.records()), time.time()
        self._first_uids = {pod["metadata"]["uid"] for pod in run.gang.pods}

    def update(self) -> Timeline:
        """Add the new events to the timeline, and return it."""
        elapsed_s, pods = time.time() - self.started_at, self.run.gang.pods
        is_grace_over = elapsed_s > second_node.GRACE_S
        if self.is_silent and is_grace_over and "node not ready" not in self.timeline:
            second_node.mark_unknown()
        own_pods = [pod for pod in pods if pod["metadata"]["uid"] == self.pod["metadata"]["uid"]]
        ended_attempts = self.files.records()[self._attempts :]
        ended_at = ended_attempts[0]["ended"] if ended_attempts else None
        steps = [at for at in self.run.step_times() if ended_at is not None and at > ended_at]
        is_not_ready = self.is_silent and second_node.ready_condition() in ("Unknown", "False", "")
        is_deleted = not own_pods or "deletionTimestamp" in own_pods[0]["metadata"]
        has_new_pod = any(pod["metadata"]["uid"] not in self._first_uids for pod in pods)
        events = {
            "attempt ended": None if ended_at is None else ended_at - self.started_at,
            "node not ready": elapsed_s if is_not_ready else None,
            "pod deleted": elapsed_s if is_deleted else None,
            "pod's object gone": None if own_pods else elapsed_s,
            "another pod": elapsed_s if has_new_pod else None,
            "next step": steps[0] - self.started_at if steps else None,
        }
        for name, event_s in events.items():
            if event_s is not None and name not in self.timeline:
                self.timeline[name] = round(event_s, 1)
                log_progress(f"{self.run.gang.name}: {name} after {event_s:.1f} s")
        return self.timeline


def find_victim(run: Run, *, spares: int) -> Any:
    """Wait until the run has saved, and return its pod on the second node.

    Returns None if that pod has no ranks, or with spares if it leads the gang.
    """
    # After a save it is settled which pods have ranks. Any of them may be the spare.
    run.hold_after_save()
    candidates = run.wait_for_pods()[1 if spares else 0 :]
    return next((pod for pod in candidates if pod["spec"]["nodeName"] == second_node.NODE), None)


def silence_kubelet(workspace: Workspace, run: Run, pod: Any, home: Path) -> Timeline:
    """Stop the kubelet until the pod is deleted, and start it again.

    The training is held in between, so that it does not finish.
    """
    watch = Watch(run, pod, is_silent=True)
    second_node.stop_kubelet()
    run.train_a_step()
    watch.timeline["a step"] = round(run.step_times()[-1] - watch.started_at, 1)
    run.hold()
    wait_until(
        watch.update, lambda timeline: "pod deleted" in timeline, "its pod is deleted", PATIENCE_S
    )
    run.train_a_step()
    watch.timeline["a step after that"] = round(run.step_times()[-1] - watch.started_at, 1)
    assert "attempt ended" not in watch.update(), watch.files.records()
    restart_watch = Watch(run, pod, is_silent=False)
    second_node.start_kubelet(home)
    wait_until(
        restart_watch.update, lambda timeline: "next step" in timeline, "a next step", PATIENCE_S
    )
    restart_timeline = {
        f"{name}, from the kubelet's start on": event_s
        for name, event_s in restart_watch.timeline.items()
    }
    return {**watch.timeline, **restart_timeline}


def lose_node(workspace: Workspace, run: Run, pod: Any, home: Path) -> Timeline:
    """Lose the node, and delete its object when it is not ready."""
    watch = Watch(run, pod, is_silent=True)
    second_node.lose_node(processes.find_processes(pod))
    wait_until(
        watch.update,
        lambda timeline: "node not ready" in timeline,
        "the node is not ready",
        PATIENCE_S,
    )
    with suppress(RefusedError):
        workspace.access.api.delete(second_node.PATH)
    expected = {"next step", "another pod", "pod's object gone"}

    def is_recovered(timeline: Timeline) -> bool:
        # With a spare the run may end before the lost pod is replaced.
        return expected <= timeline.keys() or bool(run.gang.status.get("terminalState"))

    wait_until(watch.update, is_recovered, "the gang is whole", PATIENCE_S)
    return watch.timeline


LOSSES: Mapping[str, Callable[[Workspace, Run, Any, Path], Timeline]] = {
    "kubelet stopped": silence_kubelet,
    "node gone": lose_node,
}
TOLERATIONS: Mapping[str, Any] = {"tolerations": [{"key": second_node.TAINT, "operator": "Exists"}]}
# A rank that already has its batch when the others are held waits for them in its step, which must
# not count as a hang.
HOLDABLE: Mapping[str, Any] = {**TOLERATIONS, "timeouts": {"step": "20m"}}
JOBS: Mapping[str, Mapping[str, Any]] = {
    "alone": {**ALONE, **HOLDABLE},
    "spare": {**SPARE, **HOLDABLE},
}


def measure_loss(
    workspace: Workspace,
    volume: Path,
    home: Path,
    loss: str,
    job: str,
    undisturbed: Mapping[int, float],
) -> Timeline:
    """Return the timeline of one kind of loss for one job."""
    with second_node.join_node(home, image.IMAGE, images.BASE):
        # Try again until a pod with ranks is on the second node.
        for number in itertools.count():
            run = Run(
                workspace, volume, f"{loss} {job}".replace(" ", "-") + f"-{number}", JOBS[job]
            )
            if (pod := find_victim(run, spares=JOBS[job].get("spares", 0))) is not None:
                break
            workspace.launcher("delete", run.gang.name, "--yes")
        log_progress(f"{run.gang.name}: host {pod_index(pod)} is on {second_node.NODE}")
        run.train_a_step()
        timeline = LOSSES[loss](workspace, run, pod, home)
        run.release()
        assert run.gang.wait_for_end() == "Completed", run.gang.read_lines()
        log_progress(f"{run.gang.name}: restarts {run.gang.counters}")
        assert read_losses(volume, run.folder.name) == undisturbed, (
            f"{run.folder.name} has other losses"
        )
        workspace.launcher("delete", run.gang.name, "--yes")
    return timeline


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", default="", metavar="WORD", help="measure the losses whose name has this word"
    )
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
    for name, timeline in results.items():
        events = ", ".join(f"{event} {event_s:g}" for event, event_s in timeline.items())
        print(f"| {name} | {events} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
