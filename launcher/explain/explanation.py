"""Why a job waits, or why it died: one answer, what shows it, and the next move. Pure.

Questions are asked in the order in which a job must pass: the first that has an answer is what holds it up.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from launcher.causes import admission, containers, ending, failing, gang, images, queue, scheduling
from launcher.causes.answer import Answer, Question, first
from launcher.objects import age
from launcher.seen import World
from launcher.status import JobStatus, fold

MAX_EVIDENCE = 24

QUESTIONS: tuple[Question, ...] = (
    ending.over,
    failing.failed,
    queue.suspended_by_queue,
    admission.jobs_not_created,
    admission.pods_not_created,
    scheduling.unscheduled,
    images.not_pulled,
    containers.not_started,
    gang.node_lost,
    gang.disrupted,
    gang.crash_loop,
    gang.restarting,
    gang.hanging,
    gang.gathering,
    gang.running,
)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The answer about one job. `facts` hold whatever the situation is."""

    name: str
    namespace: str
    situation: str
    headline: str
    evidence: tuple[str, ...]
    facts: tuple[str, ...]
    next_move: str | None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def explain(world: World) -> Explanation:
    """The one thing that matters about the job now."""
    if world.jobset is None:
        return _unknown(world)
    answer = first(QUESTIONS, world) or _on_its_way(world)
    return Explanation(
        world.name,
        world.namespace,
        answer.situation,
        f"{world.name} {answer.headline}",
        tuple(dict.fromkeys(answer.evidence))[:MAX_EVIDENCE],
        (*_facts(fold(world)), *_limits(world)),
        answer.next_move,
    )


def _unknown(world: World) -> Explanation:
    """No JobSet has that name."""
    near = difflib.get_close_matches(world.name, world.neighbours, n=3)
    move = (
        f"did you mean {' or '.join(near)}?"
        if near
        else "`launcher list` shows the jobs here; -n NAMESPACE looks elsewhere."
    )
    said = [f"{one['kind']} {one['names'][0]}: {one['reason']}: {one['message'][:200]}" for one in world.events[:3]]
    headline = f"there is no job {world.name} in namespace {world.namespace}"
    return Explanation(world.name, world.namespace, "unknown", headline, tuple(said), world.unread, move)


def _on_its_way(world: World) -> Answer:
    """Nothing holds it up: the controllers have not come to it yet."""
    status = fold(world)
    here = f"{len(world.hosts)} of {status.hosts} pods exist"
    return Answer("creating", f"is being created: {here}", next_move="wait a moment.")


def _facts(status: JobStatus) -> list[str]:
    """Restarts by cause, and the age of what is safe."""
    facts = []
    restarts = status.restarts
    if restarts.total or restarts.by_cause:
        facts.append(restarts_line(status))
    if status.committed is not None:
        since = f", {age(status.committed_age_s)} ago" if status.committed_age_s is not None else ", before these pods"
        facts.append(f"last good checkpoint: step {status.committed}{since}")
    return facts


def restarts_line(status: JobStatus) -> str:
    """ "restarts: 3, of which 1 of 5 charged; ends: crash 2, preempted 1"."""
    restarts = status.restarts
    text = f"restarts: {restarts.total}, of which {restarts.charged} of {restarts.budget} charged"
    if restarts.by_cause:
        text += "; attempts ended by " + ", ".join(
            f"{cause} {many}" for cause, many in sorted(restarts.by_cause.items())
        )
    return text


def _limits(world: World) -> list[str]:
    """What this answer could not know."""
    limits = []
    if not world.is_ours:
        limits.append("this JobSet was not submitted by launcher: what only its agents say is not known")
    if world.told.unknown:
        limits.append(f"what was before is not known: {world.told.unknown}")
    return [*limits, *world.unread]
