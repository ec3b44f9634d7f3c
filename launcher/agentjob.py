"""What every agent is told of the job, in pods and here: one builder, so that the two cannot drift apart."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.accelerators import Platform
from launcher.schema import JobSpec
from trainer.contract import AgentJob


def of(
    job: JobSpec,
    *,
    command: Sequence[str] | None,
    platform: Platform,
    workdir: str | None,
    metrics_port: int = 0,
) -> AgentJob:
    """The agents' view of `job`; what depends on where it runs is given."""
    return AgentJob(
        name=job.name,
        command=None if command is None else tuple(command),
        processes_per_host=job.process_count_per_host,
        platform=platform,
        devices_per_process=job.devices_per_process,
        budgets_s=job.budgets.seconds(),
        crash_budget=job.restarts.crash,
        in_place_budget=job.restarts.in_place,
        grace_s=job.grace,
        metrics_port=metrics_port,
        workdir=workdir,
    )
