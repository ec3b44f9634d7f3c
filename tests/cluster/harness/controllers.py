"""JobSet's and Kueue's controllers with their webhooks, as processes of the host."""

import base64
import os
import time
from pathlib import Path

import yaml

from tests.cluster.harness import process
from tests.cluster.harness.api import Api, RefusedError
from tests.cluster.harness.control import is_healthy
from tests.cluster.harness.places import (
    ADMIN,
    HEALTH,
    IP,
    JOBSET_WEBHOOK,
    KUBECONFIGS,
    KUEUE_WEBHOOK,
    PKI,
    RUN,
)

JOBSET_CERTIFICATE = RUN / "jobset-webhook"
KUEUE_CERTIFICATE = RUN / "kueue-webhook"
KUEUE_SECRET = "/api/v1/namespaces/kueue-system/secrets/kueue-webhook-server-cert"


def start_jobset(home: Path) -> None:
    JOBSET_CERTIFICATE.mkdir(exist_ok=True)
    for source, target in (("crt", "tls.crt"), ("key", "tls.key")):
        (JOBSET_CERTIFICATE / target).write_bytes((PKI / f"jobset-webhook.{source}").read_bytes())
    config = {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"port": JOBSET_WEBHOOK, "host": IP, "certDir": os.fspath(JOBSET_CERTIFICATE)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{HEALTH['jobset']}"},
    }
    start("jobset", home, config)


def start_kueue(home: Path) -> None:
    """Start Kueue, which makes its own certificates for its webhooks and conversions."""
    KUEUE_CERTIFICATE.mkdir(exist_ok=True)
    config = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": "kueue-system",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": True},
        "webhook": {"port": KUEUE_WEBHOOK, "host": IP, "certDir": os.fspath(KUEUE_CERTIFICATE)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{HEALTH['kueue']}"},
        "clientConnection": {"qps": 500, "burst": 1000},
        "featureGates": {
            "VisibilityOnDemand": False
        },  # it is an API of its own, which the manifests leave out
        "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
    }
    start("kueue", home, config)


def start(name: str, home: Path, config: dict[str, object]) -> None:
    path = RUN / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [home / name, f"--config={path}", "--zap-log-level=2"]
    process.start(name, command, os.environ | {"KUBECONFIG": f"{KUBECONFIGS}/{name}.conf"})


def copy_kueue_certificate() -> None:
    """Copy the Secret that Kueue mounts, as a kubelet would: its webhooks wait for the files."""

    def secret() -> dict[str, str]:
        return Api(ADMIN).get(KUEUE_SECRET).get("data") or {}

    process.wait_until_ready("kueue", secret)
    for name, data in secret().items():
        (KUEUE_CERTIFICATE / name).write_bytes(base64.b64decode(data))


def wait_until_settled() -> None:
    for name in ("jobset", "kueue"):
        process.wait_until_ready(
            name, lambda name=name: is_healthy(f"http://127.0.0.1:{HEALTH[name]}/readyz")
        )
    process.wait_until_ready("jobset", webhooks_answer)


def webhooks_answer() -> bool:
    """Check that both webhooks answer: a JobSet passes them in a dry run."""
    container = {"name": "main", "image": "none", "resources": {"requests": {"cpu": "1"}}}
    pod = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    job = {"name": "w", "template": {"spec": {"template": pod}}}
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": f"probe-{time.time_ns()}"},
        "spec": {"replicatedJobs": [job]},
    }
    try:
        Api(ADMIN).create(
            "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets?dryRun=All", jobset
        )
    except RefusedError as error:
        if "failed calling webhook" not in str(error) and error.status != 404:
            raise
        return False
    return True
