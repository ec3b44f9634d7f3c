"""Where a cluster lives: its folders, addresses and names. There is one cluster per machine.

One bridge carries everything: it is the node's address, the API server's, the webhooks', the DNS
server's and the gateway of the pods. There is no service network: nothing here dials a ClusterIP.
"""

import hashlib
from pathlib import Path

from tests.cluster.harness.build import cache_folder

CACHE = cache_folder()
RUN = CACHE / "run"  # all state of the cluster that is up; gone after `down`
STORE = CACHE / "containerd"  # containerd's root: images stay unpacked from one cluster to the next
IMAGES = CACHE / "images"  # image archives
LOCK = CACHE / ".lock"  # held by the process that starts or stops the cluster
USERS = CACHE / ".users"  # held shared by every test session that uses it
NODES = CACHE / ".nodes"  # held by tests that change the nodes, shared by those that judge them

LOGS = RUN / "log"
PKI = RUN / "pki"
KUBECONFIGS = RUN / "kubeconfig"
ADMIN = KUBECONFIGS / "admin.conf"
KUBELET_ROOT = RUN / "kubelet"
VOLUMES = RUN / "volumes"  # host paths behind the claims of tests
KEPT = RUN / "kept"  # made by `up`: test sessions leave this cluster up
UP = RUN / "up"  # the cluster came up whole; holds the key of its programs

BRIDGE = "jaxlaunch0"
IP = "10.77.0.1"
POD_NETWORK = "10.77.0.0/16"
POD_RANGE = ("10.77.1.2", "10.77.3.250")
SERVICE_NETWORK = "10.78.0.0/16"  # ClusterIPs are given out and never routed
SERVER = f"https://{IP}:16443"
DOMAIN = "cluster.local"
NODE = "node-0"
CGROUP = "jaxlaunch-cluster"  # of all pods, in every hierarchy
NETWORK = "jaxlaunch-cluster"  # the CNI network's name

ETCD = "http://127.0.0.1:12379"
ETCD_PEER = "http://127.0.0.1:12380"
JOBSET_WEBHOOK = 19443
KUEUE_WEBHOOK = 19444
# Local health endpoints, by program.
HEALTH = {
    "kcm": 11257,
    "scheduler": 11259,
    "jobset": 18081,
    "kueue": 18082,
    "coredns": 18181,
    "kwok": 18247,
}
KUBELET = 10250

# What must be free before a start. The DNS port is on the bridge, which does not exist yet.
PORTS = (12379, 12380, *HEALTH.values())


def hash_sources(*modules: str) -> str:
    """Return a hash of the named modules of this package, whose products depend on it."""
    digest = hashlib.sha256()
    for module in modules:
        digest.update((Path(__file__).parent / f"{module}.py").read_bytes())
    return digest.hexdigest()[:12]
