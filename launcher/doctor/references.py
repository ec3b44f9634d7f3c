"""What a job's pods name and the namespace must hold: claims, Secrets, ConfigMaps, a service account. Pure.

Of a Secret only its type and the names of its keys are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from launcher.finding import Finding, clusters, ok, warn, yours
from launcher.objects import Obj

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
    return [each["name"] for each in spec.get("imagePullSecrets") or []]


def secrets(spec: Obj) -> list[Keys]:
    """Secrets that volumes and variables take, and the keys of them."""
    return _referred(spec, "secret", "secretName", "secretKeyRef", "secretRef")


def config_maps(spec: Obj) -> list[Keys]:
    """ConfigMaps, likewise."""
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
        return yours(f"claim {name} does not exist", "pods stay Pending until it does.", "kubectl apply -f a claim.")
    modes = found["spec"].get("accessModes") or []
    shared = "ReadWriteMany" in modes or (is_read and "ReadOnlyMany" in modes)
    if hosts > 1 and not shared:
        what = f"claim {name} is {', '.join(modes)}, and {hosts} hosts mount it"
        why = "it is attached to one node: the other pods wait, or each host sees its own."
        return yours(what, why, "use a ReadWriteMany claim (NFS, Filestore, FSx, CephFS), or a bucket's URL.")
    phase = found.get("status", {}).get("phase", "Pending")
    if phase == "Lost":
        return clusters(f"claim {name} has lost its volume", "pods cannot mount it.", "restore it, or make a new one.")
    if phase != "Bound":
        why = "pods wait until a volume is found; a class that waits for its first pod is bound then."
        return warn(f"claim {name} is {phase}", why, f"kubectl describe pvc {name}")
    return ok(f"claim {name} is bound, {', '.join(modes)}")


def pull_secret(name: str, found: Obj | None) -> Finding:
    """A Secret that images are pulled with."""
    if found is None:
        why = "the pull goes on without it, and fails where the registry asks for it."
        return yours(f"image pull secret {name} does not exist", why, f"kubectl create secret docker-registry {name} …")
    if found.get("type") not in _PULL_TYPES:
        what = f"image pull secret {name} is of type {found.get('type')}"
        return yours(
            what, f"the kubelet reads {_PULL_TYPES[0]} alone.", "make it with `create secret docker-registry`."
        )
    return ok(f"image pull secret {name} is of type {found['type']}")


def keys(kind: str, wanted: Keys, found: Obj | None) -> Finding:
    """A Secret or ConfigMap, and the keys that pods take of it."""
    if found is None:
        return yours(f"{kind} {wanted.name} does not exist", _WAITS, f"make it, or take it out of {kind.lower()}s.")
    has = {**(found.get("data") or {}), **(found.get("binaryData") or {})}.keys()
    if missing := [key for key in wanted.keys if key not in has]:
        return yours(
            f"{kind} {wanted.name} has no key {', '.join(missing)}", _WAITS, f"it has {', '.join(sorted(has))}."
        )
    return ok(f"{kind} {wanted.name} exists" + (f", with {', '.join(wanted.keys)}" if wanted.keys else ""))


def service_account(name: str, found: Obj | None) -> Finding:
    """The account that the pods run under."""
    if found is None:
        return yours(f"service account {name} does not exist", "pods that name it are refused.", "make it.")
    return ok(f"service account {name} exists")
