"""Jobs that no cluster would run, with our message and that of the API server.

Kubernetes 1.35, JobSet 0.12, Kueue 0.15. Ours: manifests/test_prepare.py. The server's:
cluster/test_admission.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxlaunch.launcher.job import defaults, load
from jaxlaunch.launcher.manifests.jobset import render, resolve

HEAD = {
    "name": "x",
    "image": "registry.example/train:1",
    "accelerator": "{type: cpu}",
    "command": "[python, train.py]",
}
LABEL = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.'"
)
KEY = "name part must consist of alphanumeric characters, '-', '_' or '.'"
NAME = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-'"
OBJECT = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.'"
)
QUANTITY = "quantities must match the regular expression"
# Where a manifest's parts begin, in the JobSet.
JOB = "spec.replicatedJobs.0.template.spec"
POD = f"{JOB}.template.spec"
MAIN = f"{POD}.containers.0"
META = f"{JOB}.template.metadata"


class RejectedJob(NamedTuple):
    lines: str  # of job.yaml, which replace HEAD's or are added
    ours: str
    path: str  # where it would arrive; `+` adds to a list, `~` stands for a dot in a key
    value: Any
    server: str


def job_text(lines: str) -> str:
    """The whole job.yaml."""
    keys = {line.partition(":")[0] for line in lines.splitlines()}
    return (
        "".join(f"{key}: {value}\n" for key, value in HEAD.items() if key not in keys)
        + lines
        + "\n"
    )


def broken_jobset(path: str, value: Any) -> dict[str, Any]:
    """The JobSet of a good job, with this value put where it would arrive."""
    (manifest, _) = render(resolve(load.parse_job(job_text("")), defaults.ClusterDefaults()))
    *parents, last = [key.replace("~", ".") for key in path.split(".")]
    place: Any = manifest
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})
    if last == "+":
        place.append(value)
    else:
        place[last] = value
    return manifest


TABLE = (
    RejectedJob(
        "name: Digits",
        "name = Digits is not a name: lower-case letters, digits and inner dashes, a letter first.",
        "metadata.name",
        "Digits",
        f'metadata.name: Invalid value: "Digits": {OBJECT}',
    ),
    RejectedJob(
        "name: 1st",
        "name = 1st is not a name: lower-case letters, digits and inner dashes, a letter first.",
        "metadata.name",
        "1st",
        '"1st-w-0": a DNS-1035 label must consist of lower case alphanumeric characters or '
        "'-', start with",
    ),
    RejectedJob(
        "name: a.b",
        "name = a.b is not a name: lower-case letters, digits and inner dashes, a letter first.",
        "metadata.name",
        "a.b",
        "\"a.b-w-0\": a DNS-1035 label must consist of lower case alphanumeric characters or '-'",
    ),
    RejectedJob(
        f"name: {'x' * 60}",
        "name has 60 characters, a pod's name with it 72; the limit is 63.",
        "metadata.name",
        "x" * 60,
        "JobSet name is too long, job names generated for this JobSet will exceed 63 characters",
    ),
    RejectedJob(
        "hosts: -1",
        "hosts = -1 is not a whole number above 0, or a block with the keys min, max.",
        f"{JOB}.completions",
        -1,
        "spec.completions: Invalid value: -1: must be greater than or equal to 0",
    ),
    RejectedJob(
        "ttl: -1",
        "ttl = -1 is not a duration above 0",
        "spec.ttlSecondsAfterFinished",
        -1,
        "spec.ttlSecondsAfterFinished in body should be greater than or equal to 0",
    ),
    RejectedJob(
        "ttl: 30000d",
        "ttl = 30000d is not a duration above 0",
        "spec.ttlSecondsAfterFinished",
        30_000 * 86_400,
        "cannot unmarshal number 2592000000 into Go struct field "
        "JobSetSpec.spec.ttlSecondsAfterFinished of type int32",
    ),
    RejectedJob(
        "deadline: -1",
        "deadline = -1 is not a duration above 0",
        f"{JOB}.activeDeadlineSeconds",
        -1,
        "spec.activeDeadlineSeconds: Invalid value: -1: must be greater than or equal to 0",
    ),
    RejectedJob(
        "grace: 60 seconds",
        "grace = 60 seconds is not a duration above 0",
        f"{POD}.terminationGracePeriodSeconds",
        "60 seconds",
        "terminationGracePeriodSeconds of type int64",
    ),
    RejectedJob(
        "labels: {team: a b}",
        "labels.team = a b is not a label's value: at most 63 letters, digits and inner dashes, "
        "dots and _.",
        "metadata.labels.team",
        "a b",
        f'metadata.labels: Invalid value: "a b": {LABEL}',
    ),
    RejectedJob(
        f"labels: {{team: {'a' * 64}}}",
        "is not a label's value: at most 63 letters, digits and inner dashes, dots and _.",
        "metadata.labels.team",
        "a" * 64,
        "must be no more than 63 bytes",
    ),
    RejectedJob(
        "labels: {my team: a}",
        'labels has the key "my team", which is not a label\'s key',
        "metadata.labels.my team",
        "a",
        f'metadata.labels: Invalid value: "my team": {KEY}',
    ),
    RejectedJob(
        "annotations: {my note: a}",
        'annotations has the key "my note", which is not a label\'s key',
        "metadata.annotations.my note",
        "a",
        f'metadata.annotations: Invalid value: "my note": {KEY}',
    ),
    RejectedJob(
        "node_selector: {zone: a b}",
        "node_selector.zone = a b is not a label's value",
        f"{POD}.nodeSelector.zone",
        "a b",
        f'spec.template.spec.nodeSelector: Invalid value: "a b": {LABEL}',
    ),
    RejectedJob(
        "tolerations: [{key: a, effect: NoRun}]",
        "tolerations.0.effect = NoRun is not one of NoSchedule, PreferNoSchedule, NoExecute.",
        f"{POD}.tolerations.+",
        {"key": "a", "effect": "NoRun"},
        'Unsupported value: "NoRun": supported values: "NoSchedule", "PreferNoSchedule", '
        '"NoExecute"',
    ),
    RejectedJob(
        "tolerations: [{key: a b, operator: Exists}]",
        "tolerations.0.key = a b is not a label's key",
        f"{POD}.tolerations.+",
        {"key": "a b", "operator": "Exists"},
        f'tolerations[2].key: Invalid value: "a b": {KEY}',
    ),
    RejectedJob(
        "env: {A=B: c}",
        'env has the key "A=B", which is not a variable\'s name: letters, digits and _.',
        f"{MAIN}.env.+",
        {"name": "A=B", "value": "c"},
        "a valid environment variable name must consist only of printable ASCII characters "
        "other than '='",
    ),
    RejectedJob(
        "secrets: {A: {name: My_Secret, key: a}}",
        "secrets.A.name is not a Kubernetes name: lower-case letters, digits, and inner "
        "dashes and dots.",
        f"{MAIN}.env.+",
        {"name": "A", "valueFrom": {"secretKeyRef": {"name": "My_Secret", "key": "a"}}},
        f'secretKeyRef.name: Invalid value: "My_Secret": {OBJECT}',
    ),
    RejectedJob(
        "secrets: {A: {name: s, key: a/b}}",
        "secrets.A.key is not a key of a Secret: letters, digits, dots, dashes and _.",
        f"{MAIN}.env.+",
        {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "a/b"}}},
        "a valid config key must consist of alphanumeric characters, '-', '_' or '.'",
    ),
    RejectedJob(
        "resources: {memory: 32GB}",
        "resources.memory = 32GB is not a Kubernetes quantity above 0",
        f"{MAIN}.resources.requests.memory",
        "32GB",
        QUANTITY,
    ),
    RejectedJob(
        "resources: {cpu: -1}",
        "resources.cpu = -1 is not a Kubernetes quantity above 0",
        f"{MAIN}.resources.requests.cpu",
        "-1",
        'resources.requests[cpu]: Invalid value: "-1": must be greater than or equal to 0',
    ),
    RejectedJob(
        "accelerator: {type: h100, per_host: 0.5}",
        "accelerator.per_host = 0.5 is not a whole number above 0.",
        f"{MAIN}.resources",
        {"requests": {"nvidia.com/gpu": "0.5"}, "limits": {"nvidia.com/gpu": "0.5"}},
        'nvidia.com/gpu]: Invalid value: "500m": must be an integer',
    ),
    RejectedJob(
        "accelerator: {type: h100}\nplatform: eks\nnetwork: efa\nresources: {hugepages: 5120Mi}",
        "resources.hugepages = 5120Mi: Kubernetes gives them only together with cpu or memory.",
        f"{MAIN}.resources",
        {"requests": {"hugepages-2Mi": "5120Mi"}, "limits": {"hugepages-2Mi": "5120Mi"}},
        "resources: Forbidden: HugePages require cpu or memory",
    ),
    RejectedJob(
        "accelerator: {type: h100}\nnetwork: {profile: rdma, resource: infiniband}",
        "network.resource = infiniband is not a resource's name, such as rdma/ib.",
        f"{MAIN}.resources",
        {"requests": {"infiniband": "1"}, "limits": {"infiniband": "1"}},
        'limits[infiniband]: Invalid value: "infiniband": must be a standard resource type or '
        "fully qualified",
    ),
    RejectedJob(
        "volumes: [{claim: a, path: /x}, {claim: b, path: /x}]",
        "volumes.1.path = /x is also the path of volumes.0.",
        f"{MAIN}.volumeMounts",
        [{"name": "tmp", "mountPath": "/x"}, {"name": "tmp", "mountPath": "/x", "readOnly": True}],
        'volumeMounts[1]: Duplicate value: {"mountPath":"/x"}',
    ),
    RejectedJob(
        'volumes: [{claim: "", path: /x}]',
        'volumes.0.claim = "" is not a Kubernetes name',
        f"{POD}.volumes.+",
        {"name": "v", "persistentVolumeClaim": {"claimName": ""}},
        "persistentVolumeClaim.claimName: Required value",
    ),
    RejectedJob(
        "volumes: [{ephemeral: -1Gi, path: /x}]",
        "volumes.0.ephemeral = -1Gi is not a Kubernetes quantity above 0",
        f"{POD}.volumes.+",
        {"name": "v", "emptyDir": {"sizeLimit": "-1Gi"}},
        "emptyDir.sizeLimit: Forbidden: SizeLimit field must be a valid resource quantity",
    ),
    RejectedJob(
        'image: ""',
        'image = "" is not an image, such as registry.example/train:1.4.',
        f"{MAIN}.image",
        "",
        "containers[0].image: Required value",
    ),
    RejectedJob(
        "init: [{command: [a]}]",
        "init.0 has no name.",
        f"{POD}.initContainers",
        [{"image": "i", "command": ["a"]}],
        "initContainers[0].name: Required value",
    ),
    RejectedJob(
        "init: [{name: Prepare_1}]",
        "container Prepare_1: its name is not a name of at most 63 lower-case letters, digits and "
        "inner dashes.",
        f"{POD}.initContainers",
        [{"name": "Prepare_1", "image": "i"}],
        f'initContainers[0].name: Invalid value: "Prepare_1": {NAME}',
    ),
    RejectedJob(
        "init: [{name: main}]",
        "init.0.name = main is taken.",
        f"{POD}.initContainers",
        [{"name": "main", "image": "i"}],
        'initContainers[0].name: Duplicate value: "main"',
    ),
    RejectedJob(
        "init: [{name: a}, {name: a}]",
        "init.1.name = a is taken.",
        f"{POD}.initContainers",
        [{"name": "a", "image": "i"}, {"name": "a", "image": "i"}],
        'initContainers[1]: Duplicate value: {"name":"a"}',
    ),
    RejectedJob(
        "pod: {spec: {containers: [{name: exporter}]}}",
        "container exporter: it has no image.",
        f"{POD}.containers.+",
        {"name": "exporter"},
        "containers[1].image: Required value",
    ),
    RejectedJob(
        "pod: {spec: {containers: [{image: i}]}}",
        "pod.spec.containers is merged by name.",
        f"{POD}.containers.+",
        {"image": "i"},
        "containers[1].name: Required value",
    ),
    RejectedJob(
        "pod: {spec: {containers: [{name: main, volumeMounts: [{name: cache, mountPath: "
        "/cache}]}]}}",
        "container main: it mounts cache, and no volume has that name.",
        f"{MAIN}.volumeMounts.+",
        {"name": "cache", "mountPath": "/cache"},
        'volumeMounts[1].name: Not found: "cache"',
    ),
    RejectedJob(
        "pod: {spec: {containers: [{name: main, resources: {requests: {memory: 2Gi}, limits: "
        "{memory: 1Gi}}}]}}",
        "container main: it requests 2Gi of memory, and its limit is 1Gi.",
        f"{MAIN}.resources",
        {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}},
        'Invalid value: "2Gi": must be less than or equal to memory limit of 1Gi',
    ),
    RejectedJob(
        "pod: {spec: {volumes: [{name: My_Cache, emptyDir: {}}]}}",
        "volume My_Cache: its name is not a name of at most 63 lower-case letters, digits and "
        "inner dashes.",
        f"{POD}.volumes.+",
        {"name": "My_Cache", "emptyDir": {}},
        f'volumes[1].name: Invalid value: "My_Cache": {NAME}',
    ),
    RejectedJob(
        "pod: {spec: {restartPolicy: OnFailure}}",
        "pod.spec.restartPolicy is set by the launcher.",
        f"{POD}.restartPolicy",
        "OnFailure",
        'only "Never" is supported when podFailurePolicy is specified',
    ),
    RejectedJob(
        "service_account: My_Account",
        "service_account = My_Account is not a Kubernetes name",
        f"{POD}.serviceAccountName",
        "My_Account",
        f'spec.template.spec.serviceAccountName: Invalid value: "My_Account": {OBJECT}',
    ),
    RejectedJob(
        "priority: Very_High",
        "priority = Very_High is not a Kubernetes name",
        f"{POD}.priorityClassName",
        "Very_High",
        f'spec.template.spec.priorityClassName: Invalid value: "Very_High": {OBJECT}',
    ),
    RejectedJob(
        "queue: My_Queue",
        "queue = My_Queue is not a name of at most 63 lower-case letters, digits and inner dashes.",
        "metadata.labels.kueue~x-k8s~io/queue-name",
        "My_Queue",
        f'metadata.labels[kueue.x-k8s.io/queue-name]: Invalid value: "My_Queue": {OBJECT}',
    ),
    RejectedJob(
        "queue: q\nplacement: {preferred: same rack}",
        "placement.preferred = same rack is not a label's key",
        f"{META}.annotations.kueue~x-k8s~io/podset-preferred-topology",
        "same rack",
        f'annotations[kueue.x-k8s.io/podset-preferred-topology]: Invalid value: "same rack": {KEY}',
    ),
)
