"""The first line of an explanation, over what the API server, the scheduler, the kubelet, Kueue and autoscalers say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.causes.situations import SITUATIONS
from launcher.explain import MAX_EVIDENCE, explain
from launcher.jobset import STOPPED_WITH
from launcher.seen import World
from tests.launcher import objects
from tests.launcher.objects import (
    ago,
    beat,
    cluster_queue,
    condition,
    event,
    farewell,
    jobset,
    judged,
    local_queue,
    node,
    over,
    past,
    pending,
    pod,
    waiting,
    workload,
    world,
)

ROOT = Path(__file__).parents[2]
QUEUED = {"queue": "research", "suspend": True}
NOTHING_FITS = "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint(s). preemption: no."


def reserved(message: str, *more: dict[str, Any], reason: str = "Pending") -> dict[str, Any]:
    return workload(condition("QuotaReserved", "False", reason, message), *more)


def refused(message: str) -> World:
    """Pods that the API server does not take."""
    text = f'Error creating: pods "lm-w-0-0-x7k2p" is forbidden: {message}'
    return world(jobset(2), events=(event("Job", "lm-w-0", "FailedCreate", text, count=7),))


def unscheduled(message: str, *nodes: dict[str, Any], events: tuple[dict[str, Any], ...] = (), **job: Any) -> World:
    return world(jobset(1, **job), pending(0, message), nodes=nodes, events=events)


def stopped_with(words: str) -> dict[str, Any]:
    metadata = jobset(1)["metadata"]
    return {**metadata, "annotations": {**metadata["annotations"], STOPPED_WITH: words}}


# A situation, what was seen, and a regular expression for its first line.
CASES: dict[str, tuple[World, str]] = {
    # --- the end ------------------------------------------------------------------------------------------------------
    "done": (world(jobset(1, status=objects.ended("Completed")), over(0, 0)), "^lm is done, in 5m$"),
    "done with steps": (
        world(jobset(2, status=objects.ended("Completed")), over(0, 0), over(1, 0), words=(beat(step=300),)),
        "^lm is done: all of 2 hosts, step 300, in 5m$",
    ),
    "failed with a verdict": (
        world(
            jobset(1, status=objects.ended("Failed", "FailJobSetFailurePolicyAction")),
            over(0, 64, message=farewell(64, "train.lr is negative")),
        ),
        r"^lm failed: bad_spec \(exit 64\): train.lr is negative$",
    ),
    "given up after restarts": (
        world(
            jobset(1, status=objects.ended("Failed", "ReachedMaxRestarts", restarts=5, restartsCountTowardsMax=5)),
            over(0, 83, message=farewell(83, "rank 0 raised: X"), generation=5),
        ),
        r"^lm failed after 5 restarts: crash \(exit 83\): rank 0 raised: X$",
    ),
    "failed without a word": (
        world(jobset(1, status=objects.ended("Failed")), over(0, 42)),
        r"^lm failed: host 0 \(pod lm-w-0-0-abcd0\) ended with exit code 42 \(Error\)$",
    ),
    "failed and its pods are gone": (
        world(jobset(1, status=objects.ended("Failed", "FailedJobs", "jobset failed"))),
        "^lm failed: jobset failed$",
    ),
    "killed, and nobody says by whom": (
        world(jobset(1, status=objects.ended("Failed"), resources={"memory": "4Gi"}), over(0, 137)),
        r"was killed by SIGKILL \(exit 137\), as the kernel does for want of memory; its memory limit is 4Gi$",
    ),
    "killed for memory, whole": (
        world(jobset(1, status=objects.ended("Failed"), resources={"memory": "4Gi"}), over(0, 137, "OOMKilled")),
        "^lm failed: its host was OOMKilled; its memory limit is 4Gi$",
    ),
    "killed for memory, one process": (
        world(
            jobset(2, status=objects.ended("Failed"), resources={"memory": "4Gi"}),
            over(0, 137, message=farewell(137, "killed", rank=1, step=7)),
            over(1, 137, "OOMKilled", message=farewell(137, "killed", rank=1, step=7)),
        ),
        "^lm failed: rank 1 was OOMKilled at step 7; its memory limit is 4Gi$",
    ),
    "deadline": (
        world(
            jobset(1, status=objects.ended("Failed")),
            jobs=(
                objects.job_object(
                    "lm-w-0", condition("Failed", reason="DeadlineExceeded"), activeDeadlineSeconds=7200
                ),
            ),
        ),
        "^lm failed: its deadline of 120m passed$",
    ),
    "deleting": (
        world(
            jobset(1) | {"metadata": jobset(1)["metadata"] | {"deletionTimestamp": ago(seconds=3)}},
            pod(0, is_leaving=True),
        ),
        "^lm is being deleted: 1 pod still to end$",
    ),
    "stopped": (
        world(jobset(1, suspend=True), over(0, 80, message=farewell(80)), words=(beat(committed=120),)),
        "^lm is stopped; step 120 is saved$",
    ),
    "stopped, and its pods are gone": (
        world(jobset(1, suspend=True) | {"metadata": stopped_with("saved at step 37")}),
        "^lm is stopped; saved at step 37$",
    ),
    "stopping": (world(jobset(1, suspend=True), pod(0)), "^lm is stopping: 1 pod still to save and end$"),
    "stopped in its queue": (
        world(jobset(1, **QUEUED), workload=workload(active=False)),
        "^lm is stopped$",
    ),
    "given up by its queue": (
        world(
            jobset(1, **QUEUED),
            workload=workload(condition("Evicted", reason="DeactivatedDueToRequeuingLimitExceeded"), active=False),
        ),
        "^lm was given up by Kueue",
    ),
    # --- the queue ----------------------------------------------------------------------------------------------------
    "quota": (
        world(
            jobset(1, **QUEUED),
            workload=reserved(
                "couldn't assign flavors to pod set w: "
                "insufficient unused quota for cpu in flavor h100, 200m more needed"
            ),
            local_queue=local_queue(),
            cluster_queue=cluster_queue("8", "7800m"),
        ),
        r"^lm waits: queue research \(ClusterQueue shared\) is full: 200m more cpu is needed in flavor h100; "
        "7800m of 8 is used$",
    ),
    "quota, and no right to see the queue": (
        world(
            jobset(1, **QUEUED),
            workload=reserved("insufficient unused quota for cpu in flavor h100, 200m more needed"),
        ),
        "^lm waits: queue research is full: 200m more cpu is needed in flavor h100$",
    ),
    "quota that is never enough": (
        world(
            jobset(1, **QUEUED),
            workload=reserved(
                "couldn't assign flavors to pod set w: "
                "insufficient quota for cpu in flavor real, previously considered "
                "podsets requests (0) + current podset request (1800m) > maximum capacity (1)"
            ),
        ),
        "^lm waits: queue research can never admit it: it asks for 1800m cpu, real has 1 in all$",
    ),
    "quota that is not there": (
        world(
            jobset(1, **QUEUED),
            workload=reserved(
                "couldn't assign flavors to pod set w: resource nvidia.com/gpu unavailable in ClusterQueue"
            ),
        ),
        "^lm waits: queue research does not cover nvidia.com/gpu$",
    ),
    "no such queue": (
        world(jobset(1, **QUEUED), workload=reserved("LocalQueue research doesn't exist", reason="Inadmissible")),
        "^lm waits: LocalQueue research does not exist$",
    ),
    "no such cluster queue": (
        world(jobset(1, **QUEUED), workload=reserved("ClusterQueue shared doesn't exist", reason="Inadmissible")),
        "^lm waits: ClusterQueue shared does not exist$",
    ),
    "stopped cluster queue": (
        world(
            jobset(1, **QUEUED),
            workload=reserved("ClusterQueue shared is inactive", reason="Inadmissible"),
            local_queue=local_queue(active=False, reason="ClusterQueueIsInactive"),
            cluster_queue=cluster_queue(active=False, stopPolicy="Hold"),
        ),
        "^lm waits: ClusterQueue shared is stopped$",
    ),
    "broken cluster queue": (
        world(
            jobset(1, **QUEUED),
            workload=reserved("ClusterQueue shared is inactive", reason="Inadmissible"),
            local_queue=local_queue(active=False, reason="ClusterQueueIsInactive"),
            cluster_queue=cluster_queue(active=False, message="references missing ResourceFlavor(s): h100."),
        ),
        "^lm waits: ClusterQueue shared admits nothing: FlavorNotFound$",
    ),
    "stopped queue that may not be seen": (
        world(jobset(1, **QUEUED), workload=reserved("LocalQueue research is stopped", reason="Inadmissible")),
        "^lm waits: LocalQueue research is stopped$",
    ),
    "preempted, still saving": (
        world(
            jobset(1, **QUEUED),
            pod(0, is_leaving=True),
            workload=reserved("Preempted", condition("Evicted", reason="Preempted", message="to make room")),
        ),
        "^lm was preempted by another job; 1 of its pods still save and end$",
    ),
    "preempted, waits again": (
        world(
            jobset(1, **QUEUED),
            workload=reserved(
                "insufficient unused quota for cpu in flavor h100, 4 more needed",
                condition("Evicted", reason="Preempted"),
            ),
        ),
        "^lm was preempted by another job and waits: queue research is full: 4 more cpu is needed in flavor h100$",
    ),
    "an admission check": (
        world(
            jobset(1, **QUEUED),
            workload=workload(
                condition("QuotaReserved"),
                admissionChecks=[
                    {"name": "nodes", "state": "Pending", "message": "Provisioning Request wasn't accepted"}
                ],
            ),
        ),
        "^lm waits: quota is reserved in queue research, and admission check nodes is not passed: Provisioning Request",
    ),
    "not taken by Kueue": (
        world(jobset(1, **QUEUED), jobs=()),
        "^lm is suspended, and Kueue has made no Workload of it for queue research$",
    ),
    # --- Jobs and pods that are refused -------------------------------------------------------------------------------
    "webhook down before the Jobs": (
        world(
            jobset(1),
            jobs=(),
            events=(
                event(
                    "JobSet",
                    "lm",
                    "JobCreationFailed",
                    'job "lm-w-0" creation failed with error: Internal error occurred: failed calling webhook '
                    '"mjob.kb.io": failed to call webhook: Post "https://kueue-webhook.kueue-system.svc:443/x": '
                    "dial tcp 10.0.0.1:443: connect: connection refused",
                ),
            ),
        ),
        r"^lm has no Jobs: webhook mjob.kb.io \(kueue-webhook in kueue-system\) does not answer: connection refused$",
    ),
    "webhook without a server": (
        refused(
            'failed calling webhook "mpod.kb.io": failed to call webhook: no endpoints available for service "jobset"'
        ),
        "^lm waits: 2 of 2 pods are refused: webhook mpod.kb.io does not answer: no endpoints available for service",
    ),
    "unattended": (world(jobset(1), jobs=()), "^lm has no Jobs 600 s after it was created: the JobSet controller"),
    "exceeded quota": (
        refused("exceeded quota: few, requested: pods=1,requests.cpu=4, used: pods=5,requests.cpu=9, limited: pods=5"),
        "refused: ResourceQuota few is exceeded: requested pods=1,requests.cpu=4, used pods=5,requests.cpu=9, limited",
    ),
    "quota that wants limits": (
        refused("failed quota: strict: must specify limits.cpu for: main"),
        "refused: ResourceQuota strict wants every pod to say limits.cpu for: main$",
    ),
    "Pod Security": (
        refused('violates PodSecurity "restricted:latest": runAsNonRoot != true (pod must not set it)'),
        'refused: the namespace enforces Pod Security "restricted:latest": runAsNonRoot != true',
    ),
    "a policy": (
        refused("ValidatingAdmissionPolicy 'billing' with binding 'all' denied request: say who pays"),
        "refused: ValidatingAdmissionPolicy billing says no: say who pays$",
    ),
    "a webhook's no": (
        world(
            jobset(2),
            events=(
                event(
                    "Job", "lm-w-0", "FailedCreate", 'admission webhook "pods.corp" denied the request: no team label'
                ),
            ),
        ),
        "refused: webhook pods.corp says no: no team label$",
    ),
    "followers of an exclusive placement": (
        world(
            jobset(2),
            pod(0, node="node-1"),
            events=(
                event(
                    "Job",
                    "lm-w-0",
                    "FailedCreate",
                    'admission webhook "vpod.kb.io" denied the request: follower pod node selector not set',
                ),
            ),
        ),
        "^lm waits: 1 of 2 pods are refused: its followers wait until the leader of each slice has a node$",
    ),
    "no service account": (
        refused('error looking up service account team/robot: serviceaccount "robot" not found'),
        "refused: there is no service account robot$",
    ),
    "no priority class": (
        refused("no PriorityClass with name urgent was found"),
        "refused: there is no PriorityClass urgent$",
    ),
    "no runtime class": (refused('pod rejected: RuntimeClass "kata" not found'), "there is no RuntimeClass kata$"),
    "a limit range": (
        refused("maximum memory usage per Container is 64Gi, but limit is 128Gi"),
        "a LimitRange of the namespace forbids it: maximum memory usage per Container is 64Gi, but limit is 128Gi$",
    ),
    "refused by what nobody knows": (refused("the moon is full"), "refused: .*the moon is full$"),
    # --- nodes --------------------------------------------------------------------------------------------------------
    "no node is large enough": (
        unscheduled(
            NOTHING_FITS, node(cpu="8"), node("big", taints=("gpu=yes:NoSchedule",), cpu="64"), resources={"cpu": 32}
        ),
        "^lm waits: its host unscheduled: each asks for 32 cpu, the largest node has 8$",
    ),
    "nodes are taken": (
        unscheduled("0/2 nodes are available: 2 Insufficient cpu.", node(), node("b"), resources={"cpu": 4}),
        "^lm waits: its host unscheduled: not enough cpu is free; 2 nodes would hold a host when empty$",
    ),
    "no device": (
        unscheduled(
            "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
            node(),
            pod={"spec": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "8"}}}]}},
        ),
        "^lm waits: its host unscheduled: each asks for 8 nvidia.com/gpu, the largest node has 0$",
    ),
    "tainted": (
        unscheduled(
            NOTHING_FITS, node(taints=("team=b:NoSchedule",)), node("b", taints=("team=b:NoSchedule", "x:NoExecute"))
        ),
        "^lm waits: its host unscheduled: taint team=b:NoSchedule and 1 others bars it from 2 of 2 nodes$",
    ),
    "cordoned": (
        unscheduled("", node(taints=("node.kubernetes.io/unschedulable:NoSchedule",))),
        "taint node.kubernetes.io/unschedulable:NoSchedule bars it from 1 of 1 node$",
    ),
    "a label that no node has": (
        unscheduled("", node(labels={"disk": "hdd"}), node_selector={"disk": "ssd"}),
        "^lm waits: its host unscheduled: no node has label disk=ssd; they have hdd$",
    ),
    "labels that no node has together": (
        unscheduled("", node(labels={"a": "1"}), node("b", labels={"b": "1"}), node_selector={"a": "1", "b": "1"}),
        "no node has all of a=1, b=1$",
    ),
    "no nodes": (
        unscheduled("no nodes available to schedule pods"),
        "^lm waits: its host unscheduled: the cluster has no",
    ),
    "nodes that may not be seen": (
        world(jobset(1), pending(0, NOTHING_FITS), nodes=None),
        "^lm waits: its host unscheduled: 0/3 nodes are available: 1 Insufficient cpu, 2 node",
    ),
    "ports": (
        unscheduled("0/1 nodes are available: 1 node(s) didn't have free ports for the requested pod ports.", node()),
        "didn't have free ports for the requested pod ports.; 1 node would hold a host when empty$",
    ),
    "new nodes are coming": (
        unscheduled(
            NOTHING_FITS,
            node(),
            events=(
                event("Pod", "lm-w-0-0-abcd0", "TriggeredScaleUp", "pod triggered scale-up: [{pool-1 0->1 (max: 4)}]"),
            ),
        ),
        r"^lm waits for nodes that are being made: its host pending; pod triggered scale-up: \[\{pool-1 0->1",
    ),
    "no new nodes can come": (
        unscheduled(
            NOTHING_FITS,
            node(cpu="8"),
            events=(
                event("Pod", "lm-w-0-0-abcd0", "TriggeredScaleUp", "pod triggered scale-up", last=ago(minutes=5)),
                event(
                    "Pod",
                    "lm-w-0-0-abcd0",
                    "NotTriggerScaleUp",
                    "pod didn't trigger scale-up: 1 max node group size reached",
                ),
            ),
            resources={"cpu": 32},
        ),
        "32 cpu, .*; the autoscaler makes no node: pod didn't trigger scale-up: 1 max node group size reached$",
    ),
    "Karpenter cannot": (
        unscheduled(
            NOTHING_FITS,
            node(),
            events=(
                event(
                    "Pod", "lm-w-0-0-abcd0", "FailedScheduling", "no instance type satisfied resources", by="karpenter"
                ),
            ),
            resources={"cpu": 32},
        ),
        "; the autoscaler makes no node: no instance type satisfied resources$",
    ),
    "some hosts wait": (
        world(
            jobset(4),
            pod(0),
            pending(1, "0/1 nodes are available: 1 Insufficient cpu."),
            pod(2),
            pending(3),
            nodes=(node(),),
        ),
        "^lm waits: hosts 1 and 3 unscheduled: not enough cpu is free",
    ),
    "a gate": (
        world(jobset(1), pending(0, "waiting for gates", "SchedulingGated")),
        "^lm waits: its host may not be scheduled yet",
    ),
    "no claim": (
        unscheduled('0/1 nodes are available: persistentvolumeclaim "ckpt" not found.', node()),
        "^lm waits: volume claim ckpt does not exist$",
    ),
    "an unbound claim": (
        unscheduled(
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            node(),
            events=(event("PersistentVolumeClaim", "ckpt", "ProvisioningFailed", 'storageclass "fast" not found'),),
            volumes=[{"claim": "ckpt", "path": "/ckpt"}],
        ),
        '^lm waits: volume claim ckpt is not bound: storageclass "fast" not found$',
    ),
    "a volume elsewhere": (
        unscheduled("0/2 nodes are available: 2 node(s) didn't match PersistentVolume's node affinity.", node()),
        "^lm waits: its host cannot be where its volume is",
    ),
    # --- images -------------------------------------------------------------------------------------------------------
    "no image": (
        world(
            jobset(2),
            waiting(0, "ImagePullBackOff", 'Back-off pulling image "registry.example/train:1"'),
            pod(1),
            events=(
                event("Pod", "lm-w-0-0-abcd0", "Failed", "Failed to pull image: code = NotFound: train:1: not found"),
            ),
        ),
        "^lm waits: host 0 cannot get image registry.example/train:1: it does not exist$",
    ),
    "no right to the image": (
        world(jobset(1), waiting(0, "ErrImagePull", "pull access denied, authorization failed: 403 Forbidden")),
        "the registry wants credentials, or it does not exist$",
    ),
    "no registry": (
        world(jobset(1), waiting(0, "ErrImagePull", "dial tcp: lookup registry.example: no such host")),
        "the registry cannot be reached from the node$",
    ),
    "a limited registry": (
        world(jobset(1), waiting(0, "ErrImagePull", "429 Too Many Requests: toomanyrequests")),
        "limits how",
    ),
    "no image's name": (world(jobset(1), waiting(0, "InvalidImageName", "x")), "that is no image's name$"),
    "an image that may not be pulled": (world(jobset(1), waiting(0, "ErrImageNeverPull", "x")), "may not pull it$"),
    # --- containers ---------------------------------------------------------------------------------------------------
    "no secret": (
        world(jobset(1), waiting(0, "CreateContainerConfigError", 'secret "token" not found')),
        "^lm waits: its host cannot start: Secret token does not exist$",
    ),
    "no key in a secret": (
        world(jobset(1), waiting(0, "CreateContainerConfigError", "couldn't find key t in Secret team/token")),
        "Secret token has no key t$",
    ),
    "no config map": (
        world(jobset(1), waiting(0, "CreateContainerConfigError", 'configmap "settings" not found')),
        "ConfigMap settings does not exist$",
    ),
    "root": (
        world(
            jobset(1), waiting(0, "CreateContainerConfigError", "container has runAsNonRoot and image will run as root")
        ),
        "wants to run as root, which the pod forbids$",
    ),
    "a volume of a secret that is not there": (
        world(
            jobset(1),
            waiting(0, "ContainerCreating"),
            events=(
                event(
                    "Pod",
                    "lm-w-0-0-abcd0",
                    "FailedMount",
                    'MountVolume.SetUp failed for volume "s" : secret "s" not found',
                ),
            ),
        ),
        "^lm waits: its host cannot start: Secret s does not exist$",
    ),
    "a volume that cannot be mounted": (
        world(
            jobset(1),
            waiting(0, "ContainerCreating"),
            events=(event("Pod", "lm-w-0-0-abcd0", "FailedAttachVolume", "Multi-Attach error for volume pvc-1"),),
        ),
        "^lm waits: its host cannot mount a volume: Multi-Attach error for volume pvc-1$",
    ),
    "a node's network": (
        world(
            jobset(1),
            waiting(0, "ContainerCreating"),
            events=(event("Pod", "lm-w-0-0-abcd0", "FailedCreatePodSandBox", "cni plugin not initialized"),),
        ),
        "^lm waits: the node cannot make the pod of its host: cni plugin not initialized$",
    ),
    "no such command": (
        world(
            jobset(2),
            over(0, 128, "StartError", 'exec: "python": executable file not found in $PATH: unknown'),
            pod(1),
        ),
        "^lm cannot start on host 0: command python: executable file not found in",
    ),
    "an image without the agent": (
        world(
            jobset(1),
            over(0, 1, "Error", "/bin/python: Error while finding … (ModuleNotFoundError: No module named 'launcher')"),
        ),
        "^lm cannot start on its host: image \\S+ holds no jaxlaunch$",
    ),
    "an init container": (
        world(
            jobset(1),
            pod(
                0,
                state={"waiting": {"reason": "PodInitializing"}},
                initContainerStatuses=[{"name": "fetch", "state": {"terminated": {"exitCode": 3, "reason": "Error"}}}],
            ),
        ),
        "^lm cannot start on its host: init container fetch ended with exit code 3$",
    ),
    "an image on its way": (
        world(
            jobset(1),
            waiting(0, "ContainerCreating"),
            events=(event("Pod", "lm-w-0-0-abcd0", "Pulling", 'Pulling image "registry.example/train:1"'),),
        ),
        "^lm is starting: its host: image registry.example/train:1 is being pulled for 10m$",
    ),
    "containers on their way": (
        world(jobset(1), waiting(0, "ContainerCreating")),
        "^lm is starting: its host: volumes and containers are being made for 10m$",
    ),
    # --- the gang -----------------------------------------------------------------------------------------------------
    "hosts are missing": (
        world(jobset(4), *map(pod, range(4)), words=(beat(stage="gather", missing=[1, 3], missing_count=2),)),
        "^lm waits at rendezvous for 9m: hosts 1, 3 of 4 not there$",
    ),
    "many hosts are missing": (
        world(
            jobset(64), *map(pod, range(64)), words=(beat(stage="gather", missing=list(range(16)), missing_count=40),)
        ),
        "and 24 more of 64 not there$",
    ),
    "everyone is there": (
        world(jobset(1), pod(0), words=(beat(stage="gather"),)),
        "^lm is about to start: every host is there$",
    ),
    "it hangs": (
        world(jobset(1), pod(0), words=(beat(overdue="rank 3 in data at step 12 for 11m"),)),
        "^lm hangs: rank 3 in data at step 12 for 11m$",
    ),
    "it trains": (world(jobset(1), pod(0), words=(beat(),)), "^lm runs: training at step 40$"),
    "it compiles": (
        world(jobset(1), pod(0), words=(beat(phase="compile", step=None),)),
        "^lm runs: in compile for 60s$",
    ),
    "it trains again": (
        world(jobset(1), pod(0), words=(past(82, "rank 1 in data"), beat(attempt=2))),
        r"^lm runs again after hang \(82\): rank 1 in data: training at step 40$",
    ),
    "it trains, and went wrong long ago": (
        world(jobset(1), pod(0), words=(past(82, "rank 1"), past(83, "rank 2", attempt=2), beat(attempt=4))),
        "^lm runs: training at step 40$",
    ),
    "its program is silent": (
        world(jobset(1), pod(0), words=(beat(phase="unsaid", step=None),)),
        "^lm runs: its program has said nothing of a step$",
    ),
    "no log of it": (world(jobset(2), pod(0), pod(1)), "^lm runs: 2 of 2 hosts ready$"),
    "between two generations": (
        world(
            jobset(1, status={"restarts": 1, "restartsCountTowardsMax": 1}),
            over(0, 83, message=farewell(83, "rank 0 raised: X")),
        ),
        r"^lm is restarting after crash \(83\): rank 0 raised: X$",
    ),
    "between two generations, for memory": (
        world(jobset(1, status={"restarts": 1}), over(0, 137, "OOMKilled")),
        "^lm is restarting: its host was OOMKilled; it has no memory limit",
    ),
    "a crash loop": (
        world(
            jobset(1, status={"restarts": 3, "restartsCountTowardsMax": 3}),
            pod(0, generation=3),
            words=(past(83, "rank 0 raised: X", attempt=3, generation=2), beat(attempt=4, generation=3)),
        ),
        r"^lm crashes and restarts without a committed step: 3 of 5 restarts are used; last: crash \(83\): rank 0",
    ),
    "beyond a crash loop": (
        world(
            jobset(1, status={"restarts": 3, "restartsCountTowardsMax": 3}),
            pod(0, generation=3),
            words=(past(83, "X", attempt=3, generation=2, step=30), beat(attempt=5, generation=3)),
        ),
        "^lm runs: training at step 40$",
    ),
    "a process killed for memory long ago": (
        world(
            jobset(1, status=objects.ended("Failed")), over(0, 65, "OOMKilled", message=farewell(65, "no such file"))
        ),
        r"^lm failed: bad_data \(exit 65\): no such file$",
    ),
    "a container killed for memory, and a peer that lost it": (
        world(
            jobset(2, status=objects.ended("Failed"), resources={"memory": "4Gi"}),
            over(0, 81, message=farewell(81, "host 1 is gone")),
            over(1, 137, "OOMKilled"),
        ),
        "^lm failed: host 1 was OOMKilled; its memory limit is 4Gi$",
    ),
    "evicted": (
        world(
            jobset(2),
            over(0, 80, conditions=[condition("DisruptionTarget", reason="EvictionByEvictionAPI", message="evicting")]),
            pod(1, is_leaving=True),
        ),
        r"^lm was interrupted: host 0 was evicted \(a drain, or a person\); it starts again, which is charged to no",
    ),
    "a node is lost": (
        world(
            jobset(2),
            pod(0),
            pod(1, node="node-2", conditions=[condition("Ready", "False")]),
            events=(event("Pod", "lm-w-0-1-abcd1", "NodeNotReady", "Node is not ready"),),
        ),
        "^lm waits: node node-2 does not answer, and host 1 was on it$",
    ),
    # --- others -------------------------------------------------------------------------------------------------------
    "no pods yet": (world(jobset(2), events=()), "^lm is being created: 0 of 2 pods exist$"),
    "another tool's": (
        world(objects.foreign(), *(pod(host, part="part", container="work", slice=0) for host in range(3))),
        "^lm is being created: 3 of 6 pods exist$",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_line_names_the_situation(case: str) -> None:
    seen, expected = CASES[case]
    assert re.search(expected, explain(seen).headline), explain(seen).headline


def test_every_wait_and_every_failure_comes_with_a_next_move() -> None:
    for case, (seen, _) in CASES.items():
        found = explain(seen)
        assert found.next_move or re.search(r"\bruns\b|about to start|preempted|is admitted", found.headline), case


def test_evidence_is_bounded_however_much_was_said() -> None:
    lines = "\n".join(f"  File 'x.py', line {number}" for number in range(5000))
    texts = tuple(event("Pod", "lm-w-0-0-abcd0", f"Reason{number}", "x" * 10_000) for number in range(500))
    seen = world(
        jobset(1, status=objects.ended("Failed")),
        over(0, 70, message=farewell(70, "x" * 9_000, traceback=lines)),
        events=texts,
    )
    found = explain(seen)
    assert len(found.evidence) <= MAX_EVIDENCE
    assert len(json.dumps(found.to_json())) < 20_000


def test_the_tail_of_the_traceback_is_the_first_evidence_of_a_failure() -> None:
    text = "Traceback (most recent call last):\n  File 'x.py', line 3\nValueError: no"
    seen = world(jobset(1, status=objects.ended("Failed")), over(0, 70, message=farewell(70, "raised", traceback=text)))
    assert explain(seen).evidence[:3] == tuple(text.splitlines())


def test_restarts_by_cause_and_the_age_of_the_last_good_checkpoint_are_always_told() -> None:
    seen = world(
        jobset(1, status={"restarts": 3, "restartsCountTowardsMax": 1}),
        pod(0, generation=3),
        words=(
            beat(
                attempt=5,
                generation=3,
                committed=120,
                committed_at=objects.NOW.timestamp() - 90,
                restarts={"preempted": 2, "crash": 1},
            ),
        ),
    )
    assert explain(seen).facts == (
        "restarts: 3, of which 1 of 5 charged; attempts ended by crash 1, preempted 2",
        "last good checkpoint: step 120, 90s ago",
    )


def test_what_could_not_be_known_is_said() -> None:
    summary = (
        "past",
        {"at": 0.0, "attempt": 1, "generation": 0, "ends": {}, "attempts": 0, "unknown": "no shared folder"},
    )
    seen = world(jobset(1), pod(0), words=(summary, beat()), unread=("nodes could not be read: forbidden",))
    assert explain(seen).facts == (
        "what was before is not known: no shared folder",
        "nodes could not be read: forbidden",
    )


def test_of_a_jobset_that_is_not_ours_is_told_what_can_be_told() -> None:
    found = explain(world(objects.foreign(), *(pod(host, part="part", container="work") for host in range(6))))
    assert "not submitted by launcher" in " ".join(found.facts)


def test_a_name_that_is_not_there_brings_up_those_that_are_like_it() -> None:
    seen = World("team", "lm-smal", objects.NOW, neighbours=("lm-small", "other"))
    assert explain(seen).headline == "there is no job lm-smal in namespace team"
    assert explain(seen).next_move == "did you mean lm-small?"


def test_events_of_an_earlier_job_of_that_name_or_of_a_neighbour_are_not_its_own() -> None:
    text = 'Error creating: pods "lm-w-0-0-x7k2p" is forbidden: exceeded quota: few, requested: a, used: b, limited: c'
    seen = world(
        jobset(1),
        events=(
            event("Job", "lm-w-0", "FailedCreate", text, last=ago(hours=1)),
            event("Job", "lm-w-0-w-0", "FailedCreate", text),
            event("Job", "lm-small-w-0", "FailedCreate", text),
        ),
    )
    assert seen.events == ()


def test_a_thousand_pods_that_wait_for_one_reason_make_one_line() -> None:
    texts = tuple(event("Pod", f"lm-w-0-{host}-abcd0", "FailedScheduling", NOTHING_FITS) for host in range(1000))
    (one,) = world(jobset(1000), events=texts).events
    assert (one["count"], len(one["names"])) == (1000, 8)


def test_the_newest_verdict_is_asked_of_the_leader_not_of_who_lost_it() -> None:
    seen = world(
        jobset(2, status=objects.ended("Failed")),
        over(0, 83, message=farewell(83, "rank 0 raised: X")),
        over(1, 81, message=farewell(81, "the leader is gone")),
    )
    assert explain(seen).headline == "lm failed: crash (exit 83): rank 0 raised: X"


def test_a_verdict_of_the_attempt_before_is_not_that_of_the_one_that_runs() -> None:
    seen = world(jobset(1), pod(0), words=(beat(-30), judged(82, "rank 1 in data", at=-20), beat(-5, attempt=2)))
    assert seen.told.verdict is None
    assert [one.attempt for one in seen.told.before] == [1]


def test_every_situation_has_a_meaning_and_stands_in_the_documentation() -> None:
    sources = [*(ROOT / "launcher" / "causes").glob("*.py"), ROOT / "launcher" / "explain.py"]
    code = "".join(path.read_text() for path in sources if path.name != "situations.py")
    assert set(re.findall(r'Answer\(\s*"([a-z-]+)"', code)) <= SITUATIONS.keys()
    assert {explain(seen).situation for seen, _ in CASES.values()} <= SITUATIONS.keys()
    page = (ROOT / "docs" / "explain.md").read_text()
    assert dict(re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", page, re.MULTILINE)) == dict(SITUATIONS)
