"""Which Pod Security level a pod template meets, and what keeps it from a stricter one. Pure.

Source: the Pod Security Standards of Kubernetes 1.35 for Linux pods, and their reference implementation,
k8s.io/pod-security-admission, whose names for reasons are used, so that `launcher plan` and a refusal read the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

Level = Literal["privileged", "baseline", "restricted"]
LEVELS: tuple[Level, ...] = ("privileged", "baseline", "restricted")  # the strictest last
ENFORCE = "pod-security.kubernetes.io/enforce"  # the namespace's label

_ADDED_IN_BASELINE = frozenset(
    "AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE SETFCAP SETGID SETPCAP SETUID "
    "SYS_CHROOT".split()
)
_ADDED_IN_RESTRICTED = frozenset(["NET_BIND_SERVICE"])
_SELINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_SYSCTLS = frozenset(
    ["kernel.shm_rmid_forced"]
    + [
        f"net.ipv4.{name}"
        for name in "ip_local_port_range tcp_syncookies ping_group_range ip_unprivileged_port_start "
        "ip_local_reserved_ports tcp_keepalive_time tcp_fin_timeout tcp_keepalive_intvl tcp_keepalive_probes "
        "tcp_rmem tcp_wmem".split()
    ]
)
_VOLUMES = (
    "configMap csi downwardAPI emptyDir ephemeral image persistentVolumeClaim projected secret".split()
)  # in restricted
_PROFILES = ("RuntimeDefault", "Localhost")
_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"

Part = Mapping[str, Any]  # of a manifest
Holder = tuple[str, Part]  # what has a securityContext: `pod`, or `container "main"`; and that


@dataclasses.dataclass(frozen=True)
class Violation:
    """A rule that the pod violates: the server's name for it, and where."""

    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})"


@dataclasses.dataclass(frozen=True)
class _Rule:
    level: Level  # the first that has it
    reason: str
    details: Callable[[Part], Iterable[str]]
    instead_of: str = ""  # the weaker rule of baseline


def level(template: Part) -> Level:
    """The strictest level that admits pods of this template."""
    return next(each for each in reversed(LEVELS) if not violations(template, each))


def admits(enforced: Level, met: Level) -> bool:
    """Whether a namespace that enforces one level admits pods that meet another."""
    return LEVELS.index(met) >= LEVELS.index(enforced)


def stricter(than: Level) -> Level | None:
    """The next level; None after the strictest."""
    return next(iter(LEVELS[LEVELS.index(than) + 1 :]), None)


def violations(template: Part, enforced: Level) -> list[Violation]:
    """Why a namespace that enforces this level would refuse pods of the template."""
    rules = [rule for rule in _RULES if LEVELS.index(rule.level) <= LEVELS.index(enforced)]
    replaced = {rule.instead_of for rule in rules}
    found = []
    for rule in rules:
        if rule.reason not in replaced or rule.instead_of:
            if details := list(dict.fromkeys(rule.details(template))):
                found.append(Violation(rule.reason, "; ".join(details)))
    return found


# --- what the rules read ----------------------------------------------------------------------------------------------


def _spec(template: Part) -> Part:
    return template.get("spec") or {}


def _containers(template: Part) -> list[Part]:
    lists = ("initContainers", "containers", "ephemeralContainers")
    return [container for key in lists for container in _spec(template).get(key) or []]


def _name(container: Part) -> str:
    return f'container "{container.get("name", "")}"'


def _security(part: Part) -> Part:
    return part.get("securityContext") or {}


def _contexts(template: Part) -> Iterator[Holder]:
    """Every securityContext: the pod's, then each container's."""
    yield "pod", _security(_spec(template))
    for container in _containers(template):
        yield _name(container), _security(container)


def _container_contexts(template: Part) -> Iterator[Holder]:
    return ((who, security) for who, security in _contexts(template) if who != "pod")


def _has_user_namespace(template: Part) -> bool:
    """Root in such a pod is no user of the node; two rules of restricted admit it since Kubernetes 1.35."""
    return _spec(template).get("hostUsers") is False


# --- baseline ---------------------------------------------------------------------------------------------------------


def _host_namespaces(template: Part) -> Iterator[str]:
    return (f"{key}=true" for key in ("hostNetwork", "hostPID", "hostIPC") if _spec(template).get(key))


def _privileged(template: Part) -> Iterator[str]:
    return (f"{who} is privileged" for who, security in _container_contexts(template) if security.get("privileged"))


def _added(template: Part, allowed: Iterable[str]) -> Iterator[str]:
    for who, security in _container_contexts(template):
        capabilities = security.get("capabilities") or {}
        if beyond := sorted(set(capabilities.get("add") or []) - set(allowed)):
            yield f"{who} adds {', '.join(beyond)}"


def _default_capabilities(template: Part) -> Iterator[str]:
    return _added(template, _ADDED_IN_BASELINE)


def _host_paths(template: Part) -> Iterator[str]:
    return (f'volume "{each.get("name")}"' for each in _spec(template).get("volumes") or [] if "hostPath" in each)


def _host_ports(template: Part) -> Iterator[str]:
    """Under hostNetwork the server makes every port one of the host's."""
    key = "containerPort" if _spec(template).get("hostNetwork") else "hostPort"
    for container in _containers(template):
        if ports := [str(port[key]) for port in container.get("ports") or [] if port.get(key)]:
            yield f"{_name(container)} uses {', '.join(ports)}"


def _hosts_of_probes(template: Part) -> Iterator[str]:
    for container in _containers(template):
        lifecycle = container.get("lifecycle") or {}
        handlers = [container.get(key) for key in ("livenessProbe", "readinessProbe", "startupProbe")]
        handlers += [lifecycle.get(key) for key in ("postStart", "preStop")]
        for handler in handlers:
            for action in ("httpGet", "tcpSocket"):
                if host := ((handler or {}).get(action) or {}).get("host"):
                    yield f"{_name(container)} names the host {host}"


def _apparmor(template: Part) -> Iterator[str]:
    for who, security in _contexts(template):
        profile = (security.get("appArmorProfile") or {}).get("type")
        if profile not in (None, *_PROFILES):
            yield f"{who} has appArmorProfile {profile}"
    for key, value in ((template.get("metadata") or {}).get("annotations") or {}).items():
        if key.startswith(_APPARMOR) and not (value in ("", "runtime/default") or value.startswith("localhost/")):
            yield f"annotation {key}"


def _selinux(template: Part) -> Iterator[str]:
    for who, security in _contexts(template):
        options = security.get("seLinuxOptions") or {}
        if options.get("type", "") not in _SELINUX_TYPES or options.get("user") or options.get("role"):
            yield f"{who} has seLinuxOptions"


def _proc_mount(template: Part) -> Iterator[str]:
    for who, security in _container_contexts(template):
        if security.get("procMount", "Default") != "Default":
            yield f"{who} has procMount {security['procMount']}"


def _proc_mount_on_the_node(template: Part) -> Iterator[str]:
    return iter(()) if _has_user_namespace(template) else _proc_mount(template)


def _wrong_seccomp(template: Part) -> Iterator[str]:
    for who, security in _contexts(template):
        profile = (security.get("seccompProfile") or {}).get("type")
        if profile not in (None, *_PROFILES):
            yield f"{who} has seccompProfile {profile}"


def _sysctls(template: Part) -> Iterator[str]:
    listed = _security(_spec(template)).get("sysctls") or []
    return (one["name"] for one in listed if one["name"] not in _SYSCTLS)


# --- restricted -------------------------------------------------------------------------------------------------------


def _volume_types(template: Part) -> Iterator[str]:
    for volume in _spec(template).get("volumes") or []:
        types = [key for key in volume if key != "name"]
        if types and not set(types) & set(_VOLUMES):  # without one it is an emptyDir
            yield f'volume "{volume.get("name")}" is of type {", ".join(types)}'


def _escalation(template: Part) -> Iterator[str]:
    for who, security in _container_contexts(template):
        if security.get("allowPrivilegeEscalation") is not False:
            yield f"{who} must set allowPrivilegeEscalation=false"


def _capabilities(template: Part) -> Iterator[str]:
    for who, security in _container_contexts(template):
        if "ALL" not in ((security.get("capabilities") or {}).get("drop") or []):
            yield f"{who} must drop ALL capabilities"
    yield from _added(template, _ADDED_IN_RESTRICTED)


def _as_root(template: Part) -> Iterator[str]:
    """Containers that may run as root; the pod's setting is for those that have none."""
    if _has_user_namespace(template):
        return
    for_all = _security(_spec(template)).get("runAsNonRoot")
    if for_all is False:
        yield "pod has runAsNonRoot=false"
    for who, security in _container_contexts(template):
        own = security.get("runAsNonRoot")
        if own is False or (own is None and for_all is not True):
            yield f"{who} must set runAsNonRoot=true"


def _root_user(template: Part) -> Iterator[str]:
    if not _has_user_namespace(template):
        yield from (f"{who} has runAsUser=0" for who, security in _contexts(template) if security.get("runAsUser") == 0)


def _no_seccomp(template: Part) -> Iterator[str]:
    yield from _wrong_seccomp(template)
    for_all = (_security(_spec(template)).get("seccompProfile") or {}).get("type")
    for who, security in _container_contexts(template):
        if "seccompProfile" not in security and for_all not in _PROFILES:
            yield f"{who} must have seccompProfile RuntimeDefault"


_RULES = (
    _Rule("baseline", "host namespaces", _host_namespaces),
    _Rule("baseline", "privileged", _privileged),
    _Rule("baseline", "non-default capabilities", _default_capabilities),
    _Rule("baseline", "hostPath volumes", _host_paths),
    _Rule("baseline", "hostPort", _host_ports),
    _Rule("baseline", "probe or lifecycle host", _hosts_of_probes),
    _Rule("baseline", "forbidden AppArmor profile", _apparmor),
    _Rule("baseline", "seLinuxOptions", _selinux),
    _Rule("baseline", "procMount", _proc_mount_on_the_node),
    _Rule("baseline", "seccompProfile", _wrong_seccomp),
    _Rule("baseline", "forbidden sysctls", _sysctls),
    _Rule("restricted", "restricted volume types", _volume_types, instead_of="hostPath volumes"),
    _Rule("restricted", "allowPrivilegeEscalation != false", _escalation),
    _Rule("restricted", "unrestricted capabilities", _capabilities, instead_of="non-default capabilities"),
    _Rule("restricted", "procMount", _proc_mount, instead_of="procMount"),
    _Rule("restricted", "runAsNonRoot != true", _as_root),
    _Rule("restricted", "runAsUser=0", _root_user),
    _Rule("restricted", "seccompProfile", _no_seccomp, instead_of="seccompProfile"),
)
