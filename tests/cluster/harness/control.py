"""The control plane: etcd, the API server, the controller manager and the scheduler."""

import ssl
import urllib.error
import urllib.request
from pathlib import Path

from tests.cluster.harness import process
from tests.cluster.harness.api import Api
from tests.cluster.harness.places import (
    ADMIN,
    ETCD,
    ETCD_PEER,
    HEALTH,
    IP,
    KUBECONFIGS,
    PKI,
    RUN,
    SERVER,
    SERVICE_NETWORK,
)

# A fake node's lease comes late when there are a thousand of them and the machine is busy: with a
# short grace, nodes go NotReady and the controller marks their pods unready, for good.
GRACE_S = 600
# Endpoints: all of a service's addresses in one object, written again for each pod that changes,
# and nothing here reads it. The others hear of every pod or node too, and have no objects here.
UNUSED = [
    "endpoints",
    "endpointslice-mirroring",
    "daemonset",
    "deployment",
    "replicaset",
    "replicationcontroller",
    "statefulset",
    "cronjob",
    "horizontal-pod-autoscaler",
    "ttl",
]


def start(home: Path) -> None:
    """Start the API server, wait for it, and start its controllers, for which `settled` waits."""
    start_storage(home)
    await_server()
    start_controllers(home)


def start_storage(home: Path) -> None:
    # Without the fsyncs: a cluster of tests need not outlive a power cut.
    process.start("etcd", [home / "etcd", *etcd_flags()])
    process.start("apiserver", [home / "kube-apiserver", *apiserver_flags()])


def await_server() -> None:
    process.wait_until_ready("apiserver", lambda: Api(ADMIN).get("/readyz"))


def etcd_flags() -> list[str]:
    return [
        f"--data-dir={RUN}/etcd",
        "--unsafe-no-fsync",
        "--log-level=warn",
        f"--listen-client-urls={ETCD}",
        f"--advertise-client-urls={ETCD}",
        f"--listen-peer-urls={ETCD_PEER}",
        f"--initial-advertise-peer-urls={ETCD_PEER}",
        f"--initial-cluster=default={ETCD_PEER}",
        "--quota-backend-bytes=4294967296",
    ]


def apiserver_flags() -> list[str]:
    return [
        f"--etcd-servers={ETCD}",
        f"--bind-address={IP}",
        f"--advertise-address={IP}",
        f"--secure-port={SERVER.rpartition(':')[2]}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        f"--tls-cert-file={PKI}/apiserver.crt",
        f"--tls-private-key-file={PKI}/apiserver.key",
        f"--client-ca-file={PKI}/ca.crt",
        f"--service-account-key-file={PKI}/sa.pub",
        f"--service-account-signing-key-file={PKI}/sa.key",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        # Webhook services are dialled at their EndpointSlices, so that no kube-proxy is needed.
        "--enable-aggregator-routing=true",
        f"--requestheader-client-ca-file={PKI}/ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={PKI}/front-proxy.crt",
        f"--proxy-client-key-file={PKI}/front-proxy.key",
        f"--kubelet-client-certificate={PKI}/apiserver-kubelet-client.crt",
        f"--kubelet-client-key={PKI}/apiserver-kubelet-client.key",
        f"--kubelet-certificate-authority={PKI}/ca.crt",
        "--kubelet-preferred-address-types=InternalIP",
        # Fair queues cost each request a goroutine; here every client may use all of them.
        "--enable-priority-and-fairness=false",
        "--max-requests-inflight=2000",
        "--max-mutating-requests-inflight=1000",
        "--profiling=false",
        # Workloads, which gang scheduling reads, are alpha in this Kubernetes.
        "--feature-gates=GenericWorkload=true",
        "--runtime-config=scheduling.k8s.io/v1alpha1=true",
    ]


def start_controllers(home: Path) -> None:
    process.start("kcm", [home / "kube-controller-manager", *kcm_flags()])
    config = RUN / "scheduler.yaml"
    # Block style: text that begins with a brace is read as JSON.
    config.write_text(
        "apiVersion: kubescheduler.config.k8s.io/v1\n"
        "kind: KubeSchedulerConfiguration\n"
        f"clientConnection: {{kubeconfig: {KUBECONFIGS}/scheduler.conf, qps: 2000, burst: 4000}}\n"
        "leaderElection: {leaderElect: false}\n"
    )
    gates = "--feature-gates=GenericWorkload=true,GangScheduling=true"
    options = [f"--config={config}", gates, *health_options("scheduler")]
    process.start("scheduler", [home / "kube-scheduler", *options])


def kcm_flags() -> list[str]:
    return [
        f"--kubeconfig={KUBECONFIGS}/kcm.conf",
        *health_options("kcm"),
        "--leader-elect=false",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={PKI}/sa.key",
        f"--root-ca-file={PKI}/ca.crt",
        # At the default of 20 a second, a job of a thousand pods takes 50 s to exist.
        "--kube-api-qps=1000",
        "--kube-api-burst=2000",
        "--concurrent-job-syncs=20",
        ",".join(["--controllers=*", *(f"-{name}-controller" for name in UNUSED)]),
        "--endpointslice-updates-batch-period=1s",
        # A claim that is seen before its volume waits for the next round: of 15 s, by default.
        "--pvclaimbinder-sync-period=1s",
        f"--node-monitor-grace-period={GRACE_S}s",
        "--terminated-pod-gc-threshold=0",
        f"--flex-volume-plugin-dir={RUN}/flexvolume",
    ]


def health_options(name: str) -> list[str]:
    """Return the options of a controller's health endpoint and who may use it."""
    config = f"{KUBECONFIGS}/{name}.conf"
    secure = ["--bind-address=127.0.0.1", f"--secure-port={HEALTH[name]}"]
    return [
        *secure,
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
    ]


def wait_until_settled() -> None:
    process.wait_until_ready(
        "kcm", lambda: is_healthy(f"https://127.0.0.1:{HEALTH['kcm']}/healthz")
    )
    process.wait_until_ready(
        "scheduler", lambda: is_healthy(f"https://127.0.0.1:{HEALTH['scheduler']}/readyz")
    )
    # Before its default service account exists, every pod of a namespace is refused.
    process.wait_until_ready(
        "kcm", lambda: Api(ADMIN).get("/api/v1/namespaces/default/serviceaccounts/default")
    )


def is_healthy(url: str) -> bool:
    """Check a local health endpoint, without the controllers' self-signed certificates."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(
            url, timeout=5, context=context if url.startswith("https") else None
        ) as answer:
            return answer.status == 200
    except urllib.error.HTTPError as error:
        error.close()
        return False
