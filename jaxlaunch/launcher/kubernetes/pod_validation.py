"""The commonest mistakes for which the API server would refuse a pod template, found before it is submitted. Pure.

JobSet accepts any template: the server then refuses the Job that is made of it, again and again, while the JobSet waits
for ever. `launcher doctor` has the server judge a pod, and `launcher explain` says what it refused: the rest is theirs.
Source: ValidatePodTemplateSpec of Kubernetes 1.35.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

from jaxlaunch.launcher.errors import Fault, KeyPath
from jaxlaunch.launcher.kubernetes.quantity import amount
from jaxlaunch.launcher.wording import cut

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_A_NAME = "a name of at most 63 lower-case letters, digits and inner dashes"

# List of containers in a template -> the key of the job that it comes from.
_CONTAINERS: Mapping[str, KeyPath] = {"initContainers": ("init",), "containers": ("pod", "spec", "containers")}


def faults(template: Mapping[str, Any]) -> Iterator[Fault]:
    """Names that are none, containers without an image, mounts of no volume, and requests above their limits."""
    spec = template["spec"]
    volumes = [str(volume.get("name")) for volume in _listed(spec, "volumes")]
    for name in volumes:
        if not _NAME.fullmatch(name):
            message = f"volume {cut(name)}: its name is not {_A_NAME}."
            yield Fault(("pod", "spec", "volumes"), message, "choose another name.")
    for key, path in _CONTAINERS.items():
        for container in _listed(spec, key):
            for message, hint in _container(container, volumes):
                yield Fault(path, f"container {cut(str(container.get('name')))}: {message}", hint)


def _listed(holder: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The mappings in a list; anything else the schema refuses."""
    found = holder.get(key)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _container(container: Mapping[str, Any], volumes: Collection[str]) -> Iterator[tuple[str, str]]:
    if not _NAME.fullmatch(str(container.get("name"))):
        yield f"its name is not {_A_NAME}.", "choose another name."
    if not container.get("image"):
        yield "it has no image.", "image: registry.example/tool:1"
    for mount in _listed(container, "volumeMounts"):
        if (name := str(mount.get("name"))) not in volumes:
            yield (
                f"it mounts {cut(name)}, and no volume has that name.",
                f"its volumes are {', '.join(sorted(volumes))}.",
            )
    given: Any = container.get("resources")
    if not isinstance(given, dict):
        return
    requests, limits = _amounts(given.get("requests")), _amounts(given.get("limits"))
    for name in requests.keys() & limits.keys():
        if requests[name] > limits[name]:
            both = f"{given['requests'][name]} of {name}, and its limit is {given['limits'][name]}"
            yield f"it requests {both}.", "raise the limit."


def _amounts(given: Any) -> dict[str, Decimal]:
    """The valid quantities; the others the schema refuses."""
    found = {}
    for name, text in given.items() if isinstance(given, dict) else ():
        with suppress(ValueError):
            found[str(name)] = amount(str(text))
    return found
