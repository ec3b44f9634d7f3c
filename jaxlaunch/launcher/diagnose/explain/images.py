"""Images that cannot be pulled. A Job never fails because of that: it would wait for ever. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection

from jaxlaunch.launcher.diagnose.explain.answer import Answer, one_line, quoted, which
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot

_WAITING = (
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
    "RegistryUnavailable",
)

_SECRETS = re.compile(r"image pull secrets \(([^)]+)\)")

# A message of a registry or the container runtime -> what it means, and what to do. The first match counts.
_MEANINGS = (
    (
        re.compile(r"unauthorized|authentication required|denied|forbidden|\b40[13]\b", re.I),
        "the registry requires credentials, or the image does not exist",
        "check the name, and image_pull_secrets: in job.yaml.",
    ),
    (
        re.compile(r"no match for platform|exec format", re.I),
        "the image is not built for the node's CPU architecture",
        "build it for that architecture.",
    ),
    (
        re.compile(r"not found|manifest unknown|does not exist|no such image|\b404\b", re.I),
        "the image does not exist",
        "check its name and tag, and that it was pushed.",
    ),
    (
        re.compile(r"toomanyrequests|rate limit|\b429\b", re.I),
        "the registry's rate limit is reached",
        "wait, or mirror the image.",
    ),
    (
        re.compile(r"x509|certificate", re.I),
        "the node does not trust the registry's certificate",
        "ask the cluster administrator to install the certificate on the nodes.",
    ),
    (
        re.compile(r"no such host|dial tcp|i/o timeout|connection refused|deadline exceeded|EOF", re.I),
        "the node cannot reach the registry",
        "check the registry's name and the nodes' network.",
    ),
    (
        re.compile(r"no space left", re.I),
        "the node's disk is full",
        "use a smaller image, or ask the cluster administrator to free disk space.",
    ),
)


def not_pulled(snapshot: Snapshot) -> Answer | None:
    """Some containers wait for an image that cannot be pulled."""
    waiting = [host for host in snapshot.hosts if host.waiting.get("reason") in _WAITING and not host.is_leaving]
    if not waiting:
        return None
    host = waiting[0]
    reason, message = host.waiting["reason"], host.waiting.get("message", "")
    event = snapshot.event("Failed", "ErrImageNeverPull", "InspectFailed", kind="Pod", of=waiting)
    why = message if reason != "ImagePullBackOff" or event is None else event["message"]
    meaning, move = _no_secret(snapshot, waiting) or _meaning(reason, f"{why} {message}")
    headline = f"waits: {which(waiting, snapshot.expected_hosts)} cannot pull image {host.image}: {meaning}"
    evidence = (f"Pod {host.pod}: {reason}: {one_line(message)}", *quoted(event))
    return Answer("image", headline, evidence, move)


def _no_secret(snapshot: Snapshot, waiting: Collection[Host]) -> tuple[str, str] | None:
    """A Secret with the registry's credentials that the kubelet did not find: it asks without them."""
    event = snapshot.event("FailedToRetrieveImagePullSecret", kind="Pod", of=waiting)
    match = None if event is None else _SECRETS.search(event["message"])
    if match is None:
        return None
    move = (
        f"create it in the job's namespace: kubectl create secret docker-registry {match[1]} --docker-server=REGISTRY …"
    )
    return f"Secret {match[1]} of image_pull_secrets does not exist", move


def _meaning(reason: str, text: str) -> tuple[str, str]:
    if reason == "InvalidImageName":
        return "that is not a valid image name", "write it as REGISTRY/NAME:TAG in job.yaml."
    if reason == "ErrImageNeverPull":
        return (
            "the node does not have it, and imagePullPolicy is Never",
            "load it onto the node, or set another policy.",
        )
    found = ((meaning, move) for pattern, meaning, move in _MEANINGS if pattern.search(text))
    return next(found, (one_line(text) or reason, "see the registry's message."))
