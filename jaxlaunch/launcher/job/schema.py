"""The keys of job.yaml: types, defaults and descriptions.

Keys that only a cluster needs are included, so that they are checked wherever the file is read.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field

from jaxlaunch import accelerators, contract
from jaxlaunch.accelerators import ACCELERATORS, Platform
from jaxlaunch.contract import AgentJob, Requeue
from jaxlaunch.launcher.job.introspection import TypeDescription
from jaxlaunch.launcher.job.types import (
    Duration,
    ExitCodeKey,
    JobName,
    Label,
    LabelKey,
    LabelValue,
    ObjectName,
    Quantity,
    Text,
    Variable,
    Volume,
)
from jaxlaunch.launcher.kubernetes.labels import SWEEP_LABEL
from jaxlaunch.launcher.kubernetes.resources import parse_quantity
from jaxlaunch.launcher.platforms import names
from jaxlaunch.launcher.platforms.table import PlatformName
from jaxlaunch.launcher.wording import format_duration
from jaxlaunch.trainer.spec import (
    TASK_DEFAULTS,
    Block,
    Few,
    Natural,
    Positive,
    TrainSpec,
    Unset,
    at_most,
    shrink_mesh,
    shrink_to_devices,
)

if TYPE_CHECKING:
    AcceleratorType = str
else:
    # The names are the rows of jaxlaunch/accelerators.py.
    AcceleratorType = Annotated[
        Literal[tuple(ACCELERATORS)],
        TypeDescription("the name of an accelerator that jaxlaunch knows", names.suggest),
    ]
# Kubernetes' validation limits an indexed Job by maxParallelismForIndexedJob.
MAX_PODS = 100_000
PodCount = Annotated[
    int, Field(gt=0), at_most(MAX_PODS, "the most pods that an indexed Job of Kubernetes has")
]
_ResourceName = Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")]


class HostRange(Block):
    """The number of hosts of a job that can continue with fewer.

    ```yaml
    # four; with two or three, when a lost one is not replaced within timeouts.replace
    hosts: {min: 2, max: 4}
    train:
      {task: classify, mesh: {dp: -1}, batch: 96, steps: 1000, model: {kind: mlp},
       data: {source: synthetic}}
    ```
    """

    min: PodCount = Field(
        description="the smallest number of hosts that may train; host 0 is one of them"
    )
    max: PodCount = Field(description="the number of hosts that train when all are available")


Tracker = Annotated[
    str,
    Field(pattern=r"^(wandb|mlflow|trackio|tensorboard|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$"),
    TypeDescription("wandb, mlflow, trackio, tensorboard, or module:Name of a class of your own"),
]


class Tracking(Block):
    """The tracker, as a block.

    ```yaml
    # or the tracker alone: tracker: wandb
    tracker: {name: wandb, project: vision}
    ```
    """

    name: Tracker = Field(description="the tracker")
    project: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None,
        description="the project, or the experiment of MLflow, that the run is shown in",
        json_schema_extra=Unset(
            "the tracker's own variable, such as WANDB_PROJECT, "
            "else the name of the folder of this file"
        ),
    )


# Keys whose scalars are kept as written: `--lr 3e-4` in a command must not become 0.0003.
VERBATIM_KEYS = ("command", "env", "labels", "annotations", "node_selector")


def _default_per_host(values: dict[str, Any]) -> int:
    accelerator, topology = ACCELERATORS[values["type"]], values["topology"]
    if accelerator.platform == "tpu" and topology is not None:
        return accelerators.chips_per_host(values["type"], topology)[0]
    # Another resource is usually a part of a device, whose number per host is not known.
    return accelerator.per_host if values["resource"] is None else 1


class Accelerator(Block):
    """The devices of a host, and for a TPU the shape of a slice.

    ```yaml
    # for a TPU {type: v5e, topology: 4x4}, which is 16 chips; for a part of a GPU
    # {type: h100, resource: nvidia.com/mig-1g.10gb}
    accelerator: {type: h100, per_host: 8}
    ```
    """

    type: AcceleratorType = Field(
        description="cpu; gpu, which is any NVIDIA GPU; amdgpu, any AMD GPU; plugin, a device of "
        "another vendor for which the image has a plugin of JAX; or "
        f"{', '.join([*ACCELERATORS][4:])}"
    )
    topology: str | None = Field(
        None,
        description="topology of a TPU slice, such as 2x4 or 4x4x8",
        json_schema_extra=Unset("none: only TPUs have one, and need it"),
    )
    resource: (
        Annotated[
            _ResourceName, TypeDescription("a resource's name, such as nvidia.com/mig-1g.10gb")
        ]
        | None
    ) = Field(
        None,
        description="the device plugin's resource, such as nvidia.com/mig-1g.10gb, "
        "amd.com/cpx_nps4 or, with plugin, aws.amazon.com/neuroncore",
        json_schema_extra=Unset("nvidia.com/gpu, amd.com/gpu or google.com/tpu"),
    )
    per_host: Few = Field(
        default_factory=_default_per_host,
        description="accelerators per host; with cpu, virtual devices",
        json_schema_extra=Unset(
            f"{accelerators.describe_per_host_defaults()}, 1 with resource, TPUs by the topology"
        ),
    )
    memory: Quantity | None = Field(
        None,
        description="memory of one GPU, for `launcher plan`, if the type does not determine it",
        json_schema_extra=Unset("the type's"),
    )

    @property
    def platform(self) -> Platform:
        """JAX's name of the platform: cpu, cuda, rocm or tpu; plugin for any other."""
        return ACCELERATORS[self.type].platform

    @property
    def partition_gb(self) -> int | None:
        """Memory of a MIG device in GB, from the name of its resource; None for a whole GPU."""
        profile = re.search(r"/mig-\d+g\.(\d+)gb", self.resource or "")
        return None if profile is None else int(profile[1])

    @property
    def devices_per_host(self) -> int:
        """JAX devices per host; a 7x chip has two."""
        return self.per_host * ACCELERATORS[self.type].devices_per_chip


class Reservation(Block):
    """Reserved capacity.

    ```yaml
    accelerator: {type: h200}
    capacity: {reservation: ml-2026, project: shared}  # or a word: on-demand, spot, flex-start
    ```
    """

    reservation: Annotated[ObjectName, Field(max_length=63)] = Field(
        description="name of the reservation; on Karpenter's nodes its id"
    )
    project: Label | None = Field(
        None,
        description="gke: the project that shares the reservation",
        json_schema_extra=Unset("the cluster's own"),
    )
    block: Label | None = Field(
        None, description="gke: one block of the reservation", json_schema_extra=Unset("any block")
    )
    sub_block: Label | None = Field(
        None,
        description="gke: one sub-block of the block",
        json_schema_extra=Unset("any sub-block"),
    )


Capacity = Literal["on-demand", "spot", "flex-start"] | Reservation


class Placement(Block):
    """The placement of a slice: in one domain of a level of Kueue's Topology, such as a rack.

    ```yaml
    accelerator: {type: h200}
    queue: research  # placement is Kueue's: it needs a queue
    # required: waits until there is room
    placement: {preferred: cloud.google.com/gce-topology-block}
    ```
    """

    preferred: LabelKey | None = Field(
        None,
        description="the level, if one of its domains has room; a TPU slice also gets a whole "
        "node pool",
        json_schema_extra=Unset("none"),
    )
    required: LabelKey | None = Field(
        None,
        description="the level; the job waits until one of its domains has room for a slice",
        json_schema_extra=Unset("none"),
    )


class Rdma(Block):
    """A fast network whose device has a resource name of its own on this cluster.

    ```yaml
    accelerator: {type: h100, per_host: 8}
    network: {profile: rdma, resource: rdma/ib, count: 8}  # or a word: default, hostnetwork, efa
    ```
    """

    profile: Literal["rdma"] = Field(description="rdma, the only profile so far")
    resource: Annotated[_ResourceName, TypeDescription("a resource's name, such as rdma/ib")] = (
        Field(description="the extended resource, such as rdma/ib")
    )
    count: Few = Field(1, description="number of devices per host")
    networks: list[
        Annotated[
            str,
            Field(pattern=r"^([a-z0-9-]+/)?[a-z0-9.-]+(@[a-z0-9]+)?$"),
            TypeDescription("a network, such as rdma-vf"),
        ]
    ] = Field(
        [],
        description="networks of Multus, one for each interface of a pod in addition to eth0; "
        "needed for SR-IOV",
    )
    env: dict[Variable, Text] = Field(
        {}, description="variables that NCCL needs for this network; the job's env has precedence"
    )


Network = (
    Literal[
        "default",
        "hostnetwork",
        "efa",
        "efa-dra",
        "gpudirect-tcpxo",
        "gpudirect-rdma",
        "gpudirect-rdma-dra",
    ]
    | Rdma
)


class Resources(Block):
    """Requests of a host's pod, in addition to its accelerators. The memory limit is the request.

    ```yaml
    resources:
      cpu: 64         # cores
      memory: 512Gi   # beyond it the kernel kills the process: OOMKilled
      shm: 64Gi       # /dev/shm for data loader workers and NCCL; part of memory
    ```
    """

    cpu: Quantity | None = Field(None, description="cores", json_schema_extra=Unset("no request"))
    memory: Quantity | None = Field(
        None, description="request and limit", json_schema_extra=Unset("neither")
    )
    ephemeral: Quantity | None = Field(
        None, description="ephemeral storage", json_schema_extra=Unset("no request")
    )
    shm: Quantity | None = Field(
        None,
        description="size of /dev/shm; counts against memory",
        json_schema_extra=Unset("no limit on GPUs, elsewhere the runtime's"),
    )
    hugepages: Quantity | None = Field(
        None,
        description="huge pages of 2 MiB; Karpenter does not add nodes for them",
        json_schema_extra=Unset("none"),
    )


class Restarts(Block):
    """Restart limits per failure type. Preemptions and drained nodes are not crashes.

    ```yaml
    restarts:
      crash: 3              # new pods after a crash, a hang or a lost host
      in_place: 1           # before that, one start in the same pods
      preempted: unlimited  # spot capacity
      codes: {42: free}     # sys.exit(42) asks for another run
    ```
    """

    crash: Natural = Field(
        5,
        description="how often all pods are replaced after a crash or a hang; also how often each "
        "lost pod is replaced alone",
    )
    in_place: Natural = Field(
        3, description="restarts in the same pods in a row without a newly saved step"
    )
    preempted: Positive | Literal["unlimited"] = Field(
        20,
        description="preemptions, evictions, drained nodes and free restarts in a row without a "
        "newly saved step",
    )
    codes: dict[ExitCodeKey, Literal["free", "charged", "free-new-pods", "charged-new-pods"]] = (
        Field(
            {},
            description="exit codes by which a program asks to be run again, in the same pods or "
            "(-new-pods) in new ones; free: counted like a preemption; charged: like a crash",
        )
    )


def _timeout_field(phase: str, description: str) -> Any:
    """Return the field of a phase's timeout, with the agent's default."""
    default = format_duration(contract.TIMEOUTS_S[phase] or 0.0)
    return Field(default, description=description)


class Timeouts(Block, validate_default=True):
    """Timeouts: how long a phase may take before it counts as a hang. null: none.

    ```yaml
    timeouts:
      compile: 1h     # a large model
      first_step: 30m # a program that never comes to its first step hangs
      step: 5m        # fixed; auto follows the median
    ```
    """

    rendezvous: Duration | None = _timeout_field("rendezvous", "until every host has connected")
    replace: Duration | None = _timeout_field(
        "replace", "until a lost host is replaced, while the others keep their pods"
    )
    prepare: Duration | None = _timeout_field("prepare", "tokenizing and packing text, once")
    init: Duration | None = _timeout_field("init", "jax.distributed and the devices")
    restore: Duration | None = _timeout_field("restore", "reading the checkpoint")
    compile: Duration | None = _timeout_field("compile", "one compilation")
    first_step: Duration | None = Field(
        None,
        description="from the start of the program to the first step that it reports",
        json_schema_extra=Unset("no limit, since a program need not report steps"),
    )
    step: Duration | Literal["auto"] = Field(
        "auto", description="one step; auto: the larger of 60s and 10 × the median"
    )
    data: Duration | None = _timeout_field("data", "waiting for one batch")
    eval: Duration | None = _timeout_field("eval", "one evaluation")
    save: Duration | None = _timeout_field("save", "one save, until it is committed")

    def to_seconds(self) -> dict[str, float | None]:
        """Return the timeouts that an agent enforces, in seconds; None if learned or not set."""
        # The agent has this default. Without the key, digests of existing jobs do not change.
        excluded = {contract.FIRST_STEP} if self.first_step is None else set()
        timeouts = {name: value for name, value in self if name not in excluded}
        return {name: None if value == "auto" else value for name, value in timeouts.items()}


class Logs(Block):
    """The output of the processes on the checkpoints' volume, in addition to the pods' logs.

    ```yaml
    logs: {kept: 64Mi}  # per rank, over all attempts
    ```
    """

    kept: Quantity = Field(
        "16Mi",
        description="size of the output of each rank that is kept in the run folder, over all "
        "attempts of a start; beyond it the oldest half is dropped, and its size is recorded",
    )


class SecretKey(Block):
    """One key of a Secret, as an environment variable.

    ```yaml
    secrets:
      # kubectl create secret generic wandb --from-literal=api-key=…
      WANDB_API_KEY: {name: wandb, key: api-key}
    ```
    """

    name: ObjectName = Field(description="the Secret's name")
    key: Annotated[
        str,
        Field(pattern=r"^[-._a-zA-Z0-9]+$"),
        TypeDescription("a key of a Secret: letters, digits, dots, dashes and _"),
    ] = Field(description="the key in it")


class Toleration(Block):
    """A taint that the pods tolerate, as Kubernetes writes it.

    ```yaml
    tolerations:
      - {key: team, value: vision, effect: NoSchedule}  # nodes that are kept for a team
      - {key: maintenance, operator: Exists}            # whatever its value
    ```
    """

    key: LabelKey | None = Field(
        None, description="key of the taint", json_schema_extra=Unset("every taint, with Exists")
    )
    operator: Literal["Exists", "Equal"] = Field("Equal", description="whether value is compared")
    value: LabelValue | None = Field(
        None, description="for Equal", json_schema_extra=Unset("the empty value")
    )
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="what the taint does", json_schema_extra=Unset("every effect", "null:")
    )
    seconds: Natural | None = Field(
        None,
        alias="tolerationSeconds",
        description="with NoExecute",
        json_schema_extra=Unset("without limit", "null:"),
    )


class Code(Block):
    """The user's code, as a block.

    ```yaml
    # or the folder alone: code: .
    code: {folder: ., include: {tests/server.key: signs for localhost alone}}
    ```
    """

    folder: Annotated[str, Field(min_length=1)] = Field(
        ".",
        description="a folder to ship, relative to this file, without the files that git ignores",
    )
    include: (
        list[Annotated[str, Field(min_length=1)]]
        | dict[Annotated[str, Field(min_length=1)], Annotated[str, Field(min_length=1)]]
    ) = Field(
        [],
        description="files and folders in it that are shipped although they look like "
        "credentials, each with a reason for the readers of the job, or as a list",
    )


class Notify(Block, validate_default=True):
    """A webhook that host 0's agent notifies of what happens. It never delays or fails the job.

    ```yaml
    secrets: {SLACK_URL: {name: slack, key: url}}
    # a message for each of these
    notify: {url: SLACK_URL, format: slack, events: [failure, stall, done]}
    ```
    """

    url: Variable = Field(description="the variable under secrets that holds the address")
    format: Literal["json", "slack"] = Field(
        "json", description="format of the message: a JSON object with every field, or Slack's"
    )
    events: list[Literal["failure", "stall", "done", "best"]] = Field(
        ["failure", "stall", "done"],
        description="events that are reported: an attempt that failed or was stopped, no progress "
        "for `stall`, a job that is done, an evaluation that is the best by train.checkpoint.best",
    )
    stall: Duration = Field(
        "15m", validate_default=True, description="time in one step or phase that counts as a stall"
    )


class Role(Block):
    """A named group of hosts of a job, which runs a program of its own.

    It may set most keys of the job, whose values are its defaults.

    ```yaml
    accelerator: {type: cpu}
    jobs:
      trainer: {ends: true, hosts: 2, command: [python, train.py]}
      # a failed evaluation does not end the training
      evaluator: {may_fail: true, needs: {trainer: started}, command: [python, evaluate.py]}
    ```
    """

    # The other keys are validated as those of a job, after the defaults were added.
    model_config = ConfigDict(extra="allow")

    ends: bool = Field(
        False, description="whether the job is done when this role is, and the others are stopped"
    )
    may_fail: bool = Field(False, description="whether the job continues when this role has failed")
    needs: dict[Label, Literal["started"]] = Field(
        {},
        description="roles whose pods must run before those of this one are created",
        # The limit of JobSet's dependsOn.
        max_length=5,
    )


MAX_ROLES = 16


def _default_hosts(values: dict[str, Any]) -> int:
    accelerator: Accelerator = values["accelerator"]
    sides = accelerators.parse_topology(accelerator.topology or "")
    is_slice = accelerator.platform == "tpu" and sides is not None
    return max(1, math.prod(sides or ()) // accelerator.per_host) if is_slice else 1


class JobSpec(Block, validate_default=True):
    """A job: what to run, on how many hosts and devices, and what follows a failure.

    ```yaml
    name: first                           # of the run folder; on a cluster of the JobSet
    image: registry.example/train:1.4     # for submit; `run` does without
    hosts: 2                              # two pods, one process each
    accelerator: {type: h100}             # eight GPUs per host
    volumes: [{claim: runs, path: /runs}] # storage for checkpoints
    restarts: {crash: 3}                  # preemption does not count
    command: [python, train.py]           # your program; or train: for the built-in trainer
    ```
    """

    version: Literal[1] = Field(1, alias="schema", description="version of the keys of this file")
    name: JobName = Field(description="name of the job and of the objects that it creates")
    image: (
        Annotated[
            str,
            Field(pattern=r"^\S+$"),
            TypeDescription("an image, such as registry.example/train:1.4"),
        ]
        | None
    ) = Field(
        None,
        description="the container image, for submit",
        json_schema_extra=Unset("from the cluster defaults"),
    )
    accelerator: Accelerator = Field(description="the devices of a host")
    hosts_or_range: PodCount | HostRange = Field(
        default_factory=_default_hosts,
        alias="hosts",
        description="pods per slice; {min, max}: the job may continue with fewer for a while",
        json_schema_extra=Unset("1, for a TPU by the topology"),
    )
    spares: Natural = Field(
        0, description="additional pods, started and idle, which replace lost hosts at once"
    )
    slices: PodCount = Field(
        1, description="groups of hosts that share a fast network; each is one child Job"
    )
    processes_per_host: Few | Literal["all"] = Field(
        1, description="JAX processes of a host; all: one per device"
    )
    platform: PlatformName | None = Field(
        None,
        description="the platform whose node labels the pods select",
        json_schema_extra=Unset("from the cluster defaults, else generic"),
    )
    namespace: Label | None = Field(
        None,
        description="where the job is created",
        json_schema_extra=Unset("from the kubeconfig's context"),
    )
    queue: Label | None = Field(
        None,
        description="Kueue's LocalQueue",
        json_schema_extra=Unset("from the cluster defaults, else none"),
    )
    priority: ObjectName | None = Field(
        None,
        description="a PriorityClass, or with a queue Kueue's WorkloadPriorityClass",
        json_schema_extra=Unset("the cluster's own"),
    )
    capacity: Capacity = Field(
        "on-demand", description="the kind of capacity that the nodes must have"
    )
    placement: Placement | None = Field(
        None,
        description="placement by Kueue's topology",
        json_schema_extra=Unset("TPU slices are placed exclusively, others anywhere", "left out:"),
    )
    network: Network = Field("default", description="the network between hosts")
    compute_domain: bool = Field(
        False,
        description="NVLink between hosts of gb200 or gb300, by a ComputeDomain (IMEX) of "
        "NVIDIA's DRA driver",
    )
    network_policy: bool = Field(
        True,
        description="create a NetworkPolicy that admits only the job's own pods and Prometheus",
    )
    gang_secret: bool | None = Field(
        None,
        description="hosts authenticate each other and encrypt their messages with a Secret "
        "that submit creates",
        json_schema_extra=Unset(
            "true if there are several hosts and you may create Secrets", "left out:"
        ),
    )
    resources: Resources = Field(
        Resources(), description="the resources that the pod of each host requests"
    )
    restarts: Restarts = Field(Restarts(), description="how often the job may restart")
    grace: Duration = Field(
        "60s",
        validate_default=True,
        description="time between SIGTERM and SIGKILL, in which the job saves",
    )
    deadline: Duration | None = Field(
        None,
        description="longest time that the job may take; then it saves and ends with exit code 77",
        json_schema_extra=Unset("no limit", "null:"),
    )
    hold_on_failure: Duration | None = Field(
        None,
        description="how long the pods, or the run here, stay for a look after the last attempt "
        "has failed; `launcher stop` ends it",
        json_schema_extra=Unset("they end at once", "null:"),
    )
    ttl: Duration | None = Field(
        "3d",
        validate_default=True,
        description="how long a finished job is kept; null: without limit",
    )
    timeouts: Timeouts = Field(Timeouts(), description="timeout of each phase")
    logs: Logs = Field(
        Logs(), description="how much of the output is kept in addition to the pods' own logs"
    )
    tracker: Tracker | Tracking | None = Field(
        None,
        description="a tracker that receives the metrics, in addition to the run folder",
        json_schema_extra=Unset("nowhere"),
    )
    notify: Notify | None = Field(
        None,
        description="a webhook that receives the events of the job",
        json_schema_extra=Unset("none"),
    )
    volumes: list[Volume] = Field(
        [], description="storage, mounted in every pod; `run` maps each to a folder"
    )
    env: dict[Variable, Text] = Field(
        {}, description="environment variables, values as written; no credentials"
    )
    secrets: dict[Variable, SecretKey] = Field({}, description="environment variables from Secrets")
    allow_literal: dict[str, Annotated[str, Field(min_length=1)]] = Field(
        {},
        description="by key, such as env.BROKER: why a value that looks like a credential may be "
        "written here",
    )
    code: Annotated[str, Field(min_length=1)] | Code | None = Field(
        None,
        description="a folder to ship, relative to this file, without the files that git ignores",
        json_schema_extra=Unset("nothing is shipped"),
    )
    workdir: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="the folder in which the program starts",
        json_schema_extra=Unset("the code's folder, else the image's"),
    )
    service_account: ObjectName | None = Field(
        None,
        description="the ServiceAccount of the pods; its token is mounted only if this is set",
        json_schema_extra=Unset("`default`, without its token"),
    )
    image_pull_secrets: list[ObjectName] = Field(
        [], description="names of Secrets for pulling the image"
    )
    labels: dict[LabelKey, LabelValue] = Field({}, description="labels on every object of the job")
    annotations: dict[LabelKey, Text] = Field(
        {}, description="annotations on every object of the job"
    )
    node_selector: dict[LabelKey, LabelValue] = Field(
        {}, description="labels a node must have, in addition to those of the accelerator"
    )
    tolerations: list[Toleration] = Field(
        [], description="taints to tolerate, in addition to those of the accelerator"
    )
    init: list[dict[str, Any]] = Field([], description="init containers, as Kubernetes writes them")
    agent: Literal["auto", "image", "inject"] = Field(
        "auto",
        description="where the agent comes from; auto: inject if the job has command: and "
        "names an image",
    )
    pod: dict[str, Any] = Field(
        {},
        description="merged into the pod template last; may not change jaxlaunch's command, "
        "labels, restartPolicy or variables",
    )
    command: (
        Annotated[
            list[Text],
            Field(min_length=1),
            TypeDescription("a list of arguments, such as [python, train.py]"),
        ]
        | None
    ) = Field(
        None,
        description="any JAX program, arguments as written",
        json_schema_extra=Unset("none: train is given"),
    )
    train: TrainSpec | None = Field(
        None, description="the built-in trainer", json_schema_extra=Unset("none: command is given")
    )
    jobs: Annotated[dict[Label, Role], Field(min_length=1, max_length=MAX_ROLES)] | None = Field(
        None,
        description="roles: named groups of hosts, each with its own program, in one job",
        json_schema_extra=Unset("one group of hosts, by the keys above"),
    )
    independent: bool = Field(
        False,
        description="whether processes may use JAX without joining; otherwise it is an error "
        "if several do",
    )

    @property
    def code_folder(self) -> str | None:
        """The folder to ship, relative to the job's file; None if no code is shipped."""
        return self.code.folder if isinstance(self.code, Code) else self.code

    @property
    def code_include(self) -> Collection[str]:
        """Files of that folder that are shipped although they look like credentials."""
        return self.code.include if isinstance(self.code, Code) else ()

    @property
    def hosts(self) -> int:
        """The largest number of training hosts of a slice."""
        return (
            self.hosts_or_range.max
            if isinstance(self.hosts_or_range, HostRange)
            else self.hosts_or_range
        )

    @property
    def min_hosts(self) -> int:
        """The smallest number of training hosts of a slice."""
        return (
            self.hosts_or_range.min
            if isinstance(self.hosts_or_range, HostRange)
            else self.hosts_or_range
        )

    @property
    def is_elastic(self) -> bool:
        """Return whether the job may continue with fewer hosts."""
        return self.min_hosts < self.hosts

    @property
    def pods(self) -> int:
        """Pods of a slice, including spares."""
        return self.hosts + self.spares

    @property
    def pod_count(self) -> int:
        """Pods of all slices, including spares."""
        return self.slices * self.pods

    @property
    def host_count(self) -> int:
        """Training hosts of all slices."""
        return self.slices * self.hosts

    @property
    def trainable_host_counts(self) -> tuple[int, ...]:
        """The numbers of hosts that may train, empty if it is always all of them.

        Numbers that mesh or batch do not divide over are left out; the additional host is then a
        spare.
        """
        if not self.is_elastic:
            return (self.hosts,) if self.spares else ()
        counts = []
        for hosts in range(self.min_hosts, self.hosts):
            with contextlib.suppress(ValueError):
                self.train_on_hosts(hosts)
                counts.append(hosts)
        return (*counts, self.hosts)

    def train_on_hosts(self, hosts: int) -> TrainSpec | None:
        """Return the training block for fewer hosts. Raises ValueError if it cannot be divided."""
        if self.train is None:
            return None
        devices = hosts * self.accelerator.devices_per_host
        if self.train.task in TASK_DEFAULTS or "batch" in self.train.model_fields_set:
            return shrink_to_devices(self.train, devices, self.devices)
        # A user's task may define the batch.
        shrink_mesh(self.train.mesh, devices, self.devices)
        return None

    @property
    def devices(self) -> int:
        """JAX devices of all hosts."""
        return self.host_count * self.accelerator.devices_per_host

    @property
    def process_count_per_host(self) -> int:
        """JAX processes of a host."""
        devices, processes = self.accelerator.devices_per_host, self.processes_per_host
        return devices if processes == "all" else processes

    @property
    def processes(self) -> int:
        """JAX processes of all hosts."""
        return self.host_count * self.process_count_per_host

    @property
    def devices_per_process(self) -> int:
        """JAX devices that each process drives."""
        return self.accelerator.devices_per_host // self.process_count_per_host

    @property
    def replaces_hosts(self) -> bool:
        """Return whether a lost host is replaced alone. A TPU slice is replaced as a whole."""
        may_restart = self.restarts.crash > 0 and self.restarts.in_place > 0
        return may_restart and self.host_count > 1 and self.accelerator.platform != "tpu"

    @property
    def tracker_name(self) -> str | None:
        """The name of the tracker, or None."""
        return self.tracker.name if isinstance(self.tracker, Tracking) else self.tracker

    def tracking_variables(self, folder_name: str, sweep: str | None) -> dict[str, str]:
        """Return the variables that configure the tracker and the webhook.

        Args:
            folder_name: Name of the folder of the job's file, the default project.
            sweep: Name of the sweep that the run belongs to, or None.
        """
        variables = {}
        if self.tracker_name:
            variables[contract.TRACKER] = json.dumps(_tracker_settings(self, folder_name, sweep))
        if (notify := self.notify) is not None:
            webhook = {"url": notify.url, "format": notify.format, "events": notify.events}
            variables[contract.NOTIFY] = json.dumps({**webhook, "stall_s": notify.stall})
        return variables

    def agent_job(
        self,
        *,
        command: Sequence[str] | None,
        platform: Platform,
        workdir: str | None,
        metrics_port: int = 0,
        search_paths: Mapping[str, str] | None = None,
        scratch: Mapping[str, int | None] | None = None,
        pinning: str | None = None,
    ) -> AgentJob:
        """Return the part of the job that every agent reads.

        `scratch` maps each folder on the node's disk to its limit in bytes, or None without limit.
        """
        ephemeral, preempted = self.resources.ephemeral, self.restarts.preempted
        has_limit = scratch is not None and ephemeral is not None
        return AgentJob(
            name=self.name,
            command=None if command is None else tuple(command),
            processes_per_host=self.process_count_per_host,
            platform=platform,
            devices_per_process=self.devices_per_process,
            timeouts_s=self.timeouts.to_seconds(),
            crash_limit=self.restarts.crash,
            in_place_limit=self.restarts.in_place,
            replaces=self.replaces_hosts,
            sizes=self.trainable_host_counts,
            preempted_limit=None if preempted == "unlimited" else preempted,
            requeue_codes={
                int(code): Requeue(value) for code, value in self.restarts.codes.items()
            },
            grace_s=self.grace,
            deadline_s=self.deadline,
            hold_s=self.hold_on_failure,
            metrics_port=metrics_port,
            workdir=workdir,
            search_paths=search_paths or {},
            accelerator=self.accelerator.type,
            pinning=pinning,
            ephemeral_bytes=int(parse_quantity(ephemeral or "0")) if has_limit else None,
            scratch=scratch or {},
            log_bytes=int(parse_quantity(self.logs.kept)),
            # libtpu joins the processes of a TPU job. CPUs that simulate it never join.
            independent=self.independent
            or (self.accelerator.platform == "tpu" and platform != "tpu"),
        )


def _tracker_settings(job: JobSpec, folder_name: str, sweep: str | None) -> dict[str, Any]:
    """Return the settings of the tracker, with the job as the configuration of its run."""
    # The values in `env` may be private.
    config = job.model_dump(
        mode="json", by_alias=True, exclude_unset=True, exclude={"env", "train"}
    )
    if job.train is not None:
        # With defaults, which may differ between versions of jaxlaunch.
        config["train"] = job.train.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {
        "tracker": job.tracker_name,
        "name": job.name,
        "project": job.tracker.project if isinstance(job.tracker, Tracking) else None,
        "default_project": folder_name,
        "group": sweep,
        "labels": {key: value for key, value in job.labels.items() if key != SWEEP_LABEL},
        "config": config,
    }
