"""Users and capabilities of a job's pods, and mutual authentication of its gang.

Pods have the Pod Security level `restricted`, unless they use TPUs or the cluster defaults set
another user. Each gang has its own certificate authority, whose key is discarded after it has
signed one certificate. Nobody can issue another certificate for the job, and certificates of other
jobs are not accepted. All hosts read the certificate from a Secret.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxlaunch import contract
from jaxlaunch.contract import AUTHORITY, CERTIFICATE, CERTIFICATE_KEY, PEER_URI
from jaxlaunch.launcher.kubernetes.labels import MAIN_CONTAINER
from jaxlaunch.launcher.platforms import runtime

if TYPE_CHECKING:
    from jaxlaunch.launcher.job.defaults import Defaults
    from jaxlaunch.launcher.job.schema import JobSpec


RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
# Without this capability, root may not write to folders of another user.
_OVERRIDE_CAPABILITY = "DAC_OVERRIDE"
# A privileged container has every capability.
_PRIVILEGED = {"privileged": True, "readOnlyRootFilesystem": True}

# The key of the gang's Secret that contains the shared key of the agents.
KEY_FILE = "key"
KEY_BYTES = 32
_VOLUME, _MOUNT = "gang-secret", "/jaxlaunch-gang"


@dataclasses.dataclass(frozen=True)
class JobSecurity:
    """User, capabilities and credentials of a job's pods.

    Attributes:
        user: Number of the user, 0 for root.
        group: Group of the user and of volumes.
        is_user_set: Whether the cluster defaults set a user for this accelerator.
        is_privileged: Whether the container has every device and capability.
        pins_memory: Whether the network needs pinned memory of the program.
        service_account: Name of the ServiceAccount, or None for the default one.
        has_token: Whether its token is mounted, which needs an account that the job itself names.
        image_pull_secrets: Names of Secrets for pulling images.
        gang_secret: Name of the Secret with which the agents of the gang authenticate each other.
    """

    user: int
    group: int
    is_user_set: bool
    is_privileged: bool
    pins_memory: bool
    service_account: str | None
    has_token: bool
    image_pull_secrets: tuple[str, ...]
    gang_secret: str | None


def resolve(job: JobSpec, defaults: Defaults, *, owner: str, pins_memory: bool) -> JobSecurity:
    """Choose the user from the cluster defaults and the ServiceAccount from the job.

    `owner` is the name of the JobSet, whose roles share the Secret.

    The default on TPUs is root, because no source shows that another user can open the devices
    (runtime.TPU_USER).
    """
    default_user = runtime.TPU_USER.value if job.accelerator.platform == "tpu" else defaults.user
    user = defaults.users.get(job.accelerator.type, default_user)
    # None for root and privileged.
    number = user if isinstance(user, int) else None
    return JobSecurity(
        user=number or 0,
        group=number or defaults.user,
        is_user_set=job.accelerator.type in defaults.users,
        is_privileged=user == "privileged",
        pins_memory=pins_memory,
        service_account=job.service_account or defaults.service_account,
        has_token=job.service_account is not None,
        image_pull_secrets=tuple(
            dict.fromkeys([*defaults.image_pull_secrets, *job.image_pull_secrets])
        ),
        gang_secret=_gang_secret_name(owner) if job.gang_secret else None,
    )


def pod_spec(security: JobSecurity) -> dict[str, Any]:
    """Return the keys of the pod's spec: user, account and image pull secrets."""
    spec: dict[str, Any] = {"automountServiceAccountToken": security.has_token}
    if security.service_account is not None:
        spec["serviceAccountName"] = security.service_account
    if security.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in security.image_pull_secrets]
    return spec | {
        "securityContext": {
            "runAsNonRoot": security.user != 0,
            "runAsUser": security.user,
            "runAsGroup": security.group,
            "fsGroup": security.group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    }


def container_security_context(security: JobSecurity) -> dict[str, Any]:
    """Return the security context of the agent's container.

    Capabilities are added only for root: for other users they have no effect and would violate
    `restricted`.
    """
    if security.is_privileged:
        return dict(_PRIVILEGED)
    capabilities = []
    if security.user == 0:
        capabilities += [_OVERRIDE_CAPABILITY] if security.is_user_set else []
        capabilities += [runtime.PINNING_CAPABILITY.value] if security.pins_memory else []
    added = {"add": capabilities} if capabilities else {}
    return {**RESTRICTED, "capabilities": {"drop": ["ALL"], **added}}


def patch(security: JobSecurity) -> dict[str, Any]:
    """Return the patch of the pod template that mounts the gang's Secret."""
    if security.gang_secret is None:
        return {}
    main = {
        "name": MAIN_CONTAINER,
        "env": [{"name": contract.GANG_SECRET, "value": f"{_MOUNT}/{KEY_FILE}"}],
        "volumeMounts": [{"name": _VOLUME, "mountPath": _MOUNT, "readOnly": True}],
    }
    volume = {"name": _VOLUME, "secret": {"secretName": security.gang_secret}}
    return {"spec": {"containers": [main], "volumes": [volume]}}


# --- the Secret of `gang_secret: true` ------------------------------------------------------------


def gang_secret(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new Secret of the gang, for the metadata of its JobSet."""
    job = metadata["name"]
    contents = {KEY_FILE: secrets.token_bytes(KEY_BYTES), **make_certificates(job)}
    data = {name: base64.b64encode(content).decode() for name, content in contents.items()}
    secret_metadata = {key: metadata[key] for key in ("namespace", "labels") if key in metadata}
    secret_metadata["name"] = _gang_secret_name(job)
    manifest = {"apiVersion": "v1", "kind": "Secret", "metadata": secret_metadata}
    return {**manifest, "type": "Opaque", "data": data}


def secret_instruction(name: str) -> str:
    """Return the instruction for creating the Secret without `launcher submit`."""
    secret = _gang_secret_name(name)
    command = f"kubectl create secret generic {secret} --from-file={KEY_FILE}=/dev/stdin"
    pipeline = f"openssl rand {KEY_BYTES} | {command}"
    return f"the pods wait for Secret {secret}, which is not printed: `{pipeline}`"


def _gang_secret_name(job: str) -> str:
    return f"{job}-gang"


# Longer than any job, because the certificate cannot be renewed.
CERTIFICATE_VALIDITY = datetime.timedelta(days=3650)
# The clock of a node may be behind by this much.
CLOCK_SKEW = datetime.timedelta(days=1)


def make_certificates(job: str) -> dict[str, bytes]:
    """Return the certificate, key and authority of a new gang in PEM, by file name."""
    # Imported here, because the import takes 0.1 s and only `launcher submit` needs it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    authority = ec.generate_private_key(ec.SECP256R1())
    host_key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)

    def common_name(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])

    issuer = common_name("jaxlaunch gang authority")

    def sign_certificate(
        subject: x509.Name, key: ec.EllipticCurvePrivateKey, *extensions: x509.ExtensionType
    ) -> bytes:
        public_key = key.public_key()
        builder = (
            x509.CertificateBuilder(issuer, subject, public_key, x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + CERTIFICATE_VALIDITY)
        )
        for extension in (x509.SubjectKeyIdentifier.from_public_key(public_key), *extensions):
            is_critical = isinstance(extension, x509.BasicConstraints)
            builder = builder.add_extension(extension, critical=is_critical)
        return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    may_sign = x509.BasicConstraints(ca=True, path_length=0)
    return {
        AUTHORITY: sign_certificate(issuer, authority, may_sign),
        CERTIFICATE: sign_certificate(
            common_name(job[:64]),
            host_key,
            x509.BasicConstraints(ca=False, path_length=None),
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{PEER_URI}{job}")]),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
        ),
        CERTIFICATE_KEY: host_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    }
