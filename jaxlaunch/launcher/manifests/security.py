"""What a job's pods may do, as whom they run, and how a gang knows its own.

The level is Kubernetes' restricted, unless the cluster defaults give an accelerator's pods another user or it is a TPU.

A gang has an authority of its own, whose key is dropped once it has signed, so that nobody can have another certificate
of this job, and no other job's is accepted in it. One certificate serves all hosts: they read it from one Secret.
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
_OTHERS_FILES = "DAC_OVERRIDE"  # without it root may not write where pods of another user wrote before
_PRIVILEGED = {"privileged": True, "readOnlyRootFilesystem": True}  # which includes every capability

KEY = "key"  # of the gang's Secret
BYTES = 32
_VOLUME, _MOUNT = "gang-secret", "/jaxlaunch-gang"


@dataclasses.dataclass(frozen=True)
class JobSecurity:
    """As whom a job's pods run, and with which rights."""

    user: int  # 0: root
    group: int  # of the user, and of what volumes hold
    is_chosen: bool  # by the cluster defaults for this accelerator
    is_privileged: bool  # the container has every device and capability
    pins_memory: bool  # the network reads and writes memory that the program pins
    service_account: str | None
    has_token: bool  # only the job's own account acts in its pods, never the cluster's usual one
    image_pull_secrets: tuple[str, ...]
    gang_secret: str | None  # name of the Secret by which the agents of the gang know each other


def resolve(job: JobSpec, given: Defaults, *, pins_memory: bool) -> JobSecurity:
    """The cluster says who its pods run as; the job whose rights they have.

    Root where it does not say it of a TPU: no source has another user open the devices (runtime.TPU_USER).
    """
    usual = runtime.TPU_USER.value if job.accelerator.platform == "tpu" else given.user
    user = given.users.get(job.accelerator.type, usual)
    number = user if isinstance(user, int) else None  # root and privileged have none
    return JobSecurity(
        user=number or 0,
        group=number or given.user,
        is_chosen=job.accelerator.type in given.users,
        is_privileged=user == "privileged",
        pins_memory=pins_memory,
        service_account=job.service_account or given.service_account,
        has_token=job.service_account is not None,
        image_pull_secrets=tuple(dict.fromkeys([*given.image_pull_secrets, *job.image_pull_secrets])),
        gang_secret=_gang_secret(job.name) if job.gang_secret else None,
    )


def pod(security: JobSecurity) -> dict[str, Any]:
    """The pod's part of it."""
    own: dict[str, Any] = {"automountServiceAccountToken": security.has_token}
    if security.service_account is not None:
        own["serviceAccountName"] = security.service_account
    if security.image_pull_secrets:
        own["imagePullSecrets"] = [{"name": name} for name in security.image_pull_secrets]
    return own | {
        "securityContext": {
            "runAsNonRoot": security.user != 0,
            "runAsUser": security.user,
            "runAsGroup": security.group,
            "fsGroup": security.group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    }


def container(security: JobSecurity) -> dict[str, Any]:
    """What the agent's container may do. Capabilities are added for root alone: in a container of another user they are
    in no set that counts, and would only cost the restricted level."""
    if security.is_privileged:
        return dict(_PRIVILEGED)
    if security.user == 0:
        added = [_OTHERS_FILES] if security.is_chosen else []
        added += [runtime.PINNING_CAPABILITY.value] if security.pins_memory else []
        return RESTRICTED | ({"capabilities": {"drop": ["ALL"], "add": added}} if added else {})
    return dict(RESTRICTED)


def patch(security: JobSecurity) -> dict[str, Any]:
    """The gang's Secret in the pod template."""
    if security.gang_secret is None:
        return {}
    main = {
        "name": MAIN_CONTAINER,
        "env": [{"name": contract.GANG_SECRET, "value": f"{_MOUNT}/{KEY}"}],
        "volumeMounts": [{"name": _VOLUME, "mountPath": _MOUNT, "readOnly": True}],
    }
    volume = {"name": _VOLUME, "secret": {"secretName": security.gang_secret}}
    return {"spec": {"containers": [main], "volumes": [volume]}}


# --- the Secret of `gang_secret: true`: `launcher submit` makes it, or whoever applies what `launcher render` prints --


def gang_secret(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The Secret of such a gang, from its JobSet's metadata: bytes and certificates that no other has."""
    job = metadata["name"]
    held = {KEY: secrets.token_bytes(BYTES), **make_certificates(job)}
    data = {name: base64.b64encode(content).decode() for name, content in held.items()}
    named = {key: metadata[key] for key in ("namespace", "labels") if key in metadata} | {"name": _gang_secret(job)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": named, "type": "Opaque", "data": data}


def instruction(name: str) -> str:
    """What a person has to make who applies the manifests of the job of this name without `launcher submit`."""
    given = f"kubectl create secret generic {_gang_secret(name)} --from-file={KEY}=/dev/stdin"
    return f"the pods wait for Secret {_gang_secret(name)}, which is not printed: `openssl rand {BYTES} | {given}`"


def _gang_secret(job: str) -> str:
    return f"{job}-gang"


VALID = datetime.timedelta(days=3650)  # longer than any job: nothing could sign a newer one
SKEW = datetime.timedelta(days=1)  # by which a node's clock may be behind


def make_certificates(job: str) -> dict[str, bytes]:
    """Certificate, key and authority of a new gang, in PEM, by the names that Kubernetes gives such files."""
    from cryptography import x509  # here, since only who submits needs it: it takes a tenth of a second to import
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "jaxlaunch gang authority")])

    def signed(subject: x509.Name, key: ec.EllipticCurvePrivateKey, *extensions: x509.ExtensionType) -> bytes:
        builder = (
            x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - SKEW)
            .not_valid_after(now + VALID)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, job[:64])])
    return {
        AUTHORITY: signed(issuer, authority, x509.BasicConstraints(ca=True, path_length=0)),
        CERTIFICATE: signed(
            subject,
            own,
            x509.BasicConstraints(ca=False, path_length=None),
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{PEER_URI}{job}")]),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
        ),
        CERTIFICATE_KEY: own.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    }
