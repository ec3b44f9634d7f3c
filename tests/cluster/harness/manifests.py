"""What JobSet and Kueue install, for controllers outside the cluster.

It is rendered from the manifests in their own modules. Left out are the Deployments (their programs
run on the host), the ConfigMaps (their settings are files there), and Kueue's APIServices (an API
without a backend breaks the deletion of namespaces).
"""

import base64
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.harness.build import module_source
from tests.cluster.harness.places import IP

MODULES = {"jobset": "sigs.k8s.io/jobset", "kueue": "sigs.k8s.io/kueue"}
LEFT_OUT = {"Deployment", "ConfigMap", "APIService"}
# Kueue also puts webhooks on pods, deployments and more, for integrations that are off here: they
# would only cost time.
HOOKED = {
    "jobs",
    "jobsets",
    "workloads",
    "clusterqueues",
    "localqueues",
    "resourceflavors",
    "cohorts",
    "topologies",
    "admissionchecks",
    "workloadpriorityclasses",
}
ORDER = {"Namespace": 0, "CustomResourceDefinition": 1}


def render_module(
    home: Path, module: str, port: int, authority: Path | None
) -> list[dict[str, Any]]:
    """Return the objects of `module`, with its webhooks at `port` of the host.

    `authority` signs the webhooks unless the controller does so itself.
    """
    folder = module_source(module, MODULES[module]) / "config" / "default"
    done = subprocess.run([home / "kubectl", "kustomize", folder], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"kubectl kustomize {folder}: {done.stderr.strip()}")
    bundle = base64.b64encode(authority.read_bytes()).decode() if authority else None
    objects = [
        made
        for object_ in yaml.load_all(done.stdout, yaml.CSafeLoader)
        for made in adapt_object(object_, port)
    ]
    for object_ in objects:
        adapt_webhooks(object_, bundle)
    return sorted(objects, key=lambda object_: ORDER.get(object_["kind"], 2))


def adapt_object(object_: dict[str, Any], port: int) -> list[dict[str, Any]]:
    """Yield what an object becomes when its controller runs on the host."""
    kind, name = object_["kind"], object_["metadata"]["name"]
    if kind in LEFT_OUT or (kind == "Service" and "webhook" not in name):
        return []
    if kind != "Service":
        return [object_]
    object_["spec"].pop("selector", None)
    return [object_, make_endpoints(name, object_["metadata"]["namespace"], port)]


def make_endpoints(service: str, namespace: str, port: int) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{service}-host",
            "namespace": namespace,
            "labels": {
                "kubernetes.io/service-name": service,
                "endpointslice.kubernetes.io/managed-by": "test-harness",
            },
        },
        "addressType": "IPv4",
        "ports": [{"name": "", "port": port, "protocol": "TCP"}],
        "endpoints": [{"addresses": [IP], "conditions": {"ready": True}}],
    }


def adapt_webhooks(object_: dict[str, Any], bundle: str | None) -> None:
    """Drop the webhooks of disabled integrations, and put the authority into the others."""
    if object_["kind"].endswith("WebhookConfiguration"):
        object_["webhooks"] = [
            hook for hook in object_["webhooks"] if webhook_resources(hook) & HOOKED
        ]
        clients = [hook["clientConfig"] for hook in object_["webhooks"]]
    elif object_["kind"] == "CustomResourceDefinition" and "webhook" in object_["spec"].get(
        "conversion", {}
    ):
        clients = [object_["spec"]["conversion"]["webhook"]["clientConfig"]]
    else:
        clients = []
    for client in clients if bundle else []:
        client["caBundle"] = bundle


def webhook_resources(hook: dict[str, Any]) -> set[str]:
    return {resource.partition("/")[0] for rule in hook["rules"] for resource in rule["resources"]}


# A name that people know CoreDNS's rights by.
DNS_ROLE = "system:coredns"
DNS: list[dict[str, Any]] = [
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": DNS_ROLE},
        "rules": [
            {
                "apiGroups": [""],
                "resources": ["services", "pods", "namespaces"],
                "verbs": ["list", "watch"],
            },
            {
                "apiGroups": ["discovery.k8s.io"],
                "resources": ["endpointslices"],
                "verbs": ["list", "watch"],
            },
        ],
    },
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": DNS_ROLE},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": DNS_ROLE,
        },
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "coredns"}],
    },
]
