"""Compiles five trainings for accelerators: `benchmarks.compiled [JOB…] [--on CHIPS…]`.

It needs no device, only a compiler: the extra plan-tpu or plan-cuda. `launcher plan --compile`
compiles the jobs in benchmarks/jobs one after the other, at the lowest priority, and a row of the
table is printed after each. If a job cannot be compiled, because memory or a compiler is missing,
its row contains the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from tests.gang.runs import LAUNCHER

JOBS = pathlib.Path(__file__).with_name("jobs")
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chips:
    """Devices to compile for.

    Attributes:
        keys: Keys of job.yaml that select the devices.
        devices: Number of devices.
    """

    keys: tuple[str, ...]
    devices: int

    @classmethod
    def tpu(cls, kind: str, topology: str, hosts: int, devices: int) -> Chips:
        """Return a TPU slice."""
        return cls(
            (f"accelerator.type={kind}", f"accelerator.topology={topology}", f"hosts={hosts}"),
            devices,
        )

    @classmethod
    def gpu(cls, kind: str, hosts: int, per_host: int) -> Chips:
        """Return hosts with GPUs."""
        keys = (f"accelerator={{type: {kind}, per_host: {per_host}}}", f"hosts={hosts}")
        return cls(keys, hosts * per_host)


ON: Mapping[str, Chips] = {
    "v5e-8": Chips.tpu("v5e", "2x4", 2, 8),
    "v5e-16": Chips.tpu("v5e", "4x4", 4, 16),
    "v5e-256": Chips.tpu("v5e", "16x16", 64, 256),
    "v5p-64": Chips.tpu("v5p", "4x4x4", 16, 64),
    "v5p-128": Chips.tpu("v5p", "4x4x8", 32, 128),
    "v6e-256": Chips.tpu("v6e", "16x16", 64, 256),
    "tpu7x-64": Chips.tpu("tpu7x", "4x4x4", 16, 128),
    "64-h100": Chips.gpu("h100", 8, 8),
    "512-h100": Chips.gpu("h100", 64, 8),
}
LARGE = ("v5e-256", "v5p-128", "v6e-256", "tpu7x-64", "64-h100", "512-h100")
CASES: Mapping[str, tuple[str, ...]] = {
    "vit-b16": ("v5e-8", *LARGE),
    "decoder-1.3b": ("v5e-16", *LARGE),
    "llama3-8b": ("v5p-64", *LARGE),
    "mixtral-8x7b": ("v5p-64", *LARGE),
    "llama3-70b": LARGE,
}
HEAD = (
    "| job | on | peak GiB | computed again | sent GiB by axes | not hidden GiB | step ms, "
    "modelled | compiled in s |"
    "\n|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    """Print the table; return 1 if something could not be compiled."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument(
        "jobs", nargs="*", metavar="JOB", help=f"of {', '.join(CASES)}; all by default"
    )
    parser.add_argument(
        "--on", nargs="+", choices=ON, help="the chips; those of each job by default"
    )
    arguments = parser.parse_args()
    print(HEAD, flush=True)
    failed = False
    for job in arguments.jobs or CASES:
        for on in arguments.on or CASES[job]:
            result = compile_job(job, ON[on])
            failed |= "peak" not in result
            print(format_row(job, on, result), flush=True)
    return int(failed)


def compile_job(job: str, on: Chips) -> dict[str, Any]:
    """Return `memory.compiled` of `launcher plan --compile`, or only `says`, its last message."""
    keys = [*on.keys, *_batch_argument(job, on.devices)]
    command = [*LAUNCHER, "plan", str(JOBS / f"{job}.yaml"), *keys]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.run(
            [*command, "--compile", "-o", "json"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            preexec_fn=lambda: os.nice(19),
        )
        errors.seek(0)
        lines = [line for line in errors.read().splitlines() if line.strip()]
    try:
        result: dict[str, Any] = json.loads(process.stdout)["memory"]["compiled"]
    except (ValueError, KeyError, TypeError):
        return {"says": lines[-1] if lines else f"exit code {process.returncode}"}
    return result


def _batch_argument(job: str, devices: int) -> list[str]:
    """Return the argument for at least one row per device; ViT's own batch is large enough."""
    return [] if job == "vit-b16" else [f"train.batch={max(devices, 32)}"]


def format_row(job: str, on: str, result: Mapping[str, Any]) -> str:
    """Return one line of the table."""
    if "peak" not in result:
        return f"| {job} | {on} | not compiled: {result['says']} | | | | | |"
    sent_gib = [f"{axes} {size / GIB:.2f}" for axes, size in _sent_bytes(result).items()]
    sent = "; ".join(sent_gib) or "none"
    exposed = sum(collective["exposed"] for collective in result.get("collectives", ()))
    step = ""
    if (modelled := result.get("modelled")) is not None:
        step = " to ".join(f"{seconds * 1e3:.1f}" for seconds in modelled["seconds"])
    recomputed = result.get("recomputed")
    share = "" if recomputed is None else f"{recomputed:.0%}"
    peak = f"{result['peak'] / GIB:.2f}"
    return (
        f"| {job} | {on} | {peak} | {share} | {sent} | {exposed / GIB:.2f} | {step} | "
        f"{result['seconds']:.0f} |"
    )


def _sent_bytes(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes that a device sends in a step, by the mesh axes that they cross."""
    by_axes: dict[str, float] = {}
    for collective in result.get("collectives", ()):
        axes = " × ".join(collective["axes"])
        by_axes[axes] = by_axes.get(axes, 0.0) + collective["wire"]
    return by_axes


if __name__ == "__main__":
    sys.exit(main())
