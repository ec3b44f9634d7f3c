"""Accelerator × platform × options: every accelerator with two of its possible options.

Which two is a matter of their names alone, so that a row more in a table adds golden files and
renames none.

manifests/test_jobset.py compares each with its golden file, cluster/test_admission.py sends each to
an API server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxlaunch.accelerators import ACCELERATORS
from jaxlaunch.launcher.job import defaults, load
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.manifests.code import Bundle
from jaxlaunch.launcher.manifests.jobset import render, resolve
from jaxlaunch.launcher.platforms import table
from jaxlaunch.launcher.platforms.table import PlatformName

TRAIN = """
train:
  task: my.tasks:Mine
  mesh: {dp: -1}
  batch: 1024
  checkpoint: {path: /checkpoints/run}
"""
# What a job sets besides its accelerator and platform.
OPTIONS: Mapping[str, str] = {
    "gang": "hosts: 4\nrestarts: {crash: 2, in_place: 0}\ngrace: 30s\ndeadline: 2d\nttl: "
    "1d\nnetwork_policy: false\n",
    "queue": "queue: research\npriority: high\nplacement: {preferred: "
    "cloud.google.com/gce-topology-block}\n",
    "spot": "capacity: spot\npriority: low\n",
    "flex-start": "capacity: flex-start\nqueue: research\ndeadline: 1d\n",
    "reservation": "capacity: {reservation: bought}\nnode_selector: {pool: a}\ntolerations: [{key: "
    "own, value: us}]\n",
    "rdma": "hosts: 2\nnetwork: {profile: rdma, resource: rdma/ib, count: 8}\nresources: "
    "{shm: 16Gi}\n",
    "efa": "hosts: 2\nnetwork: efa\nresources: {cpu: 90, memory: 1000Gi}\n",
    "tcpxo": "hosts: 2\nnetwork: gpudirect-tcpxo\n",
    "hostnetwork": "hosts: 3\nnetwork: hostnetwork\n",
    "slices": "slices: 3\nlabels: {team: vision}\nannotations: {example.com/note: a note}\n",
    "storage": "volumes: [{claim: checkpoints, path: /checkpoints}, {ephemeral: 50Gi, path: "
    "/scratch}, "
    "{secret: keys, path: /keys}, {configmap: settings, path: /settings}]\nresources: {cpu: 4, "
    "memory: 16Gi}\n" + TRAIN,
    "inject": "agent: inject\ncode: .\nsecrets: {TOKEN: {name: hub, key: "
    "token}}\nimage_pull_secrets: [registry]\n",
}
DEFAULTS = "{tcpxo: {image: 'registry.example/rxdm:1'}, prometheus: {namespace: monitoring}}"


class Combination(NamedTuple):
    kind: str
    platform: PlatformName
    option: str

    @property
    def name(self) -> str:
        return f"{self.platform}-{self.kind}-{self.option}"

    def job(self) -> JobSpec:
        topology = {2: ", topology: 4x4", 3: ", topology: 2x2x4"}.get(
            ACCELERATORS[self.kind].dimensions, ""
        )
        device = ", resource: aws.amazon.com/neuroncore" if self.kind == "plugin" else topology
        text = (
            f"name: {self.name}\nimage: registry.example/train:1\nplatform: {self.platform}\n"
            f"accelerator: {{type: {self.kind}{device}}}\n{OPTIONS.get(self.option, '')}"
        )
        if self.option == "gang" and topology:
            text = text.replace("hosts: 4\n", "")  # the topology says how many
        if self.option != "storage":
            text += "command: [python, train.py]\n"
        return load.parse_job(text + self._one_kind(text))

    def _one_kind(self, text: str) -> str:
        """Return a node selector if several kinds of node fit several hosts."""
        labels = table.NODES[self.platform][self.kind].labels
        several = [(key, values[0]) for key, values in labels.items() if len(values) > 1]
        several = [] if ACCELERATORS[self.kind].may_mix_kinds else several
        is_gang = "hosts:" in text or "slices:" in text
        if is_gang:
            return "".join(f"node_selector: {{{key}: {value}}}\n" for key, value in several)
        return ""

    def manifests(self) -> list[dict[str, Any]]:
        spec = self.job()
        return render(
            resolve(spec, defaults.parse_defaults(DEFAULTS)),
            Bundle(b"agent", b"code") if spec.code else None,
        )


# The plainest job on each kind of device, from which the golden files of all others say how they
# differ.
PLAIN = (
    Combination("cpu", "generic", "plain"),
    Combination("b200", "eks", "plain"),
    Combination("v6e", "gke", "plain"),
)


_RARE = ("efa", "rdma", "tcpxo")


def combinations() -> Iterator[Combination]:
    for platform, nodes in table.NODES.items():
        for kind in nodes:
            if is_like_gpu(kind, platform):
                continue
            candidates = [
                Combination(kind, platform, option)
                for option in OPTIONS
                if _supports(kind, platform, option)
            ]
            yield from sorted(candidates, key=_sort_key)[:2]


def is_like_gpu(kind: str, platform: PlatformName) -> bool:
    """Return whether only its label distinguishes an accelerator on this platform."""
    return (
        platform == "generic"
        and kind not in table.NODES["eks"]
        and ACCELERATORS[kind].platform == "cuda"
    )


def _sort_key(combination: Combination) -> str:
    """Return a stable pseudo-random key; options that few accelerators have come first."""
    common = combination.option not in _RARE
    return f"{common:d}{hashlib.sha256(combination.name.encode()).hexdigest()}"


def _supports(kind: str, platform: PlatformName, option: str) -> bool:
    device = ACCELERATORS[kind].platform
    match option:
        case "spot" | "flex-start" | "reservation":
            return option in table.capacity_nodes(platform, "karpenter")
        case "rdma":
            return device == "cuda" and platform == "generic"
        case "efa":
            return platform == "eks" and kind in ("a100", "h100", "b200")
        case "tcpxo":
            return (kind, platform) == ("h100", "gke")
        case "hostnetwork":
            return device != "tpu"
        case "slices":
            return device == "tpu" or platform == "generic"
        case "storage":
            # The built-in trainer runs on these devices alone.
            return device in ("cpu", "cuda", "tpu")
    return True
