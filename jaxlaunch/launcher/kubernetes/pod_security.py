"""The Pod Security level that the pods of a job meet, by what `render` and the cluster defaults can make.

Rules that only fields of `pod:` can break (AppArmor, SELinux, sysctls, procMount, hosts of probes) are left to the API
server: `launcher doctor` has it judge a pod. The reasons have the server's names, so that both read the same. Pure.

Source: the Pod Security Standards of Kubernetes 1.35 for Linux pods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

Level = Literal["privileged", "baseline", "restricted"]
LEVELS: tuple[Level, ...] = ("privileged", "baseline", "restricted")  # the strictest last
ENFORCE = "pod-security.kubernetes.io/enforce"  # label of a namespace

_BASELINE_CAPABILITIES = frozenset(
    "AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE SETFCAP SETGID SETPCAP SETUID "
    "SYS_CHROOT".split()
)
_RESTRICTED_CAPABILITIES = frozenset(["NET_BIND_SERVICE"])
_RESTRICTED_VOLUMES = frozenset(
    "configMap csi downwardAPI emptyDir ephemeral image persistentVolumeClaim projected secret".split()
)
_SECCOMP_PROFILES = ("RuntimeDefault", "Localhost")

Part = Mapping[str, Any]  # of a manifest


@dataclasses.dataclass(frozen=True)
class Violation:
    """A rule that the pod violates: the server's name for it, and where."""

    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})"


def level(template: Part) -> Level:
    """Return the strictest level that admits pods of this template."""
    return next(level for level in reversed(LEVELS) if not violations(template, level))


def admits(enforced: Level, met: Level) -> bool:
    """Return whether a namespace that enforces one level admits pods that meet another."""
    return LEVELS.index(met) >= LEVELS.index(enforced)


def stricter(than: Level) -> Level | None:
    """Return the next level, None after the strictest."""
    return next(iter(LEVELS[LEVELS.index(than) + 1 :]), None)


def violations(template: Part, enforced: Level) -> list[Violation]:
    """Return why a namespace that enforces this level would refuse pods of the template."""
    details: dict[str, list[str]] = {}
    if enforced != "privileged":
        for reason, detail in _violations(template, is_restricted=enforced == "restricted"):
            details.setdefault(reason, []).append(detail)
    return [Violation(reason, "; ".join(dict.fromkeys(wheres))) for reason, wheres in details.items()]


def _violations(template: Part, *, is_restricted: bool) -> Iterator[tuple[str, str]]:
    """Yield a reason and a place for everything that the level forbids."""
    spec = template.get("spec") or {}
    containers = [container for key in ("initContainers", "containers") for container in spec.get(key) or []]
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(key):
            yield "host namespaces", f"{key}=true"
    yield from _forbidden_volumes(spec, is_restricted)
    pod = spec.get("securityContext") or {}
    for container in containers:
        name, security = f'container "{container.get("name", "")}"', container.get("securityContext") or {}
        # Under hostNetwork the server makes every port one of the host's.
        port_key = "containerPort" if spec.get("hostNetwork") else "hostPort"
        if ports := [str(port[port_key]) for port in container.get("ports") or [] if port.get(port_key)]:
            yield "hostPort", f"{name} uses {', '.join(ports)}"
        if security.get("privileged"):
            yield "privileged", f"{name} is privileged"
        yield from _forbidden_capabilities(name, security.get("capabilities") or {}, is_restricted)
        if is_restricted and security.get("allowPrivilegeEscalation") is not False:
            yield "allowPrivilegeEscalation != false", f"{name} must set allowPrivilegeEscalation=false"
    if is_restricted and spec.get("hostUsers") is not False:  # root of a user namespace is no user of the node
        yield from _root_users(pod, containers)
    yield from _seccomp(pod, containers, is_restricted)


def _forbidden_volumes(spec: Part, is_restricted: bool) -> Iterator[tuple[str, str]]:
    for volume in spec.get("volumes") or []:
        types = {key for key in volume if key != "name"}  # without one it is an emptyDir
        if is_restricted and types and not types & _RESTRICTED_VOLUMES:
            yield "restricted volume types", f'volume "{volume.get("name")}" is of type {", ".join(sorted(types))}'
        elif not is_restricted and "hostPath" in types:
            yield "hostPath volumes", f'volume "{volume.get("name")}"'


def _forbidden_capabilities(name: str, capabilities: Part, is_restricted: bool) -> Iterator[tuple[str, str]]:
    reason = "unrestricted capabilities" if is_restricted else "non-default capabilities"
    if is_restricted and "ALL" not in (capabilities.get("drop") or []):
        yield reason, f"{name} must drop ALL capabilities"
    allowed = _RESTRICTED_CAPABILITIES if is_restricted else _BASELINE_CAPABILITIES
    if beyond := sorted(set(capabilities.get("add") or []) - allowed):
        yield reason, f"{name} adds {', '.join(beyond)}"


def _root_users(pod: Part, containers: Collection[Part]) -> Iterator[tuple[str, str]]:
    """Yield where root may run. The pod's runAsNonRoot is for the containers that have none."""
    if pod.get("runAsNonRoot") is False:
        yield "runAsNonRoot != true", "pod has runAsNonRoot=false"
    if pod.get("runAsUser") == 0:
        yield "runAsUser=0", "pod has runAsUser=0"
    for container in containers:
        name, security = f'container "{container.get("name", "")}"', container.get("securityContext") or {}
        if security.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
            yield "runAsNonRoot != true", f"{name} must set runAsNonRoot=true"
        if security.get("runAsUser") == 0:
            yield "runAsUser=0", f"{name} has runAsUser=0"


def _seccomp(pod: Part, containers: Collection[Part], is_restricted: bool) -> Iterator[tuple[str, str]]:
    pod_profile = (pod.get("seccompProfile") or {}).get("type")
    if pod_profile not in (None, *_SECCOMP_PROFILES):
        yield "seccompProfile", f"pod has seccompProfile {pod_profile}"
    for container in containers:
        profile = ((container.get("securityContext") or {}).get("seccompProfile") or {}).get("type", pod_profile)
        if profile not in (None, *_SECCOMP_PROFILES) or (is_restricted and profile is None):
            yield "seccompProfile", f'container "{container.get("name", "")}" must have seccompProfile RuntimeDefault'
