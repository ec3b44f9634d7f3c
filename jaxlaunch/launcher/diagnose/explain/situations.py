"""The situations of `explain`: a key for scripts, the meaning, documentation and the next step.

The last table of docs/troubleshooting.md is generated from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxlaunch import contract
from jaxlaunch.launcher import troubleshooting
from jaxlaunch.launcher.diagnose.text import (
    DOCTOR,
    JOB_NAME,
    PLAN,
    SUBMIT,
    SUBMIT_AGAIN,
    NextStep,
    advise_ask,
    advise_change,
    advise_resubmit,
    advise_run,
    advise_wait,
    kubectl_command,
    launcher_command,
)


class Situation(NamedTuple):
    """Meaning of a situation, and what to do.

    Attributes:
        meaning: Clause for docs/troubleshooting.md, with the job as "it".
        section: Section of docs/troubleshooting.md, or None if nothing is wrong.
        next_step: What to do, or None if every answer with this situation has its own next step.
    """

    meaning: str
    section: str | None = None
    next_step: NextStep | None = None


# Sections of docs/troubleshooting.md.
_VOLUMES = "volumes-secrets-and-configmaps"
_LOST_HOSTS = "rendezvous-and-lost-hosts"
_REJECTED = "rejected-requests"
_RESTARTS = "restarts-and-evictions"
_CONTAINERS = "container-start"
_PENDING = "pending-pods"
_QUEUES = "queues"
_MEMORY = "out-of-memory"
_ACCESS = "access-to-the-cluster"

_MEMORY_STEP = advise_change(
    "raise resources.memory in job.yaml, or use less memory: a smaller batch, more hosts, remat."
)
_LOGS_STEP = advise_run("{logs} shows how it ended.", logs=launcher_command("logs", JOB_NAME))

SITUATIONS: Mapping[str, Situation] = {
    "unknown": Situation("there is no job of that name", _ACCESS),
    "unread": Situation(
        "the objects that show its state could not be read",
        _ACCESS,
        advise_ask(
            "ask the namespace's administrator for the right; `{doctor}` lists what each command "
            "needs.",
            doctor=DOCTOR,
        ),
    ),
    # The job has ended or is ending.
    "done": Situation(
        "all processes finished",
        None,
        advise_run(
            "{logs}; then {delete}",
            logs=launcher_command("logs", JOB_NAME),
            delete=launcher_command("delete", JOB_NAME),
        ),
    ),
    "failed": Situation(
        "it failed for good; the headline has the cause and the exit code",
        "exit-codes",
        advise_resubmit(
            "see `{logs}`; then `{again}`",
            logs=launcher_command("logs", JOB_NAME),
            again=SUBMIT_AGAIN,
        ),
    ),
    "held": Situation(
        "it failed for good, and stays for a look until the end of `hold_on_failure`",
        "exit-codes",
    ),
    "deadline": Situation(
        "its deadline was exceeded",
        _RESTARTS,
        advise_resubmit("raise deadline: in job.yaml; then `{again}`", again=SUBMIT_AGAIN),
    ),
    "killed": Situation(
        "a container was killed by SIGKILL, probably out of memory", _MEMORY, _MEMORY_STEP
    ),
    "oom": Situation(
        "a container or a process ran out of memory (OOMKilled)", _MEMORY, _MEMORY_STEP
    ),
    "ephemeral-storage": Situation(
        "a pod was evicted because it used more ephemeral storage than its own limit", _RESTARTS
    ),
    "stopping": Situation("it is being stopped, and saves a checkpoint", None, advise_wait()),
    "stopped": Situation(
        "it was stopped; submitting it again resumes it",
        None,
        advise_resubmit("`{submit}` resumes it", submit=SUBMIT),
    ),
    "given-up": Situation(
        "Kueue deactivated its Workload",
        _QUEUES,
        advise_resubmit("fix that; then `{submit}`", submit=SUBMIT),
    ),
    "deleting": Situation(
        "it is being deleted",
        None,
        advise_wait("wait; every pod has its grace period to save a checkpoint."),
    ),
    "stuck": Situation("a finalizer or an unresponsive node blocks a deletion", "deletion"),
    # Kueue has not admitted the job.
    "queued": Situation("it is waiting for its turn in the queue"),
    "queue-silent": Situation(
        "Kueue has created no Workload for it",
        _QUEUES,
        advise_change(
            "check that Kueue runs and has JobSet among its integrations: `{doctor}` checks both.",
            doctor=DOCTOR,
        ),
    ),
    "queue-missing": Situation("the LocalQueue or its ClusterQueue does not exist", _QUEUES),
    "queue-stopped": Situation(
        "the LocalQueue or its ClusterQueue is stopped or inactive", _QUEUES
    ),
    "quota": Situation(
        "other jobs use the quota",
        _QUEUES,
        advise_wait("wait for its turn, or request less; jobs of higher priority go first."),
    ),
    "quota-never": Situation(
        "it requests more than the whole quota",
        _QUEUES,
        advise_change("request less, or use another queue."),
    ),
    "quota-uncovered": Situation(
        "the ClusterQueue has no quota of a resource that it requests",
        _QUEUES,
        advise_ask(
            "ask the cluster administrator to add the resource to the ClusterQueue, or request "
            "none of it."
        ),
    ),
    "queue-closed": Situation("the ClusterQueue does not admit jobs of the namespace", _QUEUES),
    "backing-off": Situation(
        "Kueue evicted it because its pods were not ready in time, and puts it back into the queue "
        "after a pause",
        _QUEUES,
        advise_run(
            "find out why its pods were not ready, for example an image or a volume: "
            "`{explain}` shows it while the pods exist.",
            explain=launcher_command("explain", JOB_NAME),
        ),
    ),
    "admission-check": Situation(
        "quota is reserved, but an admission check has not passed",
        _QUEUES,
        advise_wait("the check's message says what it waits for, often new nodes."),
    ),
    "preempted": Situation("it was preempted or evicted, and its pods still save", _QUEUES),
    # The API server or a controller keeps its objects from being created.
    "unattended": Situation(
        "a controller, JobSet's or the Job controller, has not acted on it", _REJECTED
    ),
    "resource-quota": Situation(
        "a ResourceQuota is exceeded, or requires what the pods do not specify", _REJECTED
    ),
    "limit-range": Situation(
        "a LimitRange forbids what it requests",
        _REJECTED,
        advise_change("change resources: in job.yaml to be within the LimitRange."),
    ),
    "namespace-terminating": Situation("its namespace is being deleted", _REJECTED),
    "pod-security": Situation(
        "the namespace enforces a stricter Pod Security level",
        _REJECTED,
        advise_change(
            "remove what the message names (`{plan}` shows the level that a job needs), or use "
            "another namespace.",
            plan=PLAN,
        ),
    ),
    "admission": Situation(
        "a webhook or a ValidatingAdmissionPolicy denied the request", _REJECTED
    ),
    "webhook-down": Situation(
        "an admission webhook does not answer",
        _REJECTED,
        advise_ask(
            "ask the administrator to fix the webhook's server; the job then continues by itself."
        ),
    ),
    "service-account": Situation("its service account does not exist", _REJECTED),
    "priority": Situation(
        "its PriorityClass does not exist",
        _REJECTED,
        advise_change(
            "leave priority: out of job.yaml, or set one of `{get}` that does not begin with "
            "system-.",
            get=kubectl_command("get", "priorityclasses", is_namespaced=False),
        ),
    ),
    "runtime-class": Situation(
        "its RuntimeClass does not exist",
        _REJECTED,
        advise_change(
            "use one of `{get}`.", get=kubectl_command("get", "runtimeclasses", is_namespaced=False)
        ),
    ),
    "exclusive-placement": Situation(
        "the pods of a slice wait until its leader pod has a node",
        _REJECTED,
        advise_wait("wait: the first pod of a slice gets its node before the others."),
    ),
    "refused": Situation(
        "its pods are rejected for another reason",
        _REJECTED,
        advise_change("change what the message names, in job.yaml or in the namespace."),
    ),
    "creating": Situation("its pods are being created", None, advise_wait("wait a moment.")),
    # Its pods have no node.
    "resource": Situation("no node has enough of a resource, or enough of it free", _PENDING),
    "taint": Situation(
        "every node that matches its node selector has an untolerated taint", _PENDING
    ),
    "node-selector": Situation("no node matches its node selector", _PENDING),
    "no-nodes": Situation("the cluster has no nodes", _PENDING),
    "ports": Situation("its host ports are used on every node", _PENDING),
    "volume-missing": Situation(
        "the PersistentVolume of a claim no longer exists",
        _VOLUMES,
        advise_ask(
            "ask the cluster administrator to restore the volume, or use another claim "
            "under volumes:."
        ),
    ),
    "claim-missing": Situation("a PersistentVolumeClaim does not exist", _VOLUMES),
    "claim-unbound": Situation("a PersistentVolumeClaim is not bound", _VOLUMES),
    "claim-in-use": Situation(
        "a PersistentVolumeClaim is in use by another pod or on another node",
        _VOLUMES,
        advise_wait("wait until that pod has ended, or use a ReadWriteMany claim."),
    ),
    "volume-affinity": Situation(
        "no free node can mount its volume (volume node affinity conflict)",
        _VOLUMES,
        advise_change("use a volume that all zones can mount, or fewer hosts."),
    ),
    "spread": Situation(
        "its topology spread constraints, affinity or anti-affinity leave no node",
        _PENDING,
        advise_change(
            "change these under pod: in job.yaml, wait until other pods end, or use other nodes."
        ),
    ),
    "gated": Situation(
        "its pods have a scheduling gate",
        _PENDING,
        advise_ask("its owner must remove the gate; Kueue does so when it admits the job."),
    ),
    "scaling-up": Situation(
        "the autoscaler adds nodes for it",
        None,
        advise_wait("wait: new nodes take minutes; if none come, check the autoscaler."),
    ),
    "unschedulable": Situation("its pods are unschedulable for another reason", _PENDING),
    # Its pods have nodes, and their containers have not started.
    "image": Situation("an image cannot be pulled", "images"),
    "secret-missing": Situation("a Secret, or a key of it, does not exist", _VOLUMES),
    "configmap-missing": Situation("a ConfigMap, or a key of it, does not exist", _VOLUMES),
    "runs-as-root": Situation("the image runs as root, and the pod has runAsNonRoot", _CONTAINERS),
    "command": Situation("the command cannot be started", _CONTAINERS),
    "container": Situation("the container cannot be created for another reason", _CONTAINERS),
    "agent": Situation(
        "the image does not contain jaxlaunch",
        _CONTAINERS,
        advise_change(
            "set agent: inject to add the agent; a train: block needs an image with "
            "jaxlaunch installed."
        ),
    ),
    "init": Situation("an init container failed", _CONTAINERS),
    "init-runs": Situation("an init container runs, and the program starts after it", None),
    "mount": Situation(
        "a volume cannot be mounted",
        _VOLUMES,
        advise_change("check volumes: in job.yaml, and what the message names."),
    ),
    "sandbox": Situation(
        "the node cannot create the pod sandbox",
        _CONTAINERS,
        advise_ask(
            "ask the cluster administrator: the node's container runtime or its network "
            "(CNI) fails."
        ),
    ),
    "starting": Situation(
        "images are being pulled, or volumes and containers created",
        None,
        advise_wait("wait; a large image takes minutes on a new node."),
    ),
    # Its containers have started.
    "gathering": Situation("all hosts are connected, and it is about to start"),
    "sidecar": Situation(
        "a container that runs next to the program failed, or still runs after the "
        "program has ended",
        _CONTAINERS,
    ),
    "host-lost": Situation(
        "a host was lost: the others keep their pods and wait for its replacement",
        _LOST_HOSTS,
        advise_wait(
            "wait: after timeouts.replace it continues with fewer hosts, or all pods are replaced."
        ),
    ),
    "shrunk": Situation(
        "it runs with fewer hosts for a while, and uses more again when they are back", _LOST_HOSTS
    ),
    "spare-used": Situation(
        "it runs with all its ranks; the replacement of a lost pod is missing", _LOST_HOSTS
    ),
    "rendezvous": Situation("hosts are missing at the rendezvous", _LOST_HOSTS),
    "running": Situation("it runs"),
    "restarted": Situation("it runs again, in the attempt right after a failure"),
    "hang": Situation(
        "a rank exceeded one of its timeouts",
        "hangs-and-timeouts",
        advise_wait(
            "wait: the attempt is ended and restarted; its job result has the ranks' stacks."
        ),
    ),
    "restarting": Situation(
        "an attempt ended, and the next one is starting, in these pods or in new ones",
        None,
        _LOGS_STEP,
    ),
    "disrupted": Situation(
        "pods were removed: a drain, an eviction, a preemption, a lost node",
        _RESTARTS,
        advise_wait(),
    ),
    "node-lost": Situation(
        "a node is NotReady, or its object was deleted",
        _RESTARTS,
        advise_wait(
            "wait: Kubernetes evicts the node's pods, but makes them again elsewhere only when it "
            "is back or deleted."
        ),
    ),
    "unhealthy": Situation(
        "its liveness probe or postStart hook fails, and the kubelet stops its container "
        "again and again",
        _RESTARTS,
    ),
    "crash-loop": Situation(
        "it crashes and restarts again and again without saving a checkpoint",
        _RESTARTS,
        _LOGS_STEP,
    ),
}

# Next step for each exit code of an agent.
STEPS_BY_CODE: Mapping[int, NextStep] = {
    code: advise_resubmit(step, again=SUBMIT_AGAIN) if "{again}" in step else advise_change(step)
    for code, outcome in contract.OUTCOMES.items()
    if (step := outcome.next_step) is not None
}


def section_link(situation: str, code: int | None = None) -> str | None:
    """Return the command that shows the documentation of a situation, or None if there is none."""
    if situation == "failed" and code is not None:
        return troubleshooting.command_for_code(code)
    section = SITUATIONS[situation].section
    return None if section is None else troubleshooting.section_command(section)


def render_page(text: str) -> str:
    """Return the text of docs/troubleshooting.md with its table of situations generated again."""
    table = "| situation | meaning | see |\n|---|---|---|\n"
    for key, situation in SITUATIONS.items():
        section = situation.section
        link = "" if section is None else f"[{section.replace('-', ' ')}](#{section})"
        table += f"| `{key}` | {situation.meaning} | {link} |\n"
    return re.sub(r"\| situation \|.*\n(?:\|.*\n)+", lambda _: table, text, count=1)
