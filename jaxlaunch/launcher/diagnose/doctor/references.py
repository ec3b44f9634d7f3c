"""What a job's pods refer to: PersistentVolumeClaims, Secrets, ConfigMaps, a service account. Pure.

Of a Secret only its type and the names of its keys are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxlaunch.launcher.diagnose.doctor.finding import Finding, Findings, fail, fail_admin, ok, warn
from jaxlaunch.launcher.diagnose.doctor.target import Checkpoints
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.launcher.kubernetes.quantity import amount
from jaxlaunch.launcher.wording import size

_PULL_TYPES = ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")
_WAITS = "pods wait in ContainerCreating until it exists."


class Keys(NamedTuple):
    """Keys of a Secret or a ConfigMap that pods cannot start without; none: all there are."""

    name: str
    keys: tuple[str, ...] = ()


def claims(spec: Obj) -> dict[str, bool]:
    """Claim → whether the pods only read it."""
    found: dict[str, bool] = {}
    for volume in spec.get("volumes") or []:
        if (named := volume.get("persistentVolumeClaim")) is not None:
            is_read = bool(named.get("readOnly"))
            found[named["claimName"]] = found.get(named["claimName"], True) and is_read
    return found


def pull_secrets(spec: Obj) -> list[str]:
    """The Secrets that images are pulled with."""
    return [each["name"] for each in spec.get("imagePullSecrets") or []]


def secrets(spec: Obj) -> list[Keys]:
    """Secrets that volumes and environment variables use, and which of their keys."""
    return _referred(spec, "secret", "secretName", "secretKeyRef", "secretRef")


def config_maps(spec: Obj) -> list[Keys]:
    """ConfigMaps that volumes and environment variables use, and which of their keys."""
    return _referred(spec, "configMap", "name", "configMapKeyRef", "configMapRef")


def _referred(spec: Obj, volume: str, name: str, key_ref: str, ref: str) -> list[Keys]:
    found: dict[str, set[str]] = {}
    for each in spec.get("volumes") or []:
        if (named := each.get(volume)) is not None and not named.get("optional"):
            found.setdefault(named[name], set()).update(item["key"] for item in named.get("items") or [])
    for source, keys in _sources(spec, key_ref, ref):
        if not source.get("optional"):
            found.setdefault(source["name"], set()).update(keys)
    return [Keys(name, tuple(sorted(keys))) for name, keys in found.items()]


def _sources(spec: Obj, key_ref: str, ref: str) -> Iterator[tuple[Mapping[str, Any], list[str]]]:
    for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        for variable in container.get("env") or []:
            if (source := (variable.get("valueFrom") or {}).get(key_ref)) is not None:
                yield source, [source["key"]]
        for whole in container.get("envFrom") or []:
            if (source := whole.get(ref)) is not None:
                yield source, []


# --- judgements -------------------------------------------------------------------------------------------------------


def claim(name: str, found: Obj | None, *, hosts: int, is_read: bool) -> Finding:
    """A PersistentVolumeClaim that `hosts` pods mount at once."""
    if found is None:
        what = f"PersistentVolumeClaim {name} does not exist"
        return fail(what, "pods stay Pending until it does.", "create it in the job's namespace.")
    modes = found["spec"].get("accessModes") or []
    shared = "ReadWriteMany" in modes or (is_read and "ReadOnlyMany" in modes)
    if hosts > 1 and not shared:
        what = f"PersistentVolumeClaim {name} is {', '.join(modes)}, and {hosts} hosts mount it"
        why = "it can be attached to one node only: the pods on other nodes wait."
        return fail(what, why, "use a ReadWriteMany claim (NFS, Filestore, FSx, CephFS), or a bucket's URL.")
    phase = found.get("status", {}).get("phase", "Pending")
    if phase == "Lost":
        what = f"PersistentVolumeClaim {name} is Lost: its volume no longer exists"
        return fail_admin(what, "pods cannot mount it.", "restore the volume, or create another claim.")
    if phase != "Bound":
        why = "pods wait until it is bound; with WaitForFirstConsumer that is when the first pod is scheduled."
        return warn(f"PersistentVolumeClaim {name} is {phase}", why, f"kubectl describe pvc {name}")
    return ok(f"PersistentVolumeClaim {name} is Bound, {', '.join(modes)}")


def room(needed: Checkpoints, found: Obj | None) -> Findings:
    """A PersistentVolumeClaim that checkpoints are saved to, if it exists and tells its size."""
    spec, status = (found or {}).get("spec", {}), (found or {}).get("status", {})
    has = (status.get("capacity") or (spec.get("resources") or {}).get("requests") or {}).get("storage")
    if has is None:
        return
    takes = f"{size(needed.bytes)} of checkpoints, {needed.kept} kept and one being written"
    if needed.bytes <= amount(has):
        yield ok(f"PersistentVolumeClaim {needed.claim} of {has} has room for {takes}")
        return
    what = f"PersistentVolumeClaim {needed.claim} of {has} has no room for {takes}"
    full = "a save that finds the disk full ends the run with exit code 84."  # EFS, NFS and hostPath enforce no size
    why = f"the claim says {has}; if its storage enforces that, {full}"
    yield warn(what, why, "enlarge the claim, or lower train.checkpoint.keep.")


def pull_secret(name: str, found: Obj | None) -> Finding:
    """A Secret that images are pulled with."""
    if found is None:
        why = "images are pulled without credentials, which fails where the registry requires them."
        return fail(f"image pull secret {name} does not exist", why, f"kubectl create secret docker-registry {name} …")
    if found.get("type") not in _PULL_TYPES:
        what = f"image pull secret {name} is of type {found.get('type')}"
        return fail(
            what, f"the kubelet needs {_PULL_TYPES[0]}.", "create it with `kubectl create secret docker-registry`."
        )
    return ok(f"image pull secret {name} is of type {found['type']}")


def keys(kind: str, wanted: Keys, found: Obj | None) -> Finding:
    """A Secret or ConfigMap, and the keys of it that pods use."""
    if found is None:
        return fail(f"{kind} {wanted.name} does not exist", _WAITS, f"create it, or remove it from {kind.lower()}s.")
    has = {**(found.get("data") or {}), **(found.get("binaryData") or {})}.keys()
    if missing := [key for key in wanted.keys if key not in has]:
        return fail(
            f"{kind} {wanted.name} has no key {', '.join(missing)}", _WAITS, f"it has {', '.join(sorted(has))}."
        )
    return ok(f"{kind} {wanted.name} exists" + (f", with {', '.join(wanted.keys)}" if wanted.keys else ""))


def service_account(name: str, found: Obj | None) -> Finding:
    """The account that the pods run under."""
    if found is None:
        return fail(
            f"service account {name} does not exist",
            "the API server rejects pods that name it.",
            "create it, or set another.",
        )
    return ok(f"service account {name} exists")
