"""The tests' cluster is a real one."""

from pathlib import Path

import pytest

from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.waiting import wait_until

pytestmark = pytest.mark.extended

RESTRICTED = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}

# A name may be published a moment after its pod runs.
SEEK = """
import os, socket, time
print("user", os.getuid())
address = None
while address is None:
    try:
        address = socket.gethostbyname("host.gang")
    except OSError:
        time.sleep(0.1)
print("found", address)
"""


def make_pod(name: str, image: str, program: str, **spec: object) -> dict[str, object]:
    confined = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    container = {
        "name": "main",
        "image": image,
        "command": ["python3", "-c", program],
        "securityContext": confined,
        "volumeMounts": spec.pop("mounts", []),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": RESTRICTED,
            "containers": [container],
            **spec,
        },
    }


def wait_for_log(cluster: Access, namespace: str, name: str) -> str:
    """Wait for the success of a pod and return its log."""
    at = f"/api/v1/namespaces/{namespace}/pods/{name}"
    over = ("Succeeded", "Failed")
    seen = wait_until(
        lambda: cluster.api.get(at),
        lambda seen: seen["status"]["phase"] in over,
        f"the end of {name}",
    )
    log = cluster.kubectl("--namespace", namespace, "logs", name)
    assert seen["status"]["phase"] == "Succeeded", log
    return log


def test_server_and_node_have_the_pinned_version(cluster: Access) -> None:
    if not cluster.is_ours:
        pytest.skip("the cluster is the user's own")
    assert cluster.api.get("/version")["gitVersion"] == "v1.35.4"
    (node,) = cluster.api.get("/api/v1/nodes?labelSelector=jaxlaunch.test%2Freal")["items"]
    assert node["status"]["nodeInfo"]["kubeletVersion"] == "v1.35.4"


def test_pod_finds_its_sibling_by_name(cluster: Access, namespace: str, base_image: str) -> None:
    pods = f"/api/v1/namespaces/{namespace}/pods"
    service = {"clusterIP": "None", "selector": {"app": "host"}, "publishNotReadyAddresses": True}
    preparations.create_object(
        cluster,
        f"/api/v1/namespaces/{namespace}/services",
        "v1",
        "Service",
        "gang",
        service,
        namespace,
    )
    named_pod = make_pod(
        "host", base_image, "import time; time.sleep(600)", hostname="host", subdomain="gang"
    )
    named_pod["metadata"]["labels"] = {"app": "host"}  # type: ignore[index]
    cluster.api.create(pods, named_pod)
    cluster.api.create(pods, make_pod("seeker", base_image, SEEK))
    log = wait_for_log(cluster, namespace, "seeker")
    address = cluster.api.get(f"{pods}/host")["status"]["podIP"]
    assert log.splitlines() == ["user 1000", f"found {address}"]


def test_pods_of_any_user_write_to_the_claim(
    cluster: Access, namespace: str, base_image: str, checkpoints: Path
) -> None:
    volumes = [{"name": "kept", "persistentVolumeClaim": {"claimName": "checkpoints"}}]
    write = "import os; open('/kept/saved', 'w').write('here'); print(os.listdir('/kept'))"
    mounts = [{"name": "kept", "mountPath": "/kept"}]
    writer = make_pod("writer", base_image, write, volumes=volumes, mounts=mounts)
    cluster.api.create(f"/api/v1/namespaces/{namespace}/pods", writer)
    assert wait_for_log(cluster, namespace, "writer") == "['saved']\n"
