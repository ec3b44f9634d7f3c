"""Throw-away keys and certificates of a cluster, signed by one authority, and its kubeconfigs."""

import base64
import json
import subprocess
from pathlib import Path

from tests.cluster.harness.places import IP, NODE, SERVER

DAYS = "3650"
API_NAMES = (
    "IP:127.0.0.1,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default.svc,"
    "DNS:kubernetes.default.svc.cluster.local"
)
SERVERS = {
    "apiserver": f"IP:{IP},IP:10.78.0.1,{API_NAMES}",
    "kubelet-server": f"IP:{IP},DNS:{NODE}",
    "jobset-webhook": "DNS:jobset-webhook-service.jobset-system.svc",
}
SERVICE_ACCOUNT = "/O=system:serviceaccounts/CN=system:serviceaccount"
# Clients by the file of their kubeconfig. JobSet and Kueue go by the names of their own service
# accounts, so that the rights which their manifests give are the rights they have.
CLIENTS = {
    "admin": "/O=system:masters/CN=admin",
    "kcm": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "kubelet": f"/O=system:nodes/CN=system:node:{NODE}",
    "jobset": f"{SERVICE_ACCOUNT}:jobset-system:jobset-controller-manager",
    "kueue": f"{SERVICE_ACCOUNT}:kueue-system:kueue-controller-manager",
    "kwok": "/O=system:masters/CN=kwok",
    "coredns": "/CN=coredns",
    "apiserver-kubelet-client": "/O=system:masters/CN=apiserver-kubelet-client",
    "front-proxy": "/CN=front-proxy-client",
}


def run_openssl(folder: Path, *words: str) -> None:
    done = subprocess.run(["openssl", *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"openssl {' '.join(words)}: {done.stderr.strip()}")


def make_certificates(folder: Path) -> None:
    """Make every key and certificate in `folder`."""
    folder.mkdir(parents=True, mode=0o700)
    make_key(folder, "ca")
    uses = (
        "basicConstraints=critical,CA:TRUE",
        "keyUsage=critical,keyCertSign,cRLSign,digitalSignature",
    )
    extensions = [word for use in uses for word in ("-addext", use)]
    subject = ("-subj", "/CN=jaxlaunch-test")
    run_openssl(
        folder,
        "req",
        "-x509",
        "-new",
        "-key",
        "ca.key",
        "-days",
        DAYS,
        *subject,
        "-out",
        "ca.crt",
        *extensions,
    )
    for name, names in SERVERS.items():
        make_leaf(
            folder, name, f"/CN={name}", f"extendedKeyUsage=serverAuth\nsubjectAltName={names}\n"
        )
    for name, subject_ in CLIENTS.items():
        make_leaf(folder, name, subject_, "extendedKeyUsage=clientAuth\n")
    # Tokens of service accounts are signed with RSA.
    run_openssl(folder, "genrsa", "-out", "sa.key", "2048")
    run_openssl(folder, "rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")


def make_key(folder: Path, name: str) -> None:
    run_openssl(
        folder, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key"
    )


def make_leaf(folder: Path, name: str, subject: str, extensions: str) -> None:
    make_key(folder, name)
    (folder / f"{name}.ext").write_text(f"keyUsage=digitalSignature\n{extensions}")
    run_openssl(
        folder, "req", "-new", "-key", f"{name}.key", "-subj", subject, "-out", f"{name}.csr"
    )
    signer = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", DAYS)
    run_openssl(
        folder,
        "x509",
        "-req",
        "-in",
        f"{name}.csr",
        *signer,
        "-extfile",
        f"{name}.ext",
        "-out",
        f"{name}.crt",
    )


def write_kubeconfigs(pki: Path, folder: Path) -> None:
    """Write a kubeconfig for each client with its certificates, so that it can be moved."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in CLIENTS:
        pair = {
            "client-certificate-data": encode_file(pki / f"{name}.crt"),
            "client-key-data": encode_file(pki / f"{name}.key"),
        }
        (folder / f"{name}.conf").write_text(make_kubeconfig(pki, pair))


def make_kubeconfig(pki: Path, user: dict[str, str]) -> str:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "test",
                "cluster": {
                    "server": SERVER,
                    "certificate-authority-data": encode_file(pki / "ca.crt"),
                },
            }
        ],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    return json.dumps(config, indent=1)


def encode_file(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
