"""The real node: a kubelet on containerd that writes into the run folder where possible."""

from pathlib import Path

import yaml

from tests.cluster.harness import process
from tests.cluster.harness.api import Api
from tests.cluster.harness.containerd import SOCKET
from tests.cluster.harness.places import (
    ADMIN,
    CGROUP,
    DOMAIN,
    IP,
    KUBECONFIGS,
    KUBELET,
    KUBELET_ROOT,
    NODE,
    PKI,
    RUN,
)

LABELS = "jaxlaunch.test/real=true"


def start(home: Path) -> None:
    KUBELET_ROOT.mkdir(exist_ok=True)
    # Of pods with dnsPolicy Default: none answers there.
    (RUN / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    (RUN / "kubelet.yaml").write_text(yaml.safe_dump(write_config()))
    flags = [
        f"--config={RUN}/kubelet.yaml",
        f"--kubeconfig={KUBECONFIGS}/kubelet.conf",
        f"--root-dir={KUBELET_ROOT}",
        f"--cert-dir={KUBELET_ROOT}/pki",
        f"--hostname-override={NODE}",
        f"--node-ip={IP}",
        f"--node-labels={LABELS}",
    ]
    process.start("kubelet", [home / "kubelet", *flags])


def write_config() -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{PKI}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "address": IP,
        "port": KUBELET,
        "healthzPort": 0,
        "tlsCertFile": f"{PKI}/kubelet-server.crt",
        "tlsPrivateKeyFile": f"{PKI}/kubelet-server.key",
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "makeIPTablesUtilChains": False,
        "clusterDNS": [IP],
        "clusterDomain": DOMAIN,
        "resolvConf": f"{RUN}/resolv.conf",
        "podLogsDir": f"{RUN}/pod-logs",
        "volumePluginDir": f"{RUN}/flexvolume",
        "nodeStatusUpdateFrequency": "2s",
        "nodeStatusReportFrequency": "60s",  # where nothing has changed
        "nodeLeaseDurationSeconds": 40,
        "syncFrequency": "5s",
        "seccompDefault": True,
        "maxPods": 300,
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "eventRecordQPS": 0,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
    }


def wait_until_settled() -> None:
    def is_ready() -> bool:
        conditions = Api(ADMIN).get(f"/api/v1/nodes/{NODE}")["status"].get("conditions", [])
        return any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in conditions
        )

    process.wait_until_ready("kubelet", is_ready)
