"""Kinds of Kubernetes objects that jaxlaunch uses: their API paths and permissions. Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A kind of object in one version of its API group."""

    # API group; empty for the core group.
    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The `apiVersion`: `v1`, `batch/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """The resource name for `kubectl get`: `pods`, `jobsets.jobset.x-k8s.io`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def qualified_name(self, name: str) -> str:
        """Return an object's name as kubectl writes it: `pod/x`, `jobset.jobset.x-k8s.io/x`."""
        return f"{self.kind.lower()}{'.' if self.group else ''}{self.group}/{name}"

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Return the API path of an object, or of all objects of the kind or of a namespace."""
        parts = ["apis" if self.group else "api", self.api_version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        return "/" + "/".join([*parts, self.plural, *filter(None, (name, subresource))])


class Right(NamedTuple):
    """A permission (RBAC): a verb on a kind of object, or on a subresource of it."""

    verb: str
    kind: Kind
    subresource: str = ""

    def __str__(self) -> str:
        subresource = f"/{self.subresource}" if self.subresource else ""
        return f"{self.verb} {self.kind.resource}{subresource}"


_JOBSET, _KUEUE, _ADMISSION = "jobset.x-k8s.io", "kueue.x-k8s.io", "admissionregistration.k8s.io"
_cluster_kind = functools.partial(Kind, namespaced=False)

# The only version that JobSet serves.
JOBSETS = Kind(_JOBSET, "v1alpha2", "jobsets", "JobSet")
JOBS = Kind("batch", "v1", "jobs", "Job")
PODS = Kind("", "v1", "pods", "Pod")
EVENTS = Kind("", "v1", "events", "Event")
SERVICES = Kind("", "v1", "services", "Service")
ENDPOINT_SLICES = Kind("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
SERVICE_ACCOUNTS = Kind("", "v1", "serviceaccounts", "ServiceAccount")
CONFIGMAPS = Kind("", "v1", "configmaps", "ConfigMap")
SECRETS = Kind("", "v1", "secrets", "Secret")
CLAIMS = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
RESOURCE_QUOTAS = Kind("", "v1", "resourcequotas", "ResourceQuota")
LIMIT_RANGES = Kind("", "v1", "limitranges", "LimitRange")
NETWORK_POLICIES = Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
RESOURCE_CLAIM_TEMPLATES = Kind(
    "resource.k8s.io", "v1", "resourceclaimtemplates", "ResourceClaimTemplate"
)
# NVIDIA's DRA driver serves this kind.
COMPUTE_DOMAINS = Kind("resource.nvidia.com", "v1beta1", "computedomains", "ComputeDomain")
# Kubernetes' own gang scheduling: Kubernetes 1.35, 1.36, and 1.37 or newer.
GANG_WORKLOADS = Kind("scheduling.k8s.io", "v1alpha1", "workloads", "Workload")
POD_GROUPS_1_36 = Kind("scheduling.k8s.io", "v1alpha2", "podgroups", "PodGroup")
POD_GROUPS = Kind("scheduling.k8s.io", "v1beta1", "podgroups", "PodGroup")
GANG_KINDS = {kind.version: kind for kind in (GANG_WORKLOADS, POD_GROUPS_1_36, POD_GROUPS)}
# Groups of pods of other schedulers: Volcano, and the plugin Coscheduling of scheduler-plugins.
VOLCANO_GROUPS = Kind("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup")
COSCHEDULING_GROUPS = Kind("scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup")
DEPLOYMENTS = Kind("apps", "v1", "deployments", "Deployment")

NAMESPACES = _cluster_kind("", "v1", "namespaces", "Namespace")
NODES = _cluster_kind("", "v1", "nodes", "Node")
PRIORITY_CLASSES = _cluster_kind("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass")
RUNTIME_CLASSES = _cluster_kind("node.k8s.io", "v1", "runtimeclasses", "RuntimeClass")
CRDS = _cluster_kind(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition"
)
MUTATING_WEBHOOKS = _cluster_kind(
    _ADMISSION, "v1", "mutatingwebhookconfigurations", "MutatingWebhookConfiguration"
)
VALIDATING_WEBHOOKS = _cluster_kind(
    _ADMISSION, "v1", "validatingwebhookconfigurations", "ValidatingWebhookConfiguration"
)

# v1beta2 came with Kueue 0.15; v1beta1 is no longer served from 0.20 on.
WORKLOADS = Kind(_KUEUE, "v1beta2", "workloads", "Workload")
LOCAL_QUEUES = Kind(_KUEUE, "v1beta2", "localqueues", "LocalQueue")
CLUSTER_QUEUES = _cluster_kind(_KUEUE, "v1beta2", "clusterqueues", "ClusterQueue")
WORKLOAD_PRIORITY_CLASSES = _cluster_kind(
    _KUEUE, "v1beta2", "workloadpriorityclasses", "WorkloadPriorityClass"
)

ACCESS_REVIEWS = _cluster_kind(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview"
)

# Kinds that not every cluster serves, and the feature or project that serves each. A job needs them
# if it claims devices or is scheduled as a gang.
OPTIONAL_PROJECTS = {
    RESOURCE_CLAIM_TEMPLATES: "dynamic resource allocation (Kubernetes 1.34)",
    COMPUTE_DOMAINS: "NVIDIA's DRA driver",
    **dict.fromkeys(GANG_KINDS.values(), "gang scheduling (feature gate GenericWorkload)"),
}
_MANIFEST_KINDS = {
    (kind.api_version, kind.kind): kind
    for kind in (JOBSETS, NETWORK_POLICIES, CONFIGMAPS, SECRETS, *OPTIONAL_PROJECTS)
}


def manifest_kind(manifest: Mapping[str, Any]) -> Kind:
    """Return the kind of a manifest that belongs to a job."""
    return _MANIFEST_KINDS[manifest["apiVersion"], manifest["kind"]]
