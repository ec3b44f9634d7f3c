"""What `launcher logs` shows of a run on this machine."""

from __future__ import annotations

from jaxlaunch.launcher.cli.output import Printer, say
from jaxlaunch.launcher.errors import ClusterError
from jaxlaunch.launcher.jobs.logs import lines
from jaxlaunch.launcher.jobs.logs.lines import Select
from jaxlaunch.launcher.jobs.status.agent_report import AttemptEnd
from jaxlaunch.launcher.local import logs as files
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.launcher.local.status import verdict_of


def logs(
    run: Run, asked: Select, is_chosen: bool, tail: int | None, as_json: bool, is_following: bool, previous: bool
) -> int:
    """Shows the lines of the ranks that are asked for; the exit code."""
    job, verdict = run.job, verdict_of(run)
    each = job.process_count_per_host if job is not None else 1
    if job is not None:
        lines.exist(asked, job.processes)
        failing = None if verdict is None else verdict.rank
        chosen = asked if is_chosen else Select(lines.usual(job.processes, failing).ranks, asked.pattern)
    else:
        chosen = asked
    if chosen.ranks is not None and not is_chosen:
        say(f"showing rank {' and '.join(map(str, sorted(chosen.ranks)))} only; --rank all shows every rank")
    printer = Printer(chosen, as_json=as_json)
    if previous:
        return _previous(run, chosen, tail, each, printer)
    if verdict is not None:
        say(f"{verdict.cause} ({verdict.code}): {verdict.message}")
    if is_following and run.holder is not None:
        files.follow(run, chosen, tail, each, printer.show)
        return 0
    if not _shown(files.read(run, run.start_folder, chosen, tail, each), tail, printer):
        has_logs = bool(files.ranks(run.start_folder, Select()))
        say(f"{'these ranks have' if has_logs else 'no rank has'} written nothing, or it is gone: {run.start_folder}")
        return 0 if has_logs or run.holder is not None else ClusterError.exit_code
    return 0


def _previous(run: Run, chosen: Select, tail: int | None, each: int, printer: Printer) -> int:
    """How the attempts before this one ended, and the lines of the start before."""
    for one in run.records:
        say(AttemptEnd(one.verdict, one.attempt, one.generation, one.ended).title)
    before = None if run.start is None else run.folder / "starts" / str(run.start.start - 1)
    if before is None or not before.is_dir():
        say("there is no earlier start; the logs of this one hold all its attempts")
        return 0
    _shown(files.read(run, before, chosen, tail, each), tail, printer)
    return 0


def _shown(found: files.Found, tail: int | None, printer: Printer) -> bool:
    """Shows the lines of each rank, and what is left out of them; False where there is no rank."""
    is_any = False
    for rank, left_out, texts in found:
        is_any = True
        if left_out and tail is None:
            say(f"{left_out} bytes of rank {rank} before these lines are left out: the job keeps no more (logs.kept)")
        for line in texts:
            printer.show(line)
    return is_any
