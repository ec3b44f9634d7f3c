"""Rules by which the API server rejects pods: templates and Pod Security levels. Pure.

Only common rules are here, since `launcher doctor` has the server check a pod and `launcher
explain` reports what it rejected. The reasons are worded as in the server's messages.
Source: ValidatePodTemplateSpec and the Pod Security Standards of Kubernetes 1.35, for Linux pods.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any, Literal

from jaxlaunch.launcher.errors import Fault, KeyPath
from jaxlaunch.launcher.kubernetes.resources import parse_quantity
from jaxlaunch.launcher.wording import shorten_text

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NAME_RULE = "a name of at most 63 lower-case letters, digits and inner dashes"

# The key of the job file for each list of containers in a template.
_CONTAINERS: Mapping[str, KeyPath] = {
    "initContainers": ("init",),
    "containers": ("pod", "spec", "containers"),
}


def find_template_faults(template: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield invalid names, missing images and volumes, and requests above their limits.

    JobSet accepts any template. The server then rejects the Job again and again, and the JobSet
    waits forever.
    """
    spec = template["spec"]
    volumes = [str(volume.get("name")) for volume in _list_mappings(spec, "volumes")]
    for name in volumes:
        if not _NAME.fullmatch(name):
            message = f"volume {shorten_text(name)}: its name is not {_NAME_RULE}."
            yield Fault(("pod", "spec", "volumes"), message, "choose another name.")
    for key, path in _CONTAINERS.items():
        for container in _list_mappings(spec, key):
            subject = f"container {shorten_text(str(container.get('name')))}"
            for message, hint in _container_faults(container, volumes):
                yield Fault(path, f"{subject}: {message}", hint)


def _list_mappings(parent: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the mappings in the list `key`. The server's schema rejects other items."""
    items = parent.get(key)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _container_faults(
    container: Mapping[str, Any], volumes: Collection[str]
) -> Iterator[tuple[str, str]]:
    if not _NAME.fullmatch(str(container.get("name"))):
        yield f"its name is not {_NAME_RULE}.", "choose another name."
    if not container.get("image"):
        yield "it has no image.", "image: registry.example/tool:1"
    for mount in _list_mappings(container, "volumeMounts"):
        if (name := str(mount.get("name"))) not in volumes:
            hint = f"its volumes are {', '.join(sorted(volumes))}."
            yield f"it mounts {shorten_text(name)}, and no volume has that name.", hint
    resources: Any = container.get("resources")
    if not isinstance(resources, dict):
        return
    requests: Any = resources.get("requests")
    limits: Any = resources.get("limits")
    request_quantities, limit_quantities = _valid_quantities(requests), _valid_quantities(limits)
    for name in request_quantities.keys() & limit_quantities.keys():
        if request_quantities[name] > limit_quantities[name]:
            message = f"it requests {requests[name]} of {name}, and its limit is {limits[name]}."
            yield message, "raise the limit."


def _valid_quantities(texts: Any) -> dict[str, Decimal]:
    quantities = {}
    for name, text in texts.items() if isinstance(texts, dict) else ():
        with suppress(ValueError):
            quantities[str(name)] = parse_quantity(str(text))
    return quantities


# --- Pod Security of pods that `render` and the cluster defaults can produce ----------------------
#
# Rules that only fields of `pod:` can break (AppArmor, SELinux, sysctls, procMount, hosts of
# probes) are left to the API server.

Level = Literal["privileged", "baseline", "restricted"]
# The strictest level is last.
LEVELS: tuple[Level, ...] = ("privileged", "baseline", "restricted")
# Label of a namespace.
ENFORCE_LABEL = "pod-security.kubernetes.io/enforce"

# A list would take a line for each name.
_BASELINE_CAPABILITIES = frozenset(
    "AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE SETFCAP SETGID "  # noqa: SIM905
    "SETPCAP SETUID SYS_CHROOT".split()
)
_RESTRICTED_CAPABILITIES = {"NET_BIND_SERVICE"}
_RESTRICTED_VOLUMES = frozenset(
    "configMap csi downwardAPI emptyDir ephemeral image persistentVolumeClaim "  # noqa: SIM905
    "projected secret".split()
)
_SECCOMP_PROFILES = ("RuntimeDefault", "Localhost")

# Part of a manifest.
Part = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Violation:
    """A violated rule: its name in the server's messages, and the place in the pod."""

    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})"


def strictest_level(template: Part) -> Level:
    """Return the strictest level that admits pods of this template."""
    return next(level for level in reversed(LEVELS) if not find_violations(template, level))


def is_admitted(enforced_level: Level, pod_level: Level) -> bool:
    """Return whether a namespace that enforces a level admits pods of another level."""
    return LEVELS.index(pod_level) >= LEVELS.index(enforced_level)


def stricter_level(level: Level) -> Level | None:
    """Return the next stricter level, or None after the strictest."""
    return next(iter(LEVELS[LEVELS.index(level) + 1 :]), None)


def find_violations(template: Part, level: Level) -> list[Violation]:
    """Return the rules of a level that pods of the template violate."""
    details: dict[str, list[str]] = {}
    if level != "privileged":
        for reason, detail in _iter_violations(template, is_restricted=level == "restricted"):
            details.setdefault(reason, []).append(detail)
    return [
        Violation(reason, "; ".join(dict.fromkeys(places))) for reason, places in details.items()
    ]


def _iter_violations(template: Part, *, is_restricted: bool) -> Iterator[tuple[str, str]]:
    """Yield the reason and the place of each violation of the level."""
    spec = template.get("spec") or {}
    containers = [
        container for key in ("initContainers", "containers") for container in spec.get(key) or []
    ]
    namespaces = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    yield from (("host namespaces", f"{key}=true") for key in namespaces)
    for volume in spec.get("volumes") or []:
        # A volume without a type is an emptyDir.
        types, place = volume.keys() - {"name"}, f'volume "{volume.get("name")}"'
        if is_restricted and types and not types & _RESTRICTED_VOLUMES:
            yield "restricted volume types", f"{place} is of type {', '.join(sorted(types))}"
        elif not is_restricted and "hostPath" in types:
            yield "hostPath volumes", place
    # With hostNetwork the server turns every port into a host port.
    port_key = "containerPort" if spec.get("hostNetwork") else "hostPort"
    for container in containers:
        yield from _iter_container_violations(container, port_key, is_restricted)
    pod_security = spec.get("securityContext") or {}
    # Root in a user namespace is not root on the node.
    if is_restricted and spec.get("hostUsers") is not False:
        yield from _iter_root_users(pod_security, containers)
    pod_profile = (pod_security.get("seccompProfile") or {}).get("type")
    if pod_profile not in (None, *_SECCOMP_PROFILES):
        yield "seccompProfile", f"pod has seccompProfile {pod_profile}"
    for name, security in map(_name_and_security, containers):
        profile = (security.get("seccompProfile") or {}).get("type", pod_profile)
        if profile not in (None, *_SECCOMP_PROFILES) or (is_restricted and profile is None):
            yield "seccompProfile", f"{name} must have seccompProfile RuntimeDefault"


def _iter_container_violations(
    container: Part, port_key: str, is_restricted: bool
) -> Iterator[tuple[str, str]]:
    name, security = _name_and_security(container)
    ports = [str(port[port_key]) for port in container.get("ports") or [] if port.get(port_key)]
    if ports:
        yield "hostPort", f"{name} uses {', '.join(ports)}"
    if security.get("privileged"):
        yield "privileged", f"{name} is privileged"
    capabilities = security.get("capabilities") or {}
    reason = "unrestricted capabilities" if is_restricted else "non-default capabilities"
    if is_restricted and "ALL" not in (capabilities.get("drop") or []):
        yield reason, f"{name} must drop ALL capabilities"
    allowed_names = _RESTRICTED_CAPABILITIES if is_restricted else _BASELINE_CAPABILITIES
    if forbidden_names := sorted(set(capabilities.get("add") or []) - allowed_names):
        yield reason, f"{name} adds {', '.join(forbidden_names)}"
    if is_restricted and security.get("allowPrivilegeEscalation") is not False:
        place = f"{name} must set allowPrivilegeEscalation=false"
        yield "allowPrivilegeEscalation != false", place


def _name_and_security(container: Part) -> tuple[str, Part]:
    return f'container "{container.get("name", "")}"', container.get("securityContext") or {}


def _iter_root_users(pod_security: Part, containers: Collection[Part]) -> Iterator[tuple[str, str]]:
    """Yield the places where root may run. The pod's settings are the containers' defaults."""
    if pod_security.get("runAsNonRoot") is False:
        yield "runAsNonRoot != true", "pod has runAsNonRoot=false"
    if pod_security.get("runAsUser") == 0:
        yield "runAsUser=0", "pod has runAsUser=0"
    for name, security in map(_name_and_security, containers):
        if security.get("runAsNonRoot", pod_security.get("runAsNonRoot")) is not True:
            yield "runAsNonRoot != true", f"{name} must set runAsNonRoot=true"
        if security.get("runAsUser") == 0:
            yield "runAsUser=0", f"{name} has runAsUser=0"
