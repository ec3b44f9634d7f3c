"""Write docs/platforms.md from the data: `python -m tests.platforms_page > docs/platforms.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from jaxlaunch.accelerators import ACCELERATORS, Accelerator, Source
from jaxlaunch.launcher.platforms import runtime, table
from jaxlaunch.launcher.platforms.facts import Fact, Instance, Nodes, PlatformFacts, PodSecurity

_Known = Nodes | Instance | PodSecurity | Fact[Any]

_INTRODUCTION = """\
# Platforms

This page lists what a rendered job requires of the nodes on each `platform`, and the source of each
fact. It is generated from `launcher/platforms`.
If the nodes of your cluster have other labels, set them under `nodes` and `capacity` of its
[defaults](kubernetes.md).

**Nothing on this page has been tried on these clouds**: a real API server with the webhooks of
JobSet and Kueue accepts what is rendered, but only the sources say that it runs there. A
label with several values becomes an affinity; a job of several hosts must choose one value with
`node_selector`, because its hosts would otherwise differ in memory or network.

GPUDirect-TCPX (a3-highgpu-8g) is not supported. Such hosts communicate over TCP; `launcher plan`
shows what that costs.
AMD GPUs run your own programs (`command:`); the built-in trainer does not support ROCm.
"""

# Resources of device plugins, the accelerator that requests one, and what JAX does with it.
_RESOURCES = (
    (
        "`nvidia.com/mig-1g.10gb` and other MIG devices (strategy *mixed*)",
        "{type: h100, resource: nvidia.com/mig-1g.10gb}",
        "a process uses one MIG device alone, so `per_host` is 1; a gang has several hosts, and "
        "MIG devices have no NVLink between them",
    ),
    (
        "`nvidia.com/gpu.shared`, or that of another plugin that shares GPUs",
        "{type: gpu, resource: nvidia.com/gpu.shared}",
        "lower `XLA_PYTHON_CLIENT_MEM_FRACTION`: each process takes most of the memory",
    ),
    (
        "`amd.com/cpx_nps4` and other partitions (strategy *mixed*)",
        "{type: mi300x, resource: amd.com/cpx_nps4, per_host: 8}",
        "each partition is a JAX device",
    ),
    (
        "`aws.amazon.com/neuroncore`, `aws.amazon.com/neuron` (Trainium, Inferentia)",
        "{type: plugin, resource: aws.amazon.com/neuroncore, per_host: 32}",
        "needs AWS's plugin `jax-neuronx` (beta) in the image, and its own variables for several "
        "hosts (`NEURON_RT_ROOT_COMM_ID` …)",
    ),
    (
        "`gpu.intel.com/xe`, `gpu.intel.com/i915`",
        "{type: plugin, resource: gpu.intel.com/xe}",
        "needs `intel-extension-for-openxla`, whose last release is for JAX 0.4.38",
    ),
    ("`habana.ai/gaudi`", "refused", "JAX has no backend for Gaudi"),
)

_ACCELERATORS = """\
## Accelerators

This table comes from `jaxlaunch/accelerators.py` and applies to every platform. The memory is that
of one JAX device. The peak is that of dense bf16, on which MFU is based; a type that covers several
devices may have several peaks.

`gpu` is an NVIDIA GPU of any name, and `amdgpu` an AMD GPU of any name: the job requests
`nvidia.com/gpu` or `amd.com/gpu`, and `node_selector` chooses the nodes. Nothing else is known
about them, so there is no MFU, and memory is planned only with `accelerator.memory`, such as
`24Gi`.

`accelerator.resource` requests another resource of a device plugin:

RESOURCES

A `plugin` runs your own programs (`command:`) with an image of your own; `JAX_PLATFORMS` is left to
the image, nothing is known about the devices, and none of these has been tried. The sources of this
table and of the names of other clouds that `validate` translates (`v5litepod-16`, `p5.48xlarge`,
`Standard_ND96isr_H100_v5`) are in `launcher/platforms/names.py`.

| `type` | JAX's platform | devices per host | GiB per device | peak TFLOP/s \
| compute capability | source |
|---|---|---|---|---|---|---|"""
# Names of a platform's file whose facts have tables of their own.
_TABLES = ("NODES", "CAPACITY", "RESERVATION_PARTS", "INSTANCES", "PLATFORM")


def platform_module(name: str) -> ModuleType:
    """Return the module of a platform's facts, which has its name."""
    return import_module(f"jaxlaunch.launcher.platforms.{name}")


def find_sources(module: ModuleType) -> list[Source]:
    """Return every source of a platform's facts, in the order of its file."""
    return [value for value in vars(module).values() if isinstance(value, Source)]


def find_facts(value: Any) -> Iterator[_Known]:
    """Yield every fact in a value, at any depth."""
    if isinstance(value, Nodes | Instance | PodSecurity | Fact):
        yield value
        if isinstance(value, Nodes):
            yield from find_facts((value.plugins, value.gib_tuner))
    elif isinstance(value, PlatformFacts):
        yield from find_facts(vars(value))
    elif isinstance(value, Mapping | tuple):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from find_facts(entry)


def make_page() -> str:
    """Return the page."""
    parts = [_INTRODUCTION, "\n".join(_accelerator_table())]
    for platform_name, row in table.PLATFORMS.items():
        file = platform_module(platform_name)
        numbers = {
            source: number
            for number, source in enumerate([*find_sources(file), table.DEVICE_PLUGINS], 1)
        }
        parts.append(f"## {platform_name}\n\n" + "\n".join(_platform_section(row, file, numbers)))
    numbers = {source: number for number, source in enumerate(find_sources(runtime), 1)}
    parts.append("## The pods' user\n\n" + "\n".join(_user_table(numbers)))
    return "\n".join(parts)


def _accelerator_table() -> Iterator[str]:
    """Return the table of accelerators, and the sources of its rows."""
    numbers = {source: number for number, source in enumerate(_read_for(ACCELERATORS.values()), 1)}
    rows = ["| resource | `accelerator` | what JAX does with it |", "|---|---|---|"]
    rows += (f"| {' | '.join(_quote_block(cell) for cell in row)} |" for row in _RESOURCES)
    yield _ACCELERATORS.replace("RESOURCES", "\n".join(rows))
    for name, accelerator in ACCELERATORS.items():
        devices = "by the topology" if accelerator.dimensions else str(accelerator.per_host)
        devices += (
            f", {accelerator.devices_per_chip} a chip" if accelerator.devices_per_chip > 1 else ""
        )
        memory = " or ".join(f"{size:g}" for size in accelerator.memory_gib) or (
            "its host's" if name == "cpu" else "not known"
        )
        known_peaks = [
            make.peak_flops / 1e12 for make in accelerator.models if make.peak_flops is not None
        ]
        peaks = " or ".join(dict.fromkeys(f"{peak:g}" for peak in known_peaks)) or "not known"
        read = ", ".join(str(numbers[source]) for source in accelerator.sources) or "none"
        yield (
            f"| `{name}` | {accelerator.platform} | {devices} | {memory} | {peaks} | "
            f"{accelerator.capability or 'none'} | {read} |"
        )
    yield ""
    yield from _source_list(numbers)


def _quote_block(cell: str) -> str:
    return f"`{cell}`" if cell.startswith("{") else cell


def _read_for(rows: Iterable[Accelerator]) -> Iterator[Source]:
    yield from dict.fromkeys(source for row in rows for source in row.sources)


def _user_table(numbers: Mapping[Source, int]) -> Iterator[str]:
    yield (
        "On every platform, by `user` and `users` of the [defaults](kubernetes.md#the-pods-user).\n"
    )
    yield "| job | user | Pod Security level | the nodes must have | source |"
    yield "|---|---|---|---|---|"
    for access in runtime.ACCESS:
        source = _source_number(access, numbers)
        yield f"| {access.job} | {access.user} | {access.level} | {access.needs} | {source} |"
    yield ""
    yield from _single_facts(runtime, numbers)
    yield from _source_list(numbers)


def _platform_section(
    row: PlatformFacts, module: ModuleType, numbers: Mapping[Source, int]
) -> Iterator[str]:
    yield from _node_table("accelerator", row.nodes, numbers)
    for provisioner, nodes in row.provisioners.items():
        yield from _node_table(f"capacity, `provisioner: {provisioner}`", nodes, numbers)
    if row.capacity:
        parts = vars(module).get("RESERVATION_PARTS", {})
        yield from _node_table("capacity", {**row.capacity, **_list_parts(parts)}, numbers)
    if row.instances:
        yield from _instance_table(row.instances, numbers)
    yield from _single_facts(module, numbers)
    yield from _source_list(numbers)


def _source_list(numbers: Mapping[Source, int]) -> Iterator[str]:
    yield "Sources:\n"
    for source, number in numbers.items():
        yield f"{number}. {source.title}: `{source.location}`, read {source.read_in}"
    yield ""


def _list_parts(parts: Mapping[str, Nodes]) -> dict[str, Nodes]:
    return {f"reservation, {name}": nodes for name, nodes in parts.items()}


def _node_table(
    title: str, nodes_by_kind: Mapping[str, Nodes], numbers: Mapping[Source, int]
) -> Iterator[str]:
    yield f"| {title} | labels of its nodes | taints tolerated | source |"
    yield "|---|---|---|---|"
    for name, nodes in nodes_by_kind.items():
        labels = (
            "<br>".join(f"`{key}: {' or '.join(values)}`" for key, values in nodes.labels.items())
            or "any"
        )
        taints = "<br>".join(f"`{toleration['key']}`" for toleration in nodes.tolerations) or "none"
        yield f"| `{name}` | {labels} | {taints} | {_source_number(nodes, numbers)} |"
    yield ""


def _instance_table(
    instances: Mapping[str, Instance], numbers: Mapping[Source, int]
) -> Iterator[str]:
    yield "| instance type | GPUs | GB of each | EFA interfaces | source |"
    yield "|---|---|---|---|---|"
    for name, instance in instances.items():
        efa = "not known" if instance.efa is None else instance.efa or "none"
        source = _source_number(instance, numbers)
        yield f"| `{name}` | {instance.gpus} | {instance.memory_gb} | {efa} | {source} |"
    yield ""


def _single_facts(module: ModuleType, numbers: Mapping[Source, int]) -> Iterator[str]:
    """Return single facts, by their name in the data."""
    rows: list[tuple[str, Fact[Any]]] = []
    for name, value in vars(module).items():
        if name not in _TABLES and not name.startswith("_"):
            rows += [
                (f"{name.lower().replace('_', ' ')}{key}", fact) for key, fact in _name_fact(value)
            ]
    for kind, nodes in vars(module).get("NODES", {}).items():
        rows += [(f"plugins of NCCL of `{kind}`", nodes.plugins)] if nodes.plugins else []
        rows += [(f"gib tuner of `{kind}`", nodes.gib_tuner)] if nodes.gib_tuner else []
    rows += [("resource", fact) for fact in table.RESOURCE_NAMES.values() if fact.source in numbers]
    yield "| fact | value | source |"
    yield "|---|---|---|"
    for name, fact in rows:
        yield f"| {name} | {_format_value(fact.value)} | {_source_number(fact, numbers)} |"
    yield ""


def _name_fact(value: Any) -> Iterator[tuple[str, Fact[Any]]]:
    """Yield a single fact, or those of a mapping with their keys."""
    if isinstance(value, Fact):
        yield "", value
    elif isinstance(value, Mapping):
        yield from ((f" of `{key}`", fact) for key, fact in value.items() if isinstance(fact, Fact))


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "<br>".join(f"`{key}: {entry}`" for key, entry in value.items())
    return " ".join(f"`{entry}`" for entry in value) if isinstance(value, tuple) else f"`{value}`"


def _source_number(fact: _Known, numbers: Mapping[Source, int]) -> str:
    (source,) = (
        value
        for field in dataclasses.fields(fact)
        if isinstance(value := getattr(fact, field.name), Source)
    )
    return str(numbers[source])


if __name__ == "__main__":
    print(make_page(), end="")
