"""A job that is done, was stopped, or is on its way out: what is left of it. Pure."""

from __future__ import annotations

from launcher.causes.answer import Answer, shown
from launcher.jobset import STOPPED_WITH
from launcher.objects import age, condition
from launcher.seen import World
from launcher.status import State, fold, is_stopped_in_queue
from launcher.wording import count


def over(world: World) -> Answer | None:
    """Done, deleted or stopped."""
    status = fold(world)
    if status.state is State.DELETING:
        return _deleting(world)
    if status.state is State.DONE:
        return _done(world)
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


# Why Kueue takes a Workload out of its queue for good.
_GIVEN_UP = {
    "DeactivatedDueToRequeuingLimitExceeded": "its pods were not ready in time too often",
    "DeactivatedDueToMaximumExecutionTimeExceeded": "it ran for as long as it may",
    "DeactivatedDueToAdmissionCheck": "an admission check rejected it",
}


def _stopped(world: World, state: State) -> Answer:
    """Suspended with nobody who would let it go on by himself."""
    saved = _saved(world)
    left = [host for host in world.hosts if not host.has_ended]
    if state is State.STOPPING:
        return Answer("stopping", f"is stopping: {count(len(left), 'pod')} still to save and end", saved, "wait.")
    evicted = condition(world.workload or {}, "Evicted")
    if is_stopped_in_queue(world) and evicted.get("reason", "") in _GIVEN_UP:
        why = _GIVEN_UP[evicted["reason"]]
        words = (f"Workload: {shown(evicted.get('message', ''))}",)
        return Answer("given-up", f"was given up by Kueue: {why}", (*saved, *words), "mend that; then submit it again.")
    return Answer(
        "stopped", f"is stopped{_kept(world)}", saved, "`launcher submit` of the same job goes on from there."
    )


def _kept(world: World) -> str:
    """ "; step 120 is saved", or what was written down when its pods went."""
    assert world.jobset is not None, "asked of a JobSet that is there"
    if world.told.committed is not None:
        return f"; step {world.told.committed} is saved"
    words = world.jobset["metadata"].get("annotations", {}).get(STOPPED_WITH)
    return "" if words is None else f"; {shown(words)}"


def _saved(world: World) -> tuple[str, ...]:
    """What its agents said of the stop."""
    verdict = world.told.verdict
    return () if verdict is None else (verdict.title,)
