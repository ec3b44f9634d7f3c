"""The cluster defaults, which the owner of a cluster sets once for all jobs.

They supply values that a job leaves out and never override those that it sets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag, ValidationError

from jaxlaunch.launcher.errors import Fault, JobFaultsError, UserError
from jaxlaunch.launcher.job import messages
from jaxlaunch.launcher.job.introspection import TypeDescription, discriminate_by_key
from jaxlaunch.launcher.job.schema import AcceleratorType, Network, Toleration
from jaxlaunch.launcher.job.types import (
    AbsolutePath,
    Label,
    LabelKey,
    LabelValue,
    ObjectName,
    Text,
    Variable,
)
from jaxlaunch.launcher.kubernetes.kinds import GANG_KINDS
from jaxlaunch.launcher.platforms.facts import Provisioner
from jaxlaunch.launcher.platforms.table import PlatformName
from jaxlaunch.launcher.yaml import reader
from jaxlaunch.launcher.yaml.reader import Document
from jaxlaunch.trainer.spec import Block, Positive, check_bucket_url

DEFAULT_USER = 1000

# The user of the pods: a number; root, which has only the capabilities that the network needs; or
# privileged, which is root in a privileged container.
User = Positive | Literal["root", "privileged"]


class Nodes(Block):
    """Nodes as this cluster labels and taints them."""

    node_selector: dict[LabelKey, LabelValue] = Field({}, description="labels of these nodes")
    tolerations: list[Toleration] = Field(
        [], description="taints of these nodes; left out: those of the platform"
    )


class CheckpointClaim(Block):
    """A PersistentVolumeClaim, ReadWriteMany, for the checkpoints of every job."""

    claim: ObjectName = Field(description="its name")
    path: AbsolutePath = Field(
        "/checkpoints", description="where it is mounted; each job has a folder with its name there"
    )


class CheckpointUrl(Block):
    """A bucket that the trainer itself writes to."""

    url: Annotated[
        str,
        Field(pattern=r"^(gs|s3)://[^\s/]+(/\S*)?$"),
        AfterValidator(check_bucket_url),
        TypeDescription("a folder such as gs://bucket/runs"),
    ] = Field(description="a URL below which each job has a folder with its name")


Checkpoint = Annotated[
    Annotated[CheckpointClaim, Tag("claim")] | Annotated[CheckpointUrl, Tag("url")],
    discriminate_by_key("claim", "url"),
]


class CacheClaim(Block):
    """A PersistentVolumeClaim, ReadWriteMany, for the compiled programs of every job."""

    claim: ObjectName = Field(description="its name")
    path: AbsolutePath = Field("/compile-cache", description="where it is mounted")


class Tcpxo(Block):
    """Settings of this cluster for GPUDirect-TCPXO."""

    image: Annotated[str, Field(pattern=r"^\S+$")] = Field(
        description="image of the receive daemon"
    )
    networks: Annotated[list[ObjectName], Field(min_length=8, max_length=8)] = Field(
        [f"vpc{number}" for number in range(1, 9)],
        description="the Network objects of eth1 to eth8",
    )
    env: dict[Variable, Text] | None = Field(
        None,
        description="all of NCCL's variables for another release of the plugin; null: those of "
        "January 2026",
    )


class Gib(Block):
    """Settings of this cluster for GPUDirect RDMA on GKE (NCCL's plugin gIB)."""

    networks: Annotated[list[ObjectName], Field(min_length=8, max_length=8)] = Field(
        [f"rdma-{number}" for number in range(8)], description="the Network objects of eth2 to eth9"
    )


class Prometheus(Block):
    """The pods that may scrape."""

    namespace: Label | None = Field(None, description="namespace of the Prometheus pods; null: any")
    labels: dict[LabelKey, LabelValue] = Field(
        {"app.kubernetes.io/name": "prometheus"}, description="their labels"
    )


if TYPE_CHECKING:
    GangVersion = str
else:
    GangVersion = Literal[tuple(GANG_KINDS)]


class Defaults(Block):
    """The keys of the cluster defaults."""

    version: Literal[1] = Field(1, alias="schema", description="version of the keys of this file")
    platform: PlatformName = Field("generic", description="the platform that the nodes belong to")
    provisioner: Provisioner = Field(
        "karpenter",
        description="eks: who adds nodes: Karpenter, managed node groups or Auto Mode, each with "
        "its own labels",
    )
    image: Annotated[str, Field(pattern=r"^\S+$")] | None = Field(
        None, description="the image of jobs without one"
    )
    image_pull_secrets: list[ObjectName] = Field(
        [], description="names of Secrets for pulling images, for every job"
    )
    queue: Label | None = Field(None, description="the queue of jobs without one")
    gang_scheduling: GangVersion | None = Field(
        None,
        description="the version of scheduling.k8s.io by which Kubernetes' scheduler places all "
        "pods of a job or none, without Kueue: v1alpha1 (Kubernetes 1.35), v1alpha2 (1.36) or "
        "v1beta1 (1.37); null: pods are placed one by one",
    )
    checkpoint: Checkpoint | None = Field(None, description="where checkpoints are saved")
    compile_cache: CacheClaim | None = Field(
        None, description="XLA's compilation cache, for jobs without one"
    )
    service_account: ObjectName | None = Field(
        None, description="the ServiceAccount of jobs without one; no token is mounted"
    )
    user: Positive = Field(
        DEFAULT_USER, description="numeric user and group of the pods; never root, except on TPUs"
    )
    users: dict[AcceleratorType, User] = Field(
        {},
        description="by accelerator type, instead of user: a number, root, or privileged (root, "
        "every device)",
    )
    nodes: dict[AcceleratorType, Nodes] = Field(
        {}, description="by accelerator type: nodes with other labels than usual"
    )
    capacity: dict[Literal["spot", "flex-start"], Nodes] = Field(
        {}, description="by kind of capacity, likewise"
    )
    reservation_label: LabelKey | None = Field(
        None,
        description="eks, managed node groups: the label that names their reservation; null: "
        "capacity-reservation-id",
    )
    network: dict[AcceleratorType, Network] = Field(
        {}, description="by accelerator type: the network of jobs without one"
    )
    slice_label: LabelKey | None = Field(
        None, description="the label that nodes of one TPU slice share"
    )
    tcpxo: Tcpxo | None = Field(None, description="for network: gpudirect-tcpxo")
    gib: Gib | None = Field(
        None, description="for network: gpudirect-rdma; null: networks with the usual names"
    )
    prometheus: Prometheus = Field(Prometheus(), description="who may scrape")
    labels: dict[LabelKey, LabelValue] = Field({}, description="labels on all objects")
    annotations: dict[LabelKey, Text] = Field({}, description="annotations on all objects")
    node_selector: dict[LabelKey, LabelValue] = Field(
        {}, description="node labels that every job requires"
    )
    tolerations: list[Toleration] = Field([], description="taints that every job tolerates")


@dataclasses.dataclass(frozen=True)
class ClusterDefaults:
    """The cluster defaults and the document that they were read from."""

    values: Defaults = Defaults()
    source: Document = dataclasses.field(default_factory=lambda: Document("cluster defaults"))


def load_defaults(path: Path | None) -> ClusterDefaults:
    """Read the cluster defaults from a file, which may also be a ConfigMap with one entry.

    Without a path, the built-in defaults are returned. Raises JobFaultsError with all faults, and
    UserError if the file cannot be read.
    """
    if path is None:
        return ClusterDefaults()
    if not path.exists():
        hint = "--defaults names the file with the cluster defaults."
        raise UserError(f"{path}: no such file.", hint)
    return _validate_defaults(reader.read_document(path))


def parse_defaults(text: str, name: str = "defaults.yaml") -> ClusterDefaults:
    """Parse a text as cluster defaults. Faults show `name` as its file. Raises JobFaultsError."""
    return _validate_defaults(reader.parse_document(text, name))


def read_config_map(config_map: Mapping[str, Any], name: str) -> ClusterDefaults:
    """Read the cluster defaults from a ConfigMap. Raises JobFaultsError and UserError."""
    return _validate_defaults(_config_map_entry(config_map, name))


def _config_map_entry(config_map: Mapping[str, Any], name: str) -> Document:
    entries = config_map.get("data")
    if isinstance(entries, dict) and len(entries) == 1:
        ((key, text),) = entries.items()
        if isinstance(text, str):
            return reader.parse_document(text, f"{name}, {key}")
    message = f"{name}: a ConfigMap of cluster defaults has one entry, a text."
    raise UserError(message, "data: {defaults.yaml: |- …}")


def _validate_defaults(source: Document) -> ClusterDefaults:
    if isinstance(source.data, dict) and source.data.get("kind") == "ConfigMap":
        source = _config_map_entry(source.data, source.name)
    faults = list(source.faults)
    data: Any = {} if source.data is None else source.data
    if not isinstance(data, dict):
        faults.append(Fault((), "is not a block of keys.", "platform: gke"))
    if not faults:
        try:
            return ClusterDefaults(Defaults.model_validate(data), source)
        except ValidationError as error:
            faults.extend(messages.translate_errors(error, source, Defaults))
    raise JobFaultsError([source.locate(fault) for fault in faults])
