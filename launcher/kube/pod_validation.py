"""What the API server would refuse of a rendered pod template, found before it is submitted. Pure.

JobSet accepts any template: the server then refuses the Job that is made of it, again and again, while the JobSet waits
for ever. Typos (a key that does not exist, a value of another type) are not checked here: they are refused at once.
Source: ValidatePodTemplateSpec of Kubernetes 1.35.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import ROUND_CEILING, Decimal
from typing import Any

from jaxlaunch.launcher.errors import Fault, KeyPath
from jaxlaunch.launcher.kube.quantity import amount
from jaxlaunch.launcher.wording import cut

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_A_NAME = "a name of at most 63 lower-case letters, digits and inner dashes"
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_MOST_PORT = 65535

# List of containers in a template -> the key of the job that it comes from.
_CONTAINERS: Mapping[str, KeyPath] = {"initContainers": ("init",), "containers": ("pod", "spec", "containers")}


def faults(template: Mapping[str, Any]) -> Iterator[Fault]:
    """Everything for which the server would refuse the Job of this template."""
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
    """The mappings in a list; anything else the schema refuses."""
    found = holder.get(key)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _volume(volume: Mapping[str, Any]) -> Iterator[Fault]:
    path, name = ("pod", "spec", "volumes"), str(volume.get("name"))
    kinds = sorted(key for key, value in volume.items() if key != "name" and value is not None)
    if not _NAME.fullmatch(name):
        yield Fault(path, f"volume {cut(name)}: its name is not {_A_NAME}.", "choose another name.")
    if len(kinds) > 1:
        message = f"volume {cut(name)} is of more than one kind: {' and '.join(kinds)}."
        yield Fault(path, message, "choose another name: the launcher adds a volume of this name.")


def _node_selector(selector: Any) -> Iterator[Fault]:
    for key, value in selector.items() if isinstance(selector, dict) else ():
        if isinstance(value, str) and not _LABEL_VALUE.fullmatch(value):
            message = f"nodeSelector {cut(str(key))} = {cut(value)} is not a valid label value."
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
            yield f"env has the variable name {cut(name)!r}, which is not valid.", "name: A"
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
            yield (
                f"it mounts {cut(str(name))}, and no volume has that name.",
                f"its volumes are {', '.join(sorted(volumes))}.",
            )
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
            whole = asked.to_integral_value(ROUND_CEILING)
            yield f"it requests {asked:f} of {name}, which must be a whole number.", f"use {whole:f}."
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
