"""The section of docs/troubleshooting.md about a situation of `explain`, an exit code or a check of `doctor`. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from jaxlaunch import contract

PAGE = "docs/troubleshooting.md"

_SITUATIONS: Mapping[str, tuple[str, ...]] = {
    "pending-pods": (
        "resource",
        "taint",
        "node-selector",
        "no-nodes",
        "ports",
        "gated",
        "unschedulable",
    ),
    "images": ("image",),
    "container-start": ("runs-as-root", "command", "container", "agent", "init", "sandbox"),
    "volumes-secrets-and-configmaps": (
        "volume-missing",
        "claim-missing",
        "claim-unbound",
        "claim-in-use",
        "volume-affinity",
        "secret-missing",
        "configmap-missing",
        "mount",
    ),
    "restarts-and-evictions": (
        "ephemeral-storage",
        "deadline",
        "disrupted",
        "node-lost",
        "unhealthy",
        "crash-loop",
    ),
    "rejected-requests": (
        "unattended",
        "resource-quota",
        "limit-range",
        "namespace-terminating",
        "pod-security",
        "admission",
        "webhook-down",
        "service-account",
        "priority",
        "runtime-class",
        "exclusive-placement",
        "refused",
    ),
    "queues": (
        "given-up",
        "queue-silent",
        "queue-missing",
        "queue-stopped",
        "quota",
        "quota-never",
        "quota-uncovered",
        "admission-check",
        "preempted",
    ),
    "deletion": ("stuck",),
    "access-to-the-cluster": ("unknown", "unread"),
    "exit-codes": ("failed",),
    "out-of-memory": ("killed", "oom"),
    "rendezvous-and-lost-hosts": ("rendezvous",),
    "hangs-and-timeouts": ("hang",),
}
_CODES: Mapping[int, str] = {
    contract.NOT_FINITE: "data-and-loss",
    contract.BAD_DATA: "data-and-loss",
    contract.NO_CHECKPOINT: "checkpoints-and-storage",
    contract.STORAGE: "checkpoints-and-storage",
    contract.LOST: "rendezvous-and-lost-hosts",
    contract.HANG: "hangs-and-timeouts",
    contract.KILLED: "out-of-memory",
}
_CHECKS: Mapping[str, str] = {
    "server": "access-to-the-cluster",
    "rights": "access-to-the-cluster",
    "jobset": "rejected-requests",
    "webhooks": "rejected-requests",
    "namespace": "rejected-requests",
    "quota": "rejected-requests",
    "priority": "rejected-requests",
    "dry run": "rejected-requests",
    "service account": "rejected-requests",
    "kueue": "queues",
    "queue": "queues",
    "dns": "rendezvous-and-lost-hosts",
    "network": "rendezvous-and-lost-hosts",
    "nodes": "pending-pods",
    "volumes": "volumes-secrets-and-configmaps",
    "secrets": "volumes-secrets-and-configmaps",
    "configmaps": "volumes-secrets-and-configmaps",
}
_OF_SITUATION = {situation: section for section, situations in _SITUATIONS.items() for situation in situations}


def of_situation(situation: str, code: int | None = None) -> str | None:
    """The link for a situation of `explain`; None where nothing is wrong. A failed job's exit code says more."""
    if situation == "failed" and code is not None:
        return of_code(code)
    section = _OF_SITUATION.get(situation)
    return None if section is None else f"{PAGE}#{section}"


def of_code(code: int) -> str | None:
    """The link for the exit code of a job; None where it is done or was stopped, which nobody needs to fix."""
    return None if code in (contract.DONE, contract.PREEMPTED) else f"{PAGE}#{_CODES.get(code, 'exit-codes')}"


def of_check(check: str) -> str | None:
    """The link for a check of `doctor` that fails; None where the page has nothing on it."""
    section = _CHECKS.get(check)
    return None if section is None else f"{PAGE}#{section}"
