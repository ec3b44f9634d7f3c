"""The section of docs/troubleshooting.md about an exit code or a check of `doctor`: the command that shows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from jaxlaunch import contract

PAGE = "docs/troubleshooting.md"
_SHOW = "launcher help troubleshooting"  # every installation has it

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


def section(name: str) -> str:
    """The command that shows a section of the page."""
    return f"{_SHOW}#{name}"


def of_code(code: int) -> str | None:
    """The link for the exit code of a job; None where it is done or was stopped, which nobody needs to fix."""
    return None if code in (contract.DONE, contract.PREEMPTED) else section(_CODES.get(code, "exit-codes"))


def of_check(check: str) -> str | None:
    """The link for a check of `doctor` that fails; None where the page has nothing on it."""
    name = _CHECKS.get(check)
    return None if name is None else section(name)
