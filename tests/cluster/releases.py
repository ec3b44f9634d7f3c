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


def chart_values(cluster: Access, image: str | None = None, **more: Any) -> dict[str, Any]:
    """Return chart values for this cluster; `more` replaces the defaults."""
    values: dict[str, Any] = {**SMALL, **more}
    if image is not None:
        values["defaults"] = {"image": image, **more.get("defaults", {})}
    if cluster.is_ours:  # it has no Service network
        server = urlsplit(cluster.api.server.geturl())
        values["test"] = {"apiServer": {"host": server.hostname, "port": server.port}}
    return values


@dataclass(frozen=True)
class Release:
    helm: Helm
    cluster: Access
    namespace: str
    name: str = "team"

    def act(self, action: str, **arguments: Any) -> Any:
        """Run an action of Helm. Raises RefusedError."""
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


def list_objects(cluster: Access, namespace: str) -> set[str]:
    """Return the names of all objects of a namespace and of the cluster objects named after it."""
    all_names = set()
    kinds = list(list_kinds(cluster.api))
    paths = [
        f"namespaces/{namespace}/{kind['name']}" if kind["namespaced"] else kind["name"]
        for _, kind in kinds
    ]
    lists = cluster.api.calls(
        [Call("GET", f"{base}/{path}") for (base, _), path in zip(kinds, paths, strict=True)]
    )
    for (base, kind_row), objects in zip(kinds, lists, strict=True):
        group = base.removeprefix("/apis/").partition("/")[0] if base.startswith("/apis/") else ""
        kind = kind_row["kind"].lower() + (f".{group}" if group else "")
        names = [item["metadata"]["name"] for item in objects["items"]]
        all_names |= {
            f"{kind}/{name}"
            for name in names
            if kind_row["namespaced"] or name.startswith(f"{namespace}.")
        }
    return all_names


def list_kinds(api: Api) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every kind that can be listed and created, in one version each, except events."""
    groups = [group["preferredVersion"]["groupVersion"] for group in api.get("/apis")["groups"]]
    bases = ["/api/v1", *(f"/apis/{group}" for group in groups)]
    for base, listing in zip(bases, api.calls([Call("GET", base) for base in bases]), strict=True):
        for kind in listing["resources"]:
            if "list" in kind["verbs"] and "create" in kind["verbs"] and kind["kind"] != "Event":
                yield base, kind


def is_queue_active(cluster: Access, namespace: str, name: str = "team") -> bool:
    queue = cluster.api.get(f"/apis/{KUEUE}/namespaces/{namespace}/localqueues/{name}")
    conditions = queue.get("status", {}).get("conditions", [])
    return any(
        condition["type"] == "Active" and condition["status"] == "True" for condition in conditions
    )
