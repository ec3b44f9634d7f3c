"""`launcher status`: the state of one job, on one screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import click

from jaxlaunch import contract
from jaxlaunch.launcher.cli import completions, from_volume, options, output, whose
from jaxlaunch.launcher.diagnose.explain.explanation import describe_ranks, describe_restarts, diagnose, explain
from jaxlaunch.launcher.diagnose.explain.failed import evicted_for_excess, is_oom
from jaxlaunch.launcher.diagnose.text import Renderer, Text
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.jobs.status import collect, lost_hosts
from jaxlaunch.launcher.jobs.status.job_status import OVER, JobStatus, as_of_line, status_of
from jaxlaunch.launcher.jobs.status.snapshot import NoSuchJob, Snapshot
from jaxlaunch.launcher.kubernetes.objects import age
from jaxlaunch.launcher.local import status as here
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.records.summary import Restarted

MAX_HOSTS = 32  # rows of -o wide


@click.command("status")
@click.argument("name", metavar="JOB_NAME", shell_complete=completions.runs)
@options.place()
@options.whose
@options.from_volume
@options.screen_form("The form of the output; wide shows each host.")
def status_command(
    name: str, namespace: str | None, context: str | None, where: str | None, is_from_volume: bool, form: str | None
) -> None:
    """Show the state of job JOB_NAME, or of a run here.

    The job's result comes first if there is one. Give a run by its name below runs/, or by its folder.
    """
    if (run := whose.run_here(name, namespace, context, where or ("cluster" if is_from_volume else None))) is not None:
        return _of_run(run, form)
    cluster = whose.connect(name, context, where)
    seen = collect.snapshot(cluster, namespace or cluster.namespace, name)
    if isinstance(seen, NoSuchJob):
        raise UserError(f"{explain(seen).headline}.", explain(seen).next_move)
    if is_from_volume:
        seen = from_volume.state(cluster, seen)
    status = status_of(seen)
    if form in ("json", "yaml"):
        return output.data(status.to_json(), form)
    output.show(*screen(status, seen), *(_each_host(seen) if form == "wide" else ()))


def _of_run(run: Run, form: str | None) -> None:
    live = here.live(run)
    status = here.status_of(run, live)
    if form in ("json", "yaml"):
        return output.data(status.to_json(), form)
    rows = [
        *_numbers(status),
        ("age", _age(status)),
        ("folder", str(run.folder)),
    ]
    phases = {} if live is None or form != "wide" else live.phases
    table = output.columns([("RANK", "PHASE"), *((str(rank), phases[rank]) for rank in sorted(phases))])
    restarts = run.summary.restart_seconds if run.summary is not None and form == "wide" else ()
    output.show(*_lines(status, rows), *(table if phases else ()), *_each_restart(restarts))


def screen(status: JobStatus, seen: Snapshot) -> Iterator[str]:
    """The lines of one job: its result, its state, and what else is known."""
    yield from _lines(status, _rows(status, seen))


def _lines(status: JobStatus, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    if status.verdict is not None:
        yield f"{status.verdict['cause']} ({status.verdict['code']}): {status.verdict['message']}"
    attempt = "" if status.attempt is None else f", attempt {status.attempt}"
    yield f"{status.name}: {status.state.value} (generation {status.generation}{attempt})"
    for label, text in rows:
        if text:
            yield f"  {label:<11}{text}"


def _rows(status: JobStatus, seen: Snapshot) -> Iterator[tuple[str, str]]:
    answer = diagnose(seen).answer
    # Agents can tell neither who sent a signal nor what another container of their pod does.
    is_unsaid = is_oom(seen) or evicted_for_excess(seen) is not None
    if answer.situation == "sidecar" or (status.phase is None and (status.verdict is None or is_unsaid)):
        yield "why", _text(status, answer.headline)
    yield from _numbers(status)
    yield "as of", as_of_line(status, seen.now)
    yield "age", _age(status)
    yield "unknown", "; ".join(seen.unread)


def _numbers(status: JobStatus) -> Iterator[tuple[str, str]]:
    yield "hosts", _hosts(status) + (f", queue {status.queue}" if status.queue else "")
    yield "ranks", _text(status, describe_ranks(status)) if status.state not in OVER else ""
    yield "phase", _phase(status)
    yield "restarts", _text(status, describe_restarts(status))
    yield "checkpoint", _checkpoint(status)
    yield "last start", _seconds(status.restart_seconds)
    yield "goodput", "" if status.goodput is None else f"{status.goodput:.1%}"


def _text(status: JobStatus, text: Text) -> str:
    return Renderer(status.name, status.namespace).render(text)


def _seconds(by_cause: Mapping[str, float]) -> str:
    """How long the last start or restart took until its first step, and what that was spent on."""
    parts = ", ".join(f"{cause} {spent:.2f}" for cause, spent in by_cause.items() if spent >= 0.005)
    return f"{sum(by_cause.values()):.2f} s until its first step: {parts}" if parts else ""


def _each_restart(rows: Sequence[Restarted]) -> list[str]:
    """A table of the starts and restarts of a run: the seconds until each one's first step, by cause."""
    causes = [cause for cause in contract.RESTART if any(cause in row.seconds for row in rows)]
    table = [("ATTEMPT", "AFTER", "SECONDS", *(cause.upper() for cause in causes))]
    for row in rows:
        spent = [sum(row.seconds.values()), *(row.seconds.get(cause, 0.0) for cause in causes)]
        table.append((str(row.attempt), row.after or "-", *(f"{seconds:.2f}" for seconds in spent)))
    return output.columns(table) if rows else []


def _age(status: JobStatus) -> str:
    return age(status.age_s) + ("" if status.lasted_s is None else f", ended after {age(status.lasted_s)}")


def _hosts(status: JobStatus) -> str:
    """How many are ready; of a job that is over, that none is needed any more."""
    if status.state in OVER:
        return f"{status.hosts}, {status.state.value.lower()}"
    return f"{'?' if status.ready is None else status.ready} of {status.hosts} ready"


def _phase(status: JobStatus) -> str:
    of = "" if status.steps is None else f" of {status.steps}"
    at = "" if status.step is None else f"step {status.step}{of}"
    if status.phase in (None, "step"):
        return at
    spent = "" if status.phase_s is None else f" for {age(status.phase_s)}"
    return f"{status.phase}{spent}" + (f", at {at}" if at else "")


def _checkpoint(status: JobStatus) -> str:
    if status.committed is None:
        return ""
    if status.as_of is not None or status.folder is not None:
        return f"step {status.committed}"
    since = "before these pods" if status.committed_age_s is None else f"{age(status.committed_age_s)} ago"
    return f"step {status.committed}, {since}"


def _each_host(seen: Snapshot) -> Iterator[str]:
    """A table of the hosts; of many, those that are not ready first."""
    hosts = sorted(seen.hosts, key=lambda host: (host.is_ready, host.number))
    spares = lost_hosts.spares(seen)
    rows = [("HOST", "RANKS", "READY", "STATE", "NODE", "POD")]
    for host in hosts[:MAX_HOSTS]:
        state = host.waiting.get("reason") or host.ended.get("reason") or host.phase
        state = "Terminating" if host.is_leaving and not host.has_ended else state
        ready = "yes" if host.is_ready else "-" if host.has_ended else "no"
        ranks = "spare" if host.number in spares else _ranks(seen.members.ranks(host.number))
        rows.append((str(host.number), ranks, ready, state, host.node or "-", host.pod))
    yield from output.columns(rows)
    if len(hosts) > MAX_HOSTS:
        yield f"… and {len(hosts) - MAX_HOSTS} more hosts"


def _ranks(held: range) -> str:
    """ "3", "8-15", or "-"."""
    if not held:
        return "-"
    return str(held[0]) if len(held) == 1 else f"{held[0]}-{held[-1]}"
