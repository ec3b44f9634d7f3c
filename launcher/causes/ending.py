"""A job that is over, was stopped, or is on its way out: how it ended and what is left of it. Pure."""

from __future__ import annotations

from launcher.causes.answer import Answer, quoted, shown
from launcher.causes.containers import never_ran
from launcher.causes.memory import is_oom, killed_sentence, oom_sentence
from launcher.objects import age, condition
from launcher.seen import World
from launcher.status import State, fold, is_stopped_in_queue
from launcher.wording import count
from trainer import contract

_TRACEBACK_LINES = 20

# What to do after an end with that code. Codes that JobSet tries again end a job only once its budget is spent.
_MOVES = {
    contract.BAD_SPEC: "mend what the message names in job.yaml, then `launcher submit --replace`.",
    contract.BAD_DATA: "mend the data or its path, then `launcher submit --replace`.",
    contract.STARTUP: "mend the program: the traceback says where; then `launcher submit --replace`.",
    contract.NOT_FINITE: "lower the learning rate or look at the data; it resumes at the last good checkpoint.",
    contract.NO_CHECKPOINT: "see the checkpoint folder: is it whole, and is no other run its owner?",
    contract.NO_PROGRESS: "mend the first error; trying again does not help.",
}
_AGAIN = "see `launcher logs NAME --previous`; then `launcher submit --replace`: it resumes at its last checkpoint."


def over(world: World) -> Answer | None:
    """Done, failed, deleted or stopped."""
    status = fold(world)
    if status.state is State.DELETING:
        return _deleting(world)
    if status.state is State.DONE:
        return _done(world)
    if status.state is State.FAILED:
        return _failed(world)
    if status.state in (State.STOPPING, State.STOPPED):
        return _stopped(world, status.state)
    return None


def _deleting(world: World) -> Answer:
    assert world.jobset is not None, "asked of a JobSet that is there"
    left = [host for host in world.hosts if not host.has_ended]
    pods = f"{count(len(left), 'pod')} still to end" if left else "its pods have ended"
    finalizers = world.jobset["metadata"].get("finalizers") or ()
    evidence = (f"finalizers: {', '.join(finalizers)}",) if finalizers else ()
    return Answer("deleting", f"is being deleted: {pods}", evidence, "wait; a pod has its grace period to save.")


def _done(world: World) -> Answer:
    status = fold(world)
    parts = [f"is done: all of {count(status.hosts, 'host')}" if status.hosts > 1 else "is done"]
    if status.step is not None:
        parts.append(f"step {status.step}")
    if status.lasted_s is not None:
        parts.append(f"in {age(status.lasted_s)}")
    evidence = _numbers(world)
    return Answer("done", ", ".join(parts), evidence, f"launcher logs {world.name}; then launcher delete {world.name}")


def _numbers(world: World) -> tuple[str, ...]:
    """The last metrics that rank 0 reported, those that are numbers."""
    metrics = (world.told.beat or {}).get("metrics") or {}
    shown_ones = [f"{name} {value:.6g}" for name, value in metrics.items() if isinstance(value, int | float)]
    return (", ".join(shown_ones),) if shown_ones else ()


def _failed(world: World) -> Answer:
    assert world.jobset is not None, "asked of a JobSet that is there"
    failed, verdict = condition(world.jobset, "Failed"), world.told.verdict
    evidence = (f"JobSet: {failed.get('reason', '')}: {shown(failed.get('message', ''))}", *_job_words(world))
    spent = _spent(world)
    if _is_overdue(world):
        move = "raise deadline: in job.yaml, or submit it again: it resumes at its last checkpoint."
        return Answer("deadline", f"failed: its deadline of {_deadline(world)} passed", evidence, move)
    if is_oom(world):
        return Answer("oom", f"failed{spent}: {oom_sentence(world)}", evidence, _MEMORY)
    if verdict is not None:
        said, code = verdict.verdict, verdict.verdict.code
        headline = f"failed{spent}: {said.cause} (exit {code}): {shown(said.message)}"
        move = _MOVES.get(code, _AGAIN).replace("NAME", world.name)
        return Answer("failed", headline, (*_traceback(said.traceback), *evidence), move)
    if (answer := never_ran(world)) is not None:
        return Answer(
            answer.situation, f"failed{spent}: it {answer.headline}", (*answer.evidence, *evidence), answer.next_move
        )
    ended = next((host for host in world.hosts if host.ended.get("exitCode")), None)
    if ended is not None:
        code, reason = ended.ended["exitCode"], ended.ended.get("reason", "")
        said_last = _traceback(ended.ended.get("message"))
        if code == contract.KILLED:
            return Answer("killed", f"failed{spent}: {killed_sentence(world, ended)}", (*said_last, *evidence), _MEMORY)
        headline = f"failed{spent}: {ended.name} ended with exit code {code} ({reason})"
        return Answer("failed", headline, (*said_last, *evidence), _AGAIN.replace("NAME", world.name))
    return Answer(
        "failed", f"failed{spent}: {shown(failed.get('message', ''))}", evidence, _AGAIN.replace("NAME", world.name)
    )


_MEMORY = "raise resources.memory in job.yaml, or make it need less: a smaller batch, more hosts, remat."


def _spent(world: World) -> str:
    """ " after 5 restarts", when it was given up for them."""
    assert world.jobset is not None, "asked of a JobSet that is there"
    is_spent = condition(world.jobset, "Failed").get("reason") == "ReachedMaxRestarts"
    return f" after {count(world.restarts, 'restart')}" if is_spent and world.restarts else ""


def _job_words(world: World) -> tuple[str, ...]:
    """How the Job that failed first says it."""
    failed = [(job["metadata"]["name"], condition(job, "Failed")) for job in world.jobs]
    said = [
        f"Job {name}: {one['reason']}: {shown(one.get('message', ''))}" for name, one in failed if one.get("reason")
    ]
    return tuple(said[:2])


def _is_overdue(world: World) -> bool:
    return any(condition(job, "Failed").get("reason") == "DeadlineExceeded" for job in world.jobs) or (
        world.said("DeadlineExceeded", kind="Job") is not None and world.told.verdict is None
    )


def _deadline(world: World) -> str:
    for job in world.jobs:
        if (seconds := job.get("spec", {}).get("activeDeadlineSeconds")) is not None:
            return age(float(seconds))
    return "its Jobs"


def _traceback(text: str | None) -> tuple[str, ...]:
    """The end of a traceback, line by line."""
    return tuple(line.rstrip()[:300] for line in (text or "").strip().splitlines()[-_TRACEBACK_LINES:])


def _stopped(world: World, state: State) -> Answer:
    """Suspended with nobody who would let it go on by himself."""
    saved = _saved(world)
    left = [host for host in world.hosts if not host.has_ended]
    if state is State.STOPPING:
        return Answer("stopping", f"is stopping: {count(len(left), 'pod')} still to save and end", saved, "wait.")
    reason = condition(world.workload or {}, "Evicted").get("reason", "")
    if is_stopped_in_queue(world) and reason.startswith("Deactivated") and "Due" in reason:
        event = world.said("EvictedDueToDeactivated", "WorkloadRequeuingLimitExceeded")
        headline = "was given up by Kueue: its pods were not ready in time too often"
        return Answer(
            "given-up", headline, (*saved, *quoted(event)), "mend why its pods are not ready; then submit it again."
        )
    headline = "is stopped" + (f"; step {world.told.committed} is saved" if world.told.committed is not None else "")
    return Answer("stopped", headline, saved, "`launcher submit` of the same job goes on from there.")


def _saved(world: World) -> tuple[str, ...]:
    """What its agents said of the stop."""
    verdict = world.told.verdict
    return () if verdict is None else (verdict.title,)
