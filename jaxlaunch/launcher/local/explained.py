"""What a run on this machine does, or how it ended: the answer of `explain`, in the words of a job on a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from jaxlaunch import contract
from jaxlaunch.launcher.diagnose.explain import failed, gang, situations
from jaxlaunch.launcher.diagnose.explain.answer import Answer, one_line
from jaxlaunch.launcher.diagnose.explain.explanation import Explanation, restarts_line
from jaxlaunch.launcher.jobs.status.job_status import OVER, JobStatus, State
from jaxlaunch.launcher.kubernetes.objects import age
from jaxlaunch.launcher.local.found import Run
from jaxlaunch.launcher.local.status import Live, status_of, verdict_of, was_killed
from jaxlaunch.launcher.wording import count

_AGAIN = "`launcher run` of the same file resumes it"
_ENDS = 3  # attempts whose verdicts are evidence


def explain(run: Run, live: Live | None) -> Explanation:
    """The one thing that matters about the run now."""
    status = status_of(run, live)
    answer = _over(run, status) if status.state in OVER else _going(run, status, live)
    verdict = verdict_of(run)
    return Explanation(
        run.name,
        "",
        answer.situation,
        f"{run.name} {answer.headline}",
        answer.evidence,
        tuple(_facts(run, status)),
        answer.next_move,
        situations.see(answer.situation, None if verdict is None else verdict.code),
    )


def _over(run: Run, status: JobStatus) -> Answer:
    verdict = verdict_of(run)
    assert verdict is not None, "it is over"
    lasted = "" if status.lasted_s is None else f" in {age(status.lasted_s)}"
    at = "" if status.step is None else f", step {status.step}"
    saved = "" if status.committed is None else f" from step {status.committed}"
    if status.state is State.DONE:
        return Answer("done", f"is done: all of {count(status.hosts, 'host')}{at}{lasted}")
    if was_killed(run):
        at = "" if status.step is None else f" at step {status.step}"
        return Answer("failed", f"was interrupted{at}: {verdict.message}", next_move=f"{_AGAIN}{saved}.")
    if status.state is State.STOPPED:
        return Answer("stopped", f"is stopped: {one_line(verdict.message)}", next_move=f"{_AGAIN}{saved}.")
    situation = "deadline" if verdict.code == contract.DEADLINE else "failed"
    move = failed.MOVES.get(verdict.code, "`launcher logs NAME` shows what it wrote; then `launcher run` it again.")
    move = move.replace("launcher submit --replace", "launcher run").replace("NAME", run.name)
    headline = f"failed{lasted and f' after{lasted[3:]}'}: {verdict.cause} (exit {verdict.code}): {verdict.message}"
    return Answer(situation, one_line(headline), failed.traceback(verdict.traceback), move)


def _going(run: Run, status: JobStatus, live: Live | None) -> Answer:
    if run.holder is not None and not run.holder.is_here:
        return Answer("running", "runs on another machine, or in a container whose processes cannot be seen from here")
    if status.state is State.STOPPING:
        return Answer("stopping", f"is stopping: {count(status.ready or 0, 'agent')} still saving", next_move="wait.")
    if status.state in (State.STARTING, State.GATHERING):
        return Answer("starting", "is starting: its agents have not all connected", next_move="wait.")
    ended = tuple(one_line(f"attempt {one.attempt}: {one.cause}: {one.verdict.message}") for one in run.records)
    if status.state is State.RESTARTING:
        return Answer("restarting", "is between two attempts", ended[-_ENDS:], f"launcher logs {run.name} --previous")
    phases = {} if live is None else dict(live.phases)
    kinds = sorted(set(phases.values()))
    ranks = [f"in {kind}: rank {', '.join(str(rank) for rank in phases if phases[rank] == kind)}" for kind in kinds]
    again = f" again after {run.records[-1].cause}" if run.records else ""
    move = gang.PREPARING if status.phase == "prepare" else None
    doing = gang.doing(status, is_partly=False)
    evidence = (*reversed(ended[-_ENDS:]), *(["; ".join(ranks)] if len(kinds) > 1 else []))
    return Answer("restarted" if again else "running", f"runs{again}: {doing}", evidence, move)


def _facts(run: Run, status: JobStatus) -> Iterator[str]:
    if status.restarts.by_cause:
        yield restarts_line(status)
    if status.committed is not None:
        yield f"last good checkpoint: step {status.committed}"
    if status.goodput is not None:
        yield f"goodput: {status.goodput:.1%}"
    yield f"run folder: {run.folder}"
