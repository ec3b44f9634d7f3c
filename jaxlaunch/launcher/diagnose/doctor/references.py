"""What a job's pods refer to: PersistentVolumeClaims, Secrets, ConfigMaps, a service account. Pure.

Of a Secret only its type and the names of its keys are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxlaunch.launcher.diagnose.doctor.finding import Finding, Findings, fail, fail_admin, ok, warn
from jaxlaunch.launcher.diagnose.doctor.target import Checkpoints
from jaxlaunch.launcher.diagnose.text import Text
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.launcher.kubernetes.resources import parse_quantity
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
        what = "PersistentVolumeClaim {name} does not exist"
        return fail(what, "pods stay Pending until it does.", "create it in the job's namespace.", name=name)
    modes = found["spec"].get("accessModes") or []
    shared = "ReadWriteMany" in modes or (is_read and "ReadOnlyMany" in modes)
    if hosts > 1 and not shared:
        what = "PersistentVolumeClaim {name} is {modes}, and {hosts} hosts mount it"
        why = "it can be attached to one node only: the pods on other nodes wait."
        fix = "use a ReadWriteMany claim (NFS, Filestore, FSx, CephFS), or a bucket's URL."
        return fail(what, why, fix, name=name, modes=list(modes), hosts=hosts)
    phase = found.get("status", {}).get("phase", "Pending")
    if phase == "Lost":
        what = "PersistentVolumeClaim {name} is Lost: its volume no longer exists"
        return fail_admin(what, "pods cannot mount it.", "restore the volume, or create another claim.", name=name)
    if phase != "Bound":
        why = "pods wait until it is bound; with WaitForFirstConsumer that is when the first pod is scheduled."
        what = "PersistentVolumeClaim {name} is {phase}"
        return warn(what, why, "kubectl describe pvc {name}", name=name, phase=phase)
    return ok("PersistentVolumeClaim {name} is Bound, {modes}", name=name, modes=list(modes))


def room(needed: Checkpoints, found: Obj | None) -> Findings:
    """A PersistentVolumeClaim that checkpoints are saved to, if it exists and tells its size."""
    spec, status = (found or {}).get("spec", {}), (found or {}).get("status", {})
    has = (status.get("capacity") or (spec.get("resources") or {}).get("requests") or {}).get("storage")
    if has is None:
        return
    takes = Text("{size} of checkpoints, {kept} kept and one being written", size=size(needed.bytes), kept=needed.kept)
    fields = {"claim": needed.claim, "has": has, "takes": takes}
    if needed.bytes <= parse_quantity(has):
        yield ok("PersistentVolumeClaim {claim} of {has} has room for {takes}", **fields)
        return
    # EFS, NFS and hostPath enforce no size.
    full = "a save that finds the disk full ends the run with exit code 84."
    yield warn(
        "PersistentVolumeClaim {claim} of {has} has no room for {takes}",
        "the claim says {has}; if its storage enforces that, " + full,
        "enlarge the claim, or lower train.checkpoint.keep.",
        **fields,
    )


def pull_secret(name: str, found: Obj | None) -> Finding:
    """A Secret that images are pulled with."""
    if found is None:
        why = "images are pulled without credentials, which fails where the registry requires them."
        fix = "kubectl create secret docker-registry {name} …"
        return fail("image pull secret {name} does not exist", why, fix, name=name)
    what, fields = "image pull secret {name} is of type {type}", {"name": name, "type": found.get("type")}
    if found.get("type") not in _PULL_TYPES:
        fix = "create it with `kubectl create secret docker-registry`."
        return fail(what, f"the kubelet needs {_PULL_TYPES[0]}.", fix, **fields)
    return ok(what, **fields)


def keys(kind: str, wanted: Keys, found: Obj | None) -> Finding:
    """A Secret or ConfigMap, and the keys of it that pods use."""
    fields = {"kind": kind, "name": wanted.name, "keys": wanted.keys}
    if found is None:
        return fail("{kind} {name} does not exist", _WAITS, f"create it, or remove it from {kind.lower()}s.", **fields)
    has = {**(found.get("data") or {}), **(found.get("binaryData") or {})}.keys()
    if missing := [key for key in wanted.keys if key not in has]:
        what = "{kind} {name} has no key {missing}"
        return fail(what, _WAITS, "it has {present}.", **fields, missing=missing, present=sorted(has))
    return ok("{kind} {name} exists, with {keys}" if wanted.keys else "{kind} {name} exists", **fields)


def service_account(name: str, found: Obj | None) -> Finding:
    """The account that the pods run under."""
    if found is None:
        what, why = "service account {name} does not exist", "the API server rejects pods that name it."
        return fail(what, why, "create it, or set another.", name=name)
    return ok("service account {name} exists", name=name)
