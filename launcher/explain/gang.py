"""Pods that run: who is missing, what the ranks are in, what hangs, and how often it began again. Pure."""

from __future__ import annotations

from launcher.agent.rendezvous import names
from launcher.causes.answer import Answer, quoted, shown, which
from launcher.causes.memory import is_oom, oom_sentence
from launcher.objects import age, seconds_since
from launcher.seen import World
from launcher.status import JobStatus, State, fold
from launcher.testimony import Ended
from launcher.wording import count

_LOOPS = 2  # charged restarts without a committed step that make a crash loop
_LATE_S = 15.0  # until a host that is awaited is worth naming


def disrupted(world: World) -> Answer | None:
    """Pods that were taken away from outside: eviction, drain, preemption, a lost node."""
    taken = [host for host in world.hosts if host.disruption or host.reason in ("Evicted", "NodeLost", "Preempting")]
    if not taken:
        return None
    host = taken[0]
    reason, said = host.disruption.get("reason") or host.reason, host.disruption.get("message") or host.message
    why = _DISRUPTIONS.get(reason, reason)
    headline = f"was interrupted: {which(taken, world.wanted)} {why}; it starts again, which is charged to no budget"
    return Answer("disrupted", headline, (f"Pod {host.pod}: {reason}: {shown(said)}", *_before(world)), "wait.")


_DISRUPTIONS = {
    "PreemptionByScheduler": "had to make room for a pod of higher priority",
    "EvictionByEvictionAPI": "was evicted (a drain, or a person)",
    "DeletionByTaintManager": "was on a node that got a NoExecute taint",
    "DeletionByPodGC": "was on a node that is gone",
    "TerminationByKubelet": "was ended by its node, for want of a resource or at its shutdown",
    "Evicted": "was evicted by its node",
    "NodeLost": "was on a node that is lost",
}


def node_lost(world: World) -> Answer | None:
    """A node went silent with pods on it: they stay until it comes back or is given up."""
    event = world.said("NodeNotReady", kind="Pod")
    lost = [host for host in world.hosts if event and host.pod in event["names"] and host.running and not host.is_ready]
    if event is None or not lost:
        return None
    nodes = ", ".join(dict.fromkeys(host.node or "" for host in lost))
    headline = f"waits: node {nodes} does not answer, and {which(lost, world.wanted)} was on it"
    return Answer("node-lost", headline, quoted(event), "wait: the pods are made anew elsewhere when it stays away.")


def restarting(world: World) -> Answer | None:
    """One generation ended; the next is not there yet."""
    status = fold(world)
    if status.state is not State.RESTARTING:
        return None
    left = [host for host in world.hosts if not host.has_ended]
    last = world.told.verdict
    after = f" after {last.verdict.cause} ({last.verdict.code}): {shown(last.verdict.message)}" if last else ""
    if is_oom(world):
        after = f": {oom_sentence(world)}"
    ends = f"; {count(len(left), 'pod')} still to end" if left else ""
    situation = "oom" if is_oom(world) else "restarting"
    event = world.said("BackoffLimitExceeded", "PodFailurePolicy", "DeadlineExceeded", kind="Job")
    headline = f"is restarting{after}{ends}"
    return Answer(situation, headline, (*_before(world), *quoted(event)), _next(world))


def crash_loop(world: World) -> Answer | None:
    """It was made anew several times, and never got further."""
    status, last = fold(world), world.told.last
    if status.restarts.charged < _LOOPS or world.told.committed is not None or _is_beyond(status, last):
        return None
    used = f"{status.restarts.charged} of {status.restarts.budget} restarts are used"
    why = f"; last: {last.verdict.cause} ({last.verdict.code}): {shown(last.verdict.message)}" if last else ""
    headline = f"crashes and restarts without a committed step: {used}{why}"
    event = world.said("BackoffLimitExceeded", "PodFailurePolicy", kind="Job")
    return Answer("crash-loop", headline, (*_before(world), *quoted(event)), _next(world))


def _is_beyond(status: JobStatus, last: Ended | None) -> bool:
    """Whether it runs, and has come further than where it ended last."""
    before = None if last is None else last.verdict.step
    return status.state is State.RUNNING and None not in (status.step, before) and status.step > before  # type: ignore[operator]


def gathering(world: World) -> Answer | None:
    """The agents wait for each other."""
    told = world.told
    if told.stage != "gather" or told.beat is None:
        return None
    missing, total = told.missing, int(told.beat.get("missing_count") or len(told.missing))
    refused = tuple(shown(text) for text in told.beat.get("refused") or ())
    if not missing:
        return Answer("gathering", "is about to start: every host is there", refused)
    waited = (seconds_since(_leader_started(world), world.now)) or 0.0
    span = f" for {age(waited)}" if waited >= _LATE_S else ""
    listed = names(missing) if total == len(missing) else f"{names(missing)} and {total - len(missing)} more"
    headline = f"waits at rendezvous{span}: {listed} of {world.wanted} not there"
    return Answer("rendezvous", headline, (*_pods_of(world, missing), *refused), _look_at(world, missing))


def _leader_started(world: World) -> str | None:
    return next((host.running.get("startedAt") for host in world.hosts if host.number == 0), None)


def _pods_of(world: World, missing: list[int]) -> tuple[str, ...]:
    """What the pods of the hosts that are missing look like from outside."""
    return tuple(
        f"{host.name}: {host.phase}{_why(host.waiting or host.ended)}" + (f" on {host.node}" if host.node else "")
        for host in world.hosts
        if host.number in missing
    )[:8]


def _why(state: object) -> str:
    reason = state.get("reason") if isinstance(state, dict) else None
    return f", {reason}" if reason else ""


def _look_at(world: World, missing: list[int]) -> str:
    pod = next((host.pod for host in world.hosts if host.number in missing), None)
    if pod is None:
        return "their pods do not exist yet: wait."
    return f"kubectl logs {pod}; can it resolve and reach host 0? `launcher doctor` looks at the cluster's DNS."


def hanging(world: World) -> Answer | None:
    """A rank missed its budget."""
    beat = world.told.beat or {}
    if world.told.verdict is not None or not beat.get("overdue"):
        return None
    headline = f"hangs: {shown(str(beat['overdue']))}"
    return Answer(
        "hang", headline, _ranks(world), "wait: it is ended and begins again; the stacks come with its verdict."
    )


def running(world: World) -> Answer | None:
    """It runs; what went wrong before belongs to the answer."""
    status = fold(world)
    if status.state is not State.RUNNING:
        return None
    if world.told.beat is None:
        ready = f"{status.ready} of {count(status.hosts, 'host')} ready"
        return Answer("running", f"runs: {ready}")
    again = _again(world)
    situation = "restarted" if again else "running"
    return Answer(situation, f"runs{again}: {_doing(status)}", (*_before(world), *_ranks(world)))


_SILENT = ("unsaid", None)  # programs that report nothing


def _doing(status: JobStatus) -> str:
    """ "training at step 120 of 300", "in compile for 2m"."""
    of = f" of {status.steps}" if status.steps else ""
    at = f" at step {status.step}{of}" if status.step is not None else ""
    if status.phase == "step":
        return f"training{at}"
    if status.phase in _SILENT:
        return f"its program has said nothing of a step{at}"
    spent = f" for {age(status.phase_s)}" if status.phase_s is not None else ""
    return f"in {status.phase}{at}{spent}"


def _again(world: World) -> str:
    """ " again after hang (82): …", in the attempt after a failure that has committed nothing new."""
    last, beat = world.told.last, world.told.beat or {}
    if last is None or last.attempt + 1 != beat.get("attempt"):
        return ""
    return f" again after {last.verdict.cause} ({last.verdict.code}): {shown(last.verdict.message)[:200]}"


def _ranks(world: World) -> tuple[str, ...]:
    """How many ranks are in which phase, where they differ."""
    counts = (world.told.beat or {}).get("counts") or {}
    phases = (world.told.beat or {}).get("phases") or {}
    if len(counts) < 2:
        return ()
    parts = (
        f"{count(many, 'rank')} in {phase} ({', '.join(map(str, phases.get(phase, ())))})"
        for phase, many in counts.items()
    )
    return ("; ".join(parts),)


def _before(world: World) -> tuple[str, ...]:
    """The last verdicts, the newest first."""
    known: list[Ended] = [*world.told.before, *([world.told.verdict] if world.told.verdict else [])]
    return tuple(shown(one.title) for one in reversed(known[-3:]))


def _next(world: World) -> str:
    return f"launcher logs {world.name} --previous shows how it ended."
