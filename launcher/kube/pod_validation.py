"""What the API server refuses of a finished pod template, in our words. Pure.

JobSet takes a template as it is: the Job made of it is what the server refuses, over and over, while the JobSet waits
for ever. What only a typo can bring (a key that does not exist, a value of another type) the server refuses at once.
Source: ValidatePodTemplateSpec of Kubernetes 1.35.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

from launcher.errors import Fault, KeyPath
from launcher.quantity import amount
from launcher.wording import cut, either

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_A_NAME = "a name of at most 63 lower-case letters, digits and inner dashes"
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_MOST_PORT = 65535

# Where in a template which key of the job is answerable for a container.
_CONTAINERS: Mapping[str, KeyPath] = {"initContainers": ("init",), "containers": ("pod", "spec", "containers")}


def faults(template: Mapping[str, Any]) -> Iterator[Fault]:
    """Everything that keeps the Job of this template from being made."""
    spec = template["spec"]
    volumes = _listed(spec, "volumes")
    for volume in volumes:
        yield from _volume(volume)
    known = {volume.get("name") for volume in volumes}
    yield from _node_selector(spec.get("nodeSelector"))
    for key, path in _CONTAINERS.items():
        for container in _listed(spec, key):
            for message, hint in _container(container, known):
                yield Fault(path, f"container {cut(str(container.get('name')))}: {message}", hint)


def _listed(holder: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The blocks of a list; what is none of either is refused by its schema."""
    found = holder.get(key)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _volume(volume: Mapping[str, Any]) -> Iterator[Fault]:
    path, name = ("pod", "spec", "volumes"), str(volume.get("name"))
    kinds = sorted(key for key, value in volume.items() if key != "name" and value is not None)
    if not _NAME.fullmatch(name):
        yield Fault(path, f"volume {cut(name)}: its name is not {_A_NAME}.", "choose another name.")
    if len(kinds) > 1:
        message = f"volume {cut(name)} is of more than one kind: {' and '.join(kinds)}."
        yield Fault(path, message, "choose another name: a volume of ours has this one.")


def _node_selector(selector: Any) -> Iterator[Fault]:
    for key, value in selector.items() if isinstance(selector, dict) else ():
        if isinstance(value, str) and not _LABEL_VALUE.fullmatch(value):
            message = f"nodeSelector {cut(str(key))} = {cut(value)} is no label's value, and no node has it."
            yield Fault(
                ("pod", "spec", "nodeSelector"), message, "use at most 63 letters, digits and inner -, _ and dots."
            )


Complaint = tuple[str, str]


def _container(container: Mapping[str, Any], volumes: set[Any]) -> Iterator[Complaint]:
    if not _NAME.fullmatch(str(container.get("name"))):
        yield f"its name is not {_A_NAME}.", "choose another name."
    if not container.get("image"):
        yield "it has no image.", "image: registry.example/tool:1"
    for variable in _listed(container, "env"):
        if not (name := str(variable.get("name") or "")) or "=" in name:
            yield f"env has the variable {cut(name) or 'without a name'}, which no environment can hold.", "name: A"
    for port in _listed(container, "ports"):
        number = port.get("containerPort")
        if isinstance(number, int) and not 0 < number <= _MOST_PORT:
            yield f"port {number} is not between 1 and {_MOST_PORT}.", "choose another."
    yield from _mounts(container, volumes)
    yield from _resources(container)


def _mounts(container: Mapping[str, Any], volumes: set[Any]) -> Iterator[Complaint]:
    seen: set[str] = set()
    for mount in _listed(container, "volumeMounts"):
        name, path = mount.get("name"), mount.get("mountPath")
        if name not in volumes:
            yield f"it mounts {cut(str(name))}, which no volume is called.", f"there is {either(sorted(volumes))}."
        if not path:
            yield f"its mount of {cut(str(name))} has no mountPath.", "mountPath: /data"
        elif path in seen:
            yield f"two mounts have the mountPath {cut(str(path))}.", "mount each elsewhere."
        seen.add(str(path))


def _resources(container: Mapping[str, Any]) -> Iterator[Complaint]:
    given = container.get("resources")
    if not isinstance(given, dict):
        return
    requests, limits = _amounts(given.get("requests")), _amounts(given.get("limits"))
    for name, asked in {**requests, **limits}.items():
        if "/" in name and asked % 1:
            yield f"it asks for {asked:f} of {name}, which is given whole.", "use a whole number."
    for name in requests.keys() & limits.keys():
        if requests[name] > limits[name]:
            both = f"{given['requests'][name]} of {name}, and its limit is {given['limits'][name]}"
            yield f"it requests {both}.", "raise the limit."


def _amounts(given: Any) -> dict[str, Decimal]:
    """The quantities that are any; the others their schema refuses."""
    found = {}
    for name, text in given.items() if isinstance(given, dict) else ():
        with suppress(ValueError):
            found[str(name)] = amount(str(text))
    return found
