"""Images that do not come. A Job never fails of that: it would wait for ever. Pure."""

from __future__ import annotations

import re

from launcher.causes.answer import Answer, quoted, shown, which
from launcher.seen import World

_WAITING = (
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
    "RegistryUnavailable",
)

# What a registry or the runtime says -> what that means, and what to do. The first that is found counts.
_MEANINGS = (
    (
        re.compile(r"unauthorized|authentication required|denied|forbidden|\b40[13]\b", re.I),
        "the registry wants credentials, or it does not exist",
        "check the name, and image_pull_secrets: in job.yaml.",
    ),
    (
        re.compile(r"not found|manifest unknown|does not exist|no such image|\b404\b", re.I),
        "it does not exist",
        "check its name and tag, and that it was pushed.",
    ),
    (
        re.compile(r"toomanyrequests|rate limit|\b429\b", re.I),
        "the registry limits how often",
        "wait, or mirror the image.",
    ),
    (
        re.compile(r"x509|certificate", re.I),
        "the node does not trust the registry",
        "have its certificate installed on nodes.",
    ),
    (
        re.compile(r"no such host|dial tcp|i/o timeout|connection refused|deadline exceeded|EOF", re.I),
        "the registry cannot be reached from the node",
        "check the registry's name and the nodes' network.",
    ),
    (
        re.compile(r"no match for platform|exec format", re.I),
        "it is not built for the node's processor",
        "build it for that.",
    ),
    (
        re.compile(r"no space left", re.I),
        "the node's disk is full",
        "use smaller images, or have the node's disk cleaned.",
    ),
)


def not_pulled(world: World) -> Answer | None:
    """Some containers wait for an image that cannot be had."""
    waiting = [host for host in world.hosts if host.waiting.get("reason") in _WAITING and not host.is_leaving]
    if not waiting:
        return None
    host = waiting[0]
    reason, message = host.waiting["reason"], host.waiting.get("message", "")
    event = world.said("Failed", "ErrImageNeverPull", "InspectFailed", kind="Pod")
    said = message if reason != "ImagePullBackOff" or event is None else event["message"]
    meaning, move = _meaning(reason, f"{said} {message}")
    headline = f"waits: {which(waiting, world.wanted)} cannot get image {host.image}: {meaning}"
    evidence = (f"Pod {host.pod}: {reason}: {shown(message)}", *quoted(event))
    return Answer("image", headline, evidence, move)


def _meaning(reason: str, said: str) -> tuple[str, str]:
    if reason == "InvalidImageName":
        return "that is no image's name", "write it as REGISTRY/NAME:TAG in job.yaml."
    if reason == "ErrImageNeverPull":
        return "the node does not have it, and may not pull it", "load it into the node, or allow it to be pulled."
    found = ((meaning, move) for pattern, meaning, move in _MEANINGS if pattern.search(said))
    return next(found, (shown(said) or reason, "see what the registry says."))
