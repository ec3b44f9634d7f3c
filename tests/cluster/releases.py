"""Releases of the chart on the tests' cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.cluster.access import Access
from tests.cluster.harness.api import Api, Call
from tests.cluster.preparations import KUEUE
from tests.helm.charts import CHART, Helm

# Small enough for the tests' node, and claims that take what a test has prepared for them.
STORAGE = {
    "checkpoints": {"size": "1Gi", "storageClass": ""},
    "compileCache": {"enabled": True, "size": "1Gi", "storageClass": ""},
}
SMALL: Mapping[str, Any] = {
    "storage": STORAGE,
    "resourceDefaults": {
        "requests": {"cpu": "50m", "memory": "400Mi"},
        "limits": {"memory": "1Gi"},
    },
    "kueue": {
        "enabled": True,
        "flavors": [{"name": "default", "quota": {"cpu": "200m", "memory": "2Gi"}}],
    },
}


def values(cluster: Access, image: str | None = None, **more: Any) -> dict[str, Any]:
    """Values for this cluster, `more` in the place of ours."""
    found: dict[str, Any] = {**SMALL, **more}
    if image is not None:
        found["defaults"] = {"image": image, **more.get("defaults", {})}
    if cluster.is_ours:  # it has no Service network
        server = urlsplit(cluster.api.server.geturl())
        found["test"] = {"apiServer": {"host": server.hostname, "port": server.port}}
    return found


@dataclass(frozen=True)
class Release:
    helm: Helm
    cluster: Access
    namespace: str
    name: str = "team"

    def act(self, action: str, **arguments: Any) -> Any:
        """Has Helm do it. Raises Refused."""
        return self.helm.release(
            self.cluster.kubeconfig, self.namespace, action, name=self.name, **arguments
        )

    def install(self, values: Mapping[str, Any]) -> Any:
        return self.act("install", chart=str(CHART), values=values, timeout=600)

    def upgrade(self, values: Mapping[str, Any]) -> Any:
        return self.act("upgrade", chart=str(CHART), values=values, timeout=600)

    def test(self) -> Any:
        return self.act("test", timeout=900)

    def uninstall(self) -> None:
        self.act("uninstall", timeout=600)


def everything(cluster: Access, namespace: str) -> set[str]:
    """All objects of a namespace, and those outside of namespaces that are named after it, as kubectl names them."""
    found = set()
    kinds = list(served(cluster.api))
    within = [
        f"namespaces/{namespace}/{each['name']}" if each["namespaced"] else each["name"]
        for _, each in kinds
    ]
    lists = cluster.api.calls(
        [Call("GET", f"{base}/{path}") for (base, _), path in zip(kinds, within, strict=True)]
    )
    for (base, each), listed in zip(kinds, lists, strict=True):
        group = base.removeprefix("/apis/").partition("/")[0] if base.startswith("/apis/") else ""
        kind = each["kind"].lower() + (f".{group}" if group else "")
        names = [item["metadata"]["name"] for item in listed["items"]]
        found |= {
            f"{kind}/{name}"
            for name in names
            if each["namespaced"] or name.startswith(f"{namespace}.")
        }
    return found


def served(api: Api) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kind that can be listed and whose objects are kept, each in one version; but for events."""
    groups = [group["preferredVersion"]["groupVersion"] for group in api.get("/apis")["groups"]]
    bases = ["/api/v1", *(f"/apis/{group}" for group in groups)]
    for base, known in zip(bases, api.calls([Call("GET", base) for base in bases]), strict=True):
        for each in known["resources"]:
            if "list" in each["verbs"] and "create" in each["verbs"] and each["kind"] != "Event":
                yield base, each


def queue_is_active(cluster: Access, namespace: str, name: str = "team") -> bool:
    found = cluster.api.get(f"/apis/{KUEUE}/namespaces/{namespace}/localqueues/{name}")
    conditions = found.get("status", {}).get("conditions", [])
    return any(each["type"] == "Active" and each["status"] == "True" for each in conditions)
