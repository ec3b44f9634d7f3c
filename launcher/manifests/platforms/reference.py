"""docs/platforms.md from the data: `python -m jaxlaunch.launcher.manifests.platforms.reference > docs/platforms.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from jaxlaunch.launcher.manifests.platforms import eks, generic, gke, runtime, table
from jaxlaunch.launcher.manifests.platforms.facts import Access, Fact, Instance, Nodes, Source

_Known = Nodes | Instance | Access | Fact[Any]

_INTRODUCTION = """\
# Platforms

What a rendered job asks of the nodes on each `platform`, and where each fact was read, from the data in
`launcher/manifests/platforms` (`python -m jaxlaunch.launcher.manifests.platforms.reference` prints this page). A
cluster whose nodes are labelled otherwise says so under `nodes` and `capacity` of its [defaults](kubernetes.md).

**Nothing on this page was tried on these clouds**: what is rendered is accepted by a real API server with the webhooks
of JobSet and Kueue, and that it runs there is *by the source*. Labels of several values are an affinity; a job of
several hosts must choose one value with `node_selector`, because its hosts would differ in memory or network.

Not built: GPUDirect-TCPX of a3-highgpu-8g, and on a4x-highgpu-4g GPUDirect RDMA and the ComputeDomain of its NVLink
between hosts. Such hosts communicate over plain TCP unless `pod:` adds what the cluster has; `launcher plan` shows what
that costs. AMD's GPUs run programs of your own (`command:`); the built-in trainer does not support ROCm.
"""

_PLATFORMS: Mapping[str, ModuleType] = {"gke": gke, "eks": eks, "generic": generic}


def sources(module: ModuleType) -> list[Source]:
    """Every source of a platform's facts, in the order of its file."""
    return [value for value in vars(module).values() if isinstance(value, Source)]


def facts(value: Any) -> Iterator[_Known]:
    """Every fact in a value, however deep in its mappings and sequences."""
    if isinstance(value, Nodes | Instance | Access | Fact):
        yield value
    elif isinstance(value, Mapping | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from facts(one)


def markdown() -> str:
    """The page."""
    parts = [_INTRODUCTION]
    for where, module in _PLATFORMS.items():
        numbers = {source: number for number, source in enumerate([*sources(module), table.PLUGINS], 1)}
        parts.append(f"## {where}\n\n" + "\n".join(_platform(module, numbers)))
    numbers = {source: number for number, source in enumerate(sources(runtime), 1)}
    parts.append("## The pods' user\n\n" + "\n".join(_users(numbers)))
    return "\n".join(parts)


def _users(numbers: Mapping[Source, int]) -> Iterator[str]:
    yield "On every platform, by `user` and `users` of the [defaults](kubernetes.md#the-pods-user).\n"
    yield "| job | user | Pod Security level | the nodes must have | source |"
    yield "|---|---|---|---|---|"
    for one in runtime.ACCESS:
        yield f"| {one.job} | {one.user} | {one.level} | {one.needs} | {_number(one, numbers)} |"
    yield ""
    yield from _others(runtime, numbers)
    yield from _sources(numbers)


def _platform(module: ModuleType, numbers: Mapping[Source, int]) -> Iterator[str]:
    yield from _table("accelerator", vars(module)["NODES"], numbers)
    capacities = vars(module).get("CAPACITY", {})
    if module is eks:
        for provisioner, known in capacities.items():
            yield from _table(f"capacity, `provisioner: {provisioner}`", known, numbers)
    elif capacities:
        yield from _table("capacity", {**capacities, **_parts(vars(module)["IN_RESERVATION"])}, numbers)
    if module is eks:
        yield from _instances(numbers)
    yield from _others(module, numbers)
    yield from _sources(numbers)


def _sources(numbers: Mapping[Source, int]) -> Iterator[str]:
    yield "Sources:\n"
    for source, number in numbers.items():
        yield f"{number}. {source.title}: `{source.where}`, read {source.read}"
    yield ""


def _parts(parts: Mapping[str, Nodes]) -> dict[str, Nodes]:
    return {f"reservation, {name}": nodes for name, nodes in parts.items()}


def _table(title: str, known: Mapping[str, Nodes], numbers: Mapping[Source, int]) -> Iterator[str]:
    yield f"| {title} | labels of its nodes | taints tolerated | source |"
    yield "|---|---|---|---|"
    for name, nodes in known.items():
        labels = "<br>".join(f"`{key}: {' or '.join(values)}`" for key, values in nodes.labels.items()) or "any"
        taints = "<br>".join(f"`{one['key']}`" for one in nodes.tolerations) or "none"
        yield f"| `{name}` | {labels} | {taints} | {_number(nodes, numbers)} |"
    yield ""


def _instances(numbers: Mapping[Source, int]) -> Iterator[str]:
    yield "| instance type | GPUs | GB of each | EFA interfaces | source |"
    yield "|---|---|---|---|---|"
    for name, one in eks.INSTANCES.items():
        yield f"| `{name}` | {one.gpus} | {one.memory_gb} | {one.efa or 'none'} | {_number(one, numbers)} |"
    yield ""


def _others(module: ModuleType, numbers: Mapping[Source, int]) -> Iterator[str]:
    """Single facts, by the name that they have in the data."""
    rows: list[tuple[str, Fact[Any]]] = []
    for name, value in vars(module).items():
        if name not in ("NODES", "CAPACITY", "IN_RESERVATION", "INSTANCES") and not name.startswith("_"):
            rows += [(f"{name.lower().replace('_', ' ')}{of}", fact) for of, fact in _named(value)]
    rows += [("resource", fact) for fact in table.RESOURCE.values() if fact.source in numbers]
    yield "| fact | value | source |"
    yield "|---|---|---|"
    for name, fact in rows:
        yield f"| {name} | {_written(fact.value)} | {_number(fact, numbers)} |"
    yield ""


def _named(value: Any) -> Iterator[tuple[str, Fact[Any]]]:
    """A single fact; those of a mapping, each of what it is of."""
    if isinstance(value, Fact):
        yield "", value
    elif isinstance(value, Mapping):
        yield from ((f" of `{key}`", fact) for key, fact in value.items() if isinstance(fact, Fact))


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "<br>".join(f"`{key}: {one}`" for key, one in value.items())
    return " ".join(f"`{one}`" for one in value) if isinstance(value, tuple) else f"`{value}`"


def _number(fact: _Known, numbers: Mapping[Source, int]) -> str:
    (source,) = (value for field in dataclasses.fields(fact) if isinstance(value := getattr(fact, field.name), Source))
    return str(numbers[source])


if __name__ == "__main__":
    print(markdown(), end="")
