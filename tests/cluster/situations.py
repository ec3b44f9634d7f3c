"""Situations of a job on a real cluster, how to cause them, and their expected first line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tests.cluster.access import Access
from tests.cluster.gangs import Object, program_command, replace_agent
from tests.cluster.preparations import KUEUE, make_queue

SMALL = {"cpu": "20m", "memory": "128Mi"}
POOL = "jaxlaunch.test/pool"  # label of the fake nodes, which are tainted

# Of a namespace: its Pod Security level, what is made in it.
Prepare = tuple[str, Callable[[Access, str], None]]


@dataclasses.dataclass(frozen=True)
class Situation:
    """A job, its namespace, and a regular expression for the first line of `explain`."""

    first_line: str
    job: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    namespace: str = "plain"
    change: Callable[[Object], None] = lambda jobset: None
    starts_after: str = ""  # the name of a situation that has settled before
    after: str = ""  # the first line after which `then` happens
    then: Callable[[Access, str, str], None] | None = None  # with namespace and name


# --- what is done to the JobSet -------------------------------------------------------------------


def get_pod_spec(jobset: Object) -> Object:
    (job,) = jobset["spec"]["replicatedJobs"]
    spec: Object = job["template"]["spec"]["template"]["spec"]
    return spec


def never_pull(jobset: Object) -> None:
    get_pod_spec(jobset)["containers"][0]["imagePullPolicy"] = "Never"


def delay_host(jobset: Object) -> None:
    """Keep the agent of host 1 from starting."""
    main = get_pod_spec(jobset)["containers"][0]
    main["command"] = [
        "sh",
        "-c",
        f'[ "$JOB_COMPLETION_INDEX" = 1 ] && exec sleep 600; exec {" ".join(main["command"])}',
    ]


def disguise_origin(jobset: Object) -> None:
    """Change the JobSet as if another tool had made it."""
    del jobset["metadata"]["labels"]["jaxlaunch.io/job"]
    del get_pod_spec(jobset)["containers"][0]["env"]
    replace_agent(["sleep", "600"])(jobset)


def add_finalizer(jobset: Object) -> None:
    """Add a finalizer, so that the JobSet cannot be deleted."""
    jobset["metadata"]["finalizers"] = ["jaxlaunch.test/hold"]


# --- what is done to the namespace ----------------------------------------------------------------


def create_object(
    cluster: Access, path: str, version: str, kind: str, name: str, **body: Any
) -> None:
    metadata = {"name": name}
    cluster.api.create(path, {"apiVersion": version, "kind": kind, "metadata": metadata, **body})


def forbid_pods(cluster: Access, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    create_object(cluster, path, "v1", "ResourceQuota", "few", spec={"hard": {"pods": "0"}})


def require_limits(cluster: Access, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    create_object(
        cluster, path, "v1", "ResourceQuota", "strict", spec={"hard": {"limits.cpu": "4"}}
    )


def limit_containers(cluster: Access, namespace: str) -> None:
    limits = [{"type": "Container", "max": {"memory": "64Mi"}}]
    path = f"/api/v1/namespaces/{namespace}/limitranges"
    create_object(cluster, path, "v1", "LimitRange", "small", spec={"limits": limits})


def add_unbound_claim(cluster: Access, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    spec = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": "",
    }
    create_object(cluster, path, "v1", "PersistentVolumeClaim", "unbound", spec=spec)


def add_secret(cluster: Access, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/secrets"
    create_object(cluster, path, "v1", "Secret", "known", stringData={"user": "me"})


def prepare_plain(cluster: Access, namespace: str) -> None:
    add_unbound_claim(cluster, namespace)
    add_secret(cluster, namespace)


def add_dead_webhook(resource: str, group: str) -> Callable[[Access, str], None]:
    """Add a webhook that nobody serves for these objects of the namespace."""

    def prepare(cluster: Access, namespace: str) -> None:
        webhook = {
            "name": f"{resource}.dead.test",
            "rules": [
                {
                    "operations": ["CREATE"],
                    "apiGroups": [group],
                    "apiVersions": ["v1"],
                    "resources": [resource],
                }
            ],
            "clientConfig": {"url": "https://127.0.0.1:1/nobody"},
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "failurePolicy": "Fail",
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }
        kind = "ValidatingWebhookConfiguration"
        version = "admissionregistration.k8s.io/v1"
        path = f"/apis/{version}/validatingwebhookconfigurations"
        create_object(cluster, path, version, kind, namespace, webhooks=[webhook])

    return prepare


def add_policy(cluster: Access, namespace: str) -> None:
    """Add a ValidatingAdmissionPolicy that requires a label that the pods do not have."""
    version = "admissionregistration.k8s.io/v1"
    pods = [
        {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
    ]
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": pods},
        "validations": [
            {"expression": "'cost-center' in object.metadata.labels", "message": "say who pays"}
        ],
    }
    within = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    binding = {"policyName": namespace, "validationActions": ["Deny"], "matchResources": within}
    path = f"/apis/{version}/validatingadmissionpolicies"
    create_object(cluster, path, version, "ValidatingAdmissionPolicy", namespace, spec=spec)
    path = f"/apis/{version}/validatingadmissionpolicybindings"
    create_object(
        cluster, path, version, "ValidatingAdmissionPolicyBinding", namespace, spec=binding
    )


def make_queues(cluster: Access, namespace: str) -> None:
    """Make a small queue, a busy one, two stopped ones, and one with preemption."""
    quota = {"cpu": "100m", "memory": "1Gi"}
    for name in ("small", "busy", "stopped", "held"):
        make_queue(cluster, namespace, quota, name=name)
    make_queue(
        cluster, namespace, quota, name="ranked", preemption={"withinClusterQueue": "LowerPriority"}
    )
    hold = {"spec": {"stopPolicy": "Hold"}}
    cluster.api.merge(f"/apis/{KUEUE}/clusterqueues/{namespace}-stopped", hold)
    cluster.api.merge(f"/apis/{KUEUE}/namespaces/{namespace}/localqueues/held", hold)
    for name, value in (("low", 1), ("high", 2)):
        path = f"/apis/{KUEUE}/workloadpriorityclasses"
        create_object(
            cluster, path, KUEUE, "WorkloadPriorityClass", f"{namespace}-{name}", value=value
        )


PREPARED: Mapping[str, Prepare] = {
    "plain": ("restricted", prepare_plain),
    "no-pods": ("restricted", forbid_pods),
    "all-limits": ("restricted", require_limits),
    "small": ("restricted", limit_containers),
    "dead-pods": ("restricted", add_dead_webhook("pods", "")),
    "dead-jobs": ("restricted", add_dead_webhook("jobs", "batch")),
    "policy": ("restricted", add_policy),
    "queues": ("restricted", make_queues),
}

SLEEP = ["sleep", "600"]
FILL = [
    "python",
    "-c",
    "open('/tmp/block', 'wb').write(bytes(2**26))\nimport time\ntime.sleep(600)",
]
HOARD = ["python", "-c", "hoard = bytearray()\nwhile True: hoard += b'x' * 2**20"]

# A name, which is the job's too. {registry} is a registry that has nothing; {server}, the API
# server, would have a certificate that nodes do not trust.
SITUATIONS: Mapping[str, Situation] = {
    # images
    "no-image": Situation(
        "its host cannot pull image {registry}/none:1: the image does not exist",
        {"image": "{registry}/none:1"},
    ),
    "locked": Situation(
        "image {registry}/locked:1: the registry requires credentials",
        {"image": "{registry}/locked:1"},
    ),
    "no-registry": Situation(
        "the node cannot reach the registry", {"image": "registry.invalid/none:1"}
    ),
    "not-loaded": Situation(
        "the node does not have it", {"image": "localhost/none:1"}, change=never_pull
    ),
    "no-name": Situation("that is not a valid image name", {"image": "localhost/UPPER:1"}),
    # nodes
    "too-large": Situation(
        "unschedulable: each host requests 500 cpu, the largest", {"resources": {"cpu": 500}}
    ),
    "gpu": Situation(
        "requests 8 nvidia.com/gpu, the largest node has 0",
        {"accelerator": {"type": "h100", "per_host": 8}},
    ),
    "no-label": Situation(
        "no node has label disk=ssd; no node has a label disk", {"node_selector": {"disk": "ssd"}}
    ),
    "tainted": Situation(
        "untolerated taint jaxlaunch.test/fake=true:NoSchedule on 2 of 2 nodes",
        {"node_selector": {POOL: "{pool}"}},
    ),
    # volumes, secrets
    "no-claim": Situation(
        "PersistentVolumeClaim none does not exist", {"volumes": [{"claim": "none", "path": "/x"}]}
    ),
    "unbound": Situation(
        "PersistentVolumeClaim unbound is not bound: no persistent",
        {"volumes": [{"claim": "unbound", "path": "/x"}]},
    ),
    "no-secret": Situation(
        "Secret none does not exist", {"secrets": {"TOKEN": {"name": "none", "key": "token"}}}
    ),
    "no-key": Situation(
        "Secret known has no key token", {"secrets": {"TOKEN": {"name": "known", "key": "token"}}}
    ),
    "no-secret-volume": Situation(
        "Secret none does not exist", {"volumes": [{"secret": "none", "path": "/x"}]}
    ),
    "no-configmap": Situation(
        "ConfigMap none does not exist", {"volumes": [{"configmap": "none", "path": "/x"}]}
    ),
    # admission
    "quota": Situation(
        "its pod is rejected: ResourceQuota few is exceeded: requested pods=1, used pods=0, "
        "limited pods=0",
        namespace="no-pods",
    ),
    "unlimited": Situation(
        "ResourceQuota strict requires every pod to specify limits.cpu", namespace="all-limits"
    ),
    "beyond": Situation(
        "a LimitRange of the namespace forbids it: maximum memory usage per Container is 64Mi",
        namespace="small",
    ),
    "insecure": Situation(
        'the namespace enforces Pod Security "restricted:latest": host', {"network": "hostnetwork"}
    ),
    "webhook-pods": Situation(
        "its pod is rejected: webhook pods.dead.test does not answer: connection refused",
        namespace="dead-pods",
    ),
    # The JobSet's event keeps the message of the first attempt. Kueue's webhook is asked first,
    # and may not have seen the JobSet yet.
    "webhook-jobs": Situation(
        "has no Jobs: webhook (jobs.dead.test does not answer: connection refused"
        "|mjob.kb.io denied the request: JobSet.*not found)",
        namespace="dead-jobs",
    ),
    "policy": Situation(
        "ValidatingAdmissionPolicy .* denied the request: say who pays", namespace="policy"
    ),
    "no-account": Situation("service account none does not exist", {"service_account": "none"}),
    "no-priority": Situation("PriorityClass none does not exist", {"priority": "none"}),
    # queues
    "never": Situation(
        "can never admit it: it requests 1 cpu, .* has 100m in total",
        {"queue": "small", "resources": {"cpu": 1, "memory": "64Mi"}},
        "queues",
    ),
    "no-queue": Situation("LocalQueue none does not exist", {"queue": "none"}, "queues"),
    "stopped-queue": Situation(
        "ClusterQueue .*-stopped is stopped", {"queue": "stopped"}, "queues"
    ),
    "held-queue": Situation("LocalQueue held is stopped", {"queue": "held"}, "queues"),
    "first": Situation(
        "runs",
        {"queue": "busy", "resources": {"cpu": "80m", "memory": "64Mi"}, "command": SLEEP},
        "queues",
    ),
    # the program
    "no-agent": Situation(
        "cannot start on its host: image \\S+ does not contain jaxlaunch", {"agent": "image"}
    ),
    "no-command": Situation(
        "cannot start on its host: command /none", change=replace_agent(["/none"])
    ),
    "bad-init": Situation(
        "init container prepare ended with exit code 3",
        {"init": [{"name": "prepare", "command": ["sh", "-c", "exit 3"]}]},
    ),
    "bad-spec": Situation(
        "failed: bad_spec \\(exit 64\\)", {"command": program_command("ends.py", "64")}
    ),
    "raises": Situation(
        "failed: startup \\(exit 70\\): rank 0 raised.*ValueError: no such dataset: mnits",
        {"command": program_command("stumbles.py", "raise")},
    ),
    "crashes": Situation(
        "crashes and restarts without saving a checkpoint: 2 of 9 restarts are used up; last: "
        "crash \\(83\\)",
        {"command": program_command("ends.py", "83", "2"), "restarts": {"in_place": 1, "crash": 9}},
    ),
    "hangs": Situation(
        "failed: hang \\(exit 82\\): ",
        {"command": program_command("stumbles.py", "hang"), "timeouts": {"step": "2s"}},
    ),
    "again": Situation(
        "runs again after crash \\(83\\): .*at step 3",
        {
            "command": program_command("stumbles.py", "crash-once"),
            "restarts": {"in_place": 1, "crash": 0},
        },
    ),
    "alone": Situation(
        "waits at rendezvous for \\d+s: host 1 of 2 missing",
        {"hosts": 2, "command": SLEEP},
        change=delay_host,
    ),
    "child-oom": Situation(
        "failed: rank 0 was OOMKilled",
        {
            "command": program_command("grows.py", "child", "0"),
            "resources": {"cpu": "20m", "memory": "96Mi"},
        },
    ),
    "whole-oom": Situation(
        "failed: .*(was OOMKilled|probably out of memory); its memory limit is 96Mi",
        {"resources": {"cpu": "20m", "memory": "96Mi"}},
        change=replace_agent(HOARD),
    ),
    "excess": Situation(  # the kubelet looks at volumes once a minute
        "failed: its host was evicted: Pod ephemeral local storage usage exceeds .* 16Mi "
        "\\(resources.ephemeral\\)",
        {"resources": {**SMALL, "ephemeral": "16Mi"}, "command": FILL},
    ),
    "late": Situation(
        "failed: its deadline of 3s was exceeded", {"deadline": "3s", "command": SLEEP}
    ),
    "runs": Situation(
        "runs: training at step 3", {"command": program_command("stumbles.py", "hang")}
    ),
    "done": Situation("is done", {"command": ["true"]}),
    "another": Situation("runs: [01] of 1 host ready", change=disguise_origin),
}
