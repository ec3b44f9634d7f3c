"""--from-volume: what `status` and `logs` show of a job without pods, by the files of its run folder."""

from __future__ import annotations

import dataclasses

from jaxlaunch.launcher.cli.output import Printer, say
from jaxlaunch.launcher.diagnose.explain.explanation import explain
from jaxlaunch.launcher.jobs import reader
from jaxlaunch.launcher.jobs.logs.lines import Line, Select
from jaxlaunch.launcher.jobs.status import collect
from jaxlaunch.launcher.jobs.status.run_files import MAX_LOGS, RunFiles
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.client import Cluster


def state(cluster: Cluster, seen: Snapshot) -> Snapshot:
    """The job, with what its summary on the volume says."""
    return _known(seen, reader.read(cluster, seen.jobset, say=say, why=lambda name: _why(cluster, seen, name)))


def logs(
    cluster: Cluster, seen: Snapshot, chosen: Select, tail: int | None, printer: Printer, *, previous: bool
) -> None:
    """Shows the logs of the chosen ranks, one rank after the other; with `previous` first how the attempts ended."""
    files = reader.read(
        cluster,
        seen.jobset,
        say=say,
        why=lambda name: _why(cluster, seen, name),
        ranks=None if chosen.ranks is None else sorted(chosen.ranks),
        pattern=None if chosen.pattern is None else chosen.pattern.pattern,
        tail=tail,
    )
    last = _known(seen, files).report.verdict
    for ended in files.attempts if previous else () if last is None else (last,):
        say(ended.title)
    for log in files.logs:
        if log.left_out and tail is None:
            why = f"the job keeps no more (logs.kept), or it is beyond {MAX_LOGS >> 20} MiB of all ranks shown"
            say(f"{log.left_out} bytes of rank {log.rank} before these lines are left out: {why}")
        for text in log.lines:
            printer.show(Line(seen.members.host(log.rank), log.rank, text))
    if not files.logs:
        say("its run folder has no log of these ranks")


def _known(seen: Snapshot, files: RunFiles) -> Snapshot:
    if files.recorded is None:
        say("its run folder has no summary of this job")
    return dataclasses.replace(seen, on_volume=files.recorded)


def _why(cluster: Cluster, seen: Snapshot, name: str) -> str:
    """What holds up the JobSet that reads the volume."""
    return explain(collect.snapshot(cluster, seen.namespace, name)).headline
