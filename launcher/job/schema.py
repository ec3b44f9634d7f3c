"""The keys of job.yaml: their types, defaults and meaning. What they mean together is launcher.checks.

Keys that only a cluster needs are here too: they are checked wherever the file is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from launcher import accelerators
from launcher.accelerators import KNOWN, Platform
from launcher.duration import Duration
from launcher.keys import Words
from launcher.quantity import Quantity
from trainer.spec import Block, Natural, Positive, TrainSpec

_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


def _as_name(written: str) -> str | None:
    name = re.sub(r"[^a-z0-9]+", "-", written.lower()).strip("-").lstrip("-0123456789")
    return f"write {name}." if name else None


def _as_absolute(written: str) -> str | None:
    return f"write /{written.removeprefix('./')}." if re.fullmatch(r"[\w./-]*[\w-]", written) else None


JobName = Annotated[
    str,
    Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$"),
    Words("a name: lower-case letters, digits and inner dashes, a letter first", _as_name),
]
Label = Annotated[
    str,
    Field(pattern=_LABEL, max_length=63),
    Words("a name of at most 63 lower-case letters, digits and inner dashes", _as_name),
]
ObjectName = Annotated[
    str,
    Field(pattern=_SUBDOMAIN, max_length=253),
    Words("a Kubernetes name: lower-case letters, digits, and inner dashes and dots", _as_name),
]
AbsolutePath = Annotated[str, Field(pattern=r"^/[^:\s][^:]*$"), Words("an absolute path below /", _as_absolute)]
Variable = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$"), Words("a variable's name: letters, digits and _")
]
# A scalar taken as it is written: `--lr 3e-4` in a command must not become 0.0003.
Text = Annotated[str, WithJsonSchema({"type": ["string", "number", "boolean"]})]
LabelKey = Annotated[
    str,
    Field(
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
        max_length=253 + 1 + 63,
    ),
    Words("a label's key, such as team or example.com/team"),
]
LabelValue = Annotated[
    Text,
    Field(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63),
    Words("a label's value: at most 63 letters, digits and inner dashes, dots and _"),
]
Kind = Literal["cpu", "l4", "a100", "h100", "h200", "b200", "gb200", "v4", "v5e", "v5p", "v6e", "7x"]
AS_WRITTEN = ("command", "env", "labels", "annotations", "node_selector")


def _whole_machine(given: dict[str, Any]) -> int:
    """The accelerators of a host, where the job does not say."""
    kind, topology = given["type"], given["topology"]
    if KNOWN[kind].platform == "tpu" and topology is not None:
        return accelerators.chips_per_host(kind, topology)[0]
    return KNOWN[kind].per_host


class Accelerator(Block):
    """The devices of a host, and for a TPU the shape of a slice."""

    type: Kind = Field(description="cpu, a GPU or a TPU generation")
    topology: str | None = Field(None, description="of a TPU slice, such as 2x4 or 4x4x8; TPUs only, and needed there")
    per_host: Positive = Field(
        default_factory=_whole_machine,
        description="accelerators of a host, for cpu virtual devices; default cpu and l4 1, gb200 4, other GPUs 8, "
        "TPUs as the topology says",
    )

    @property
    def platform(self) -> Platform:
        return KNOWN[self.type].platform

    @property
    def devices_per_host(self) -> int:
        """JAX devices; a 7x chip is two."""
        return self.per_host * KNOWN[self.type].devices_per_chip


class Reservation(Block):
    """Capacity bought beforehand."""

    reservation: Annotated[ObjectName, Field(max_length=63)] = Field(description="its name")


class Placement(Block):
    """Where the pods of a slice should lie."""

    preferred: LabelKey = Field(description="a level of Kueue's Topology, such as rack")


class Rdma(Block):
    """A fast network whose device has a name of the cluster's own."""

    profile: Literal["rdma"] = Field(description="the only one so far")
    resource: Annotated[
        str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"), Words("a resource's name, such as rdma/ib")
    ] = Field(description="the extended resource, such as rdma/ib")
    count: Positive = Field(1, description="of them per host")


Network = Literal["default", "hostnetwork", "efa", "gpudirect-tcpxo"] | Rdma


class Resources(Block):
    """What a host's pod asks for, beside its accelerators. The memory limit is the request."""

    cpu: Quantity | None = Field(None, description="cores")
    memory: Quantity | None = Field(None, description="request and limit")
    ephemeral: Quantity | None = Field(None, description="ephemeral storage")
    shm: Quantity | None = Field(None, description="size of /dev/shm; counts against memory")


class Restarts(Block):
    """Budgets by cause. Preemption and drained nodes are never charged."""

    crash: Natural = Field(5, description="new sets of pods after a crash, a hang or a lost host")
    in_place: Natural = Field(3, description="starts in the same pods in a row without a newly saved step")


class Budgets(Block):
    """How long a phase may take before it counts as a hang. null: endless."""

    rendezvous: Duration | None = Field("30m", validate_default=True, description="until every host has said hello")
    init: Duration | None = Field("5m", validate_default=True, description="jax.distributed and the devices")
    restore: Duration | None = Field("10m", validate_default=True, description="reading the checkpoint")
    compile: Duration | None = Field("30m", validate_default=True, description="one compilation")
    step: Duration | Literal["auto"] = Field(
        "auto", description="one step; auto: the larger of 60s and 10 × the median"
    )
    data: Duration | None = Field("10m", validate_default=True, description="waiting for one batch")
    eval: Duration | None = Field("30m", validate_default=True, description="one evaluation")
    save: Duration | None = Field("20m", validate_default=True, description="one save, until it is committed")
    pending: Duration | None = Field(None, description="waiting for a queue and for nodes")

    def seconds(self) -> dict[str, float | None]:
        """The budgets an agent keeps, by phase; None: learned (step), or endless."""
        kept = {name: getattr(self, name) for name in type(self).model_fields if name != "pending"}
        return {name: None if value == "auto" else value for name, value in kept.items()}


class Claim(Block):
    """A PersistentVolumeClaim."""

    claim: ObjectName = Field(description="the claim's name")
    path: AbsolutePath = Field(description="where it is mounted")
    read_only: bool = Field(False, description="mounted for reading only")

    @property
    def name(self) -> str:
        return self.claim


class Bucket(Block):
    """A bucket, mounted as a folder."""

    bucket: Annotated[
        str,
        Field(pattern=r"^(gs|s3)://[a-z0-9][a-z0-9._-]*(/[^\s]*)?$"),
        Words("a bucket such as gs://name or s3://name"),
    ] = Field(description="gs:// or s3://, with or without a folder")
    path: AbsolutePath = Field(description="where it is mounted")
    read_only: bool = Field(False, description="mounted for reading only")

    @property
    def name(self) -> str:
        return self.bucket.partition("://")[2].partition("/")[0]


class Ephemeral(Block):
    """Scratch space that lives as long as the pod."""

    ephemeral: Quantity = Field(description="its size")
    path: AbsolutePath = Field(description="where it is mounted")

    @property
    def name(self) -> str:
        return self.path.strip("/").replace("/", "-")


class SecretFiles(Block):
    """The keys of a Secret as files."""

    secret: ObjectName = Field(description="the Secret's name")
    path: AbsolutePath = Field(description="where it is mounted")

    @property
    def name(self) -> str:
        return self.secret


class ConfigFiles(Block):
    """The keys of a ConfigMap as files."""

    configmap: ObjectName = Field(description="the ConfigMap's name")
    path: AbsolutePath = Field(description="where it is mounted")

    @property
    def name(self) -> str:
        return self.configmap


VOLUMES = ("claim", "bucket", "ephemeral", "secret", "configmap")


def _volume(value: Any) -> str | None:
    keys = value if isinstance(value, Mapping) else vars(value) if isinstance(value, Block) else ()
    return next((kind for kind in VOLUMES if kind in keys), None)


Volume = Annotated[
    Annotated[Claim, Tag("claim")]
    | Annotated[Bucket, Tag("bucket")]
    | Annotated[Ephemeral, Tag("ephemeral")]
    | Annotated[SecretFiles, Tag("secret")]
    | Annotated[ConfigFiles, Tag("configmap")],
    Discriminator(_volume),
]


class SecretKey(Block):
    """One key of a Secret, as an environment variable."""

    name: ObjectName = Field(description="the Secret's name")
    key: Annotated[
        str, Field(pattern=r"^[-._a-zA-Z0-9]+$"), Words("a key of a Secret: letters, digits, dots, dashes and _")
    ] = Field(description="the key in it")


class Toleration(Block):
    """A taint that the pods put up with, in Kubernetes' words."""

    key: LabelKey | None = Field(None, description="the taint; left out with Exists: every taint")
    operator: Literal["Exists", "Equal"] = Field("Equal", description="whether value is compared")
    value: LabelValue | None = Field(None, description="for Equal")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="null: every effect"
    )
    seconds: Natural | None = Field(None, alias="tolerationSeconds", description="with NoExecute; null: for ever")


def _hosts_of_a_slice(given: dict[str, Any]) -> int:
    """The hosts of a slice, where the job does not say: a TPU's topology does."""
    accelerator: Accelerator = given["accelerator"]
    sides = accelerators.sides_of(accelerator.topology or "")
    is_slice = accelerator.platform == "tpu" and sides is not None
    return max(1, math.prod(sides or ()) // accelerator.per_host) if is_slice else 1


class JobSpec(Block):
    """A job: what to run, on how many hosts with which devices, and what becomes of it when something fails."""

    version: Literal[1] = Field(1, alias="schema", description="of this file's keys")
    name: JobName = Field(description="of the job and everything it makes")
    image: Annotated[str, Field(pattern=r"^\S+$"), Words("an image, such as registry.example/train:1.4")] | None = (
        Field(None, description="the container image, for submit; default from the profile")
    )
    accelerator: Accelerator = Field(description="the devices of a host")
    hosts: Positive = Field(
        default_factory=_hosts_of_a_slice, description="pods per slice; default 1, for a TPU as the topology says"
    )
    slices: Positive = Field(1, description="groups of hosts that share a fast network; each is one child Job")
    processes_per_host: Positive | Literal["all"] = Field(1, description="JAX processes of a host; all: one per device")
    platform: Literal["gke", "eks", "generic"] | None = Field(
        None, description="default from the profile, else generic"
    )
    namespace: Label | None = Field(None, description="default from the kubeconfig's context")
    queue: Label | None = Field(None, description="Kueue's LocalQueue; left out: no queue")
    priority: ObjectName | None = Field(
        None, description="with a queue Kueue's WorkloadPriorityClass, without one a PriorityClass"
    )
    capacity: Literal["on-demand", "spot", "flex-start"] | Reservation = Field("on-demand", description="kind of nodes")
    placement: Placement | None = Field(
        None, description="Kueue's topology; left out: TPU slices are placed exclusively, others anywhere"
    )
    network: Network = Field("default", description="between hosts")
    network_policy: bool = Field(True, description="only the job's own pods and Prometheus reach it")
    resources: Resources = Field(Resources(), description="of a host")
    restarts: Restarts = Field(Restarts(), description="how often to try again")
    grace: Duration = Field("60s", validate_default=True, description="between SIGTERM and SIGKILL: time to save")
    deadline: Duration | None = Field(None, description="longest time of the whole job; null: none")
    ttl: Duration | None = Field(
        "3d", validate_default=True, description="how long a finished job stays to be looked at; null: for ever"
    )
    budgets: Budgets = Field(Budgets(), description="longest time of each phase")
    volumes: list[Volume] = Field([], description="storage, mounted in every pod; `run` maps each to a folder")
    env: dict[Variable, Text] = Field({}, description="environment variables, values as written; no credentials")
    secrets: dict[Variable, SecretKey] = Field({}, description="environment variables out of Secrets")
    code: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="a folder to ship, relative to this file; what git ignores stays here"
    )
    workdir: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="where the program starts; default the code's folder, else the image's"
    )
    service_account: ObjectName | None = Field(None, description="of the pods; its token is mounted only then")
    image_pull_secrets: list[ObjectName] = Field([], description="names of Secrets")
    labels: dict[LabelKey, LabelValue] = Field({}, description="on everything the job makes")
    annotations: dict[LabelKey, Text] = Field({}, description="on everything the job makes")
    node_selector: dict[LabelKey, LabelValue] = Field(
        {}, description="labels a node must have, beside the accelerator's"
    )
    tolerations: list[Toleration] = Field([], description="beside the accelerator's")
    init: list[dict[str, Any]] = Field([], description="init containers, in Kubernetes' words")
    agent: Literal["auto", "image", "inject"] = Field(
        "auto", description="where the agent comes from; auto: with the job, where it names an image for its command"
    )
    pod: dict[str, Any] = Field(
        {},
        description="merged into the pod template last; may not touch our command, labels, restartPolicy or variables",
    )
    command: (
        Annotated[list[Text], Field(min_length=1), Words("a list of arguments, such as [python, train.py]")] | None
    ) = Field(None, description="any JAX program, arguments as written; or train")
    train: TrainSpec | None = Field(None, description="the built-in trainer; or command")

    @property
    def host_count(self) -> int:
        return self.slices * self.hosts

    @property
    def devices(self) -> int:
        return self.host_count * self.accelerator.devices_per_host

    @property
    def process_count_per_host(self) -> int:
        return self.accelerator.devices_per_host if self.processes_per_host == "all" else self.processes_per_host

    @property
    def processes(self) -> int:
        return self.host_count * self.process_count_per_host

    @property
    def devices_per_process(self) -> int:
        return self.accelerator.devices_per_host // self.process_count_per_host


assert set(get_args(Kind)) == set(KNOWN)
