"""A job that failed: of what, at which rank, and what to do before it is tried again. Pure."""

from __future__ import annotations

from launcher.causes.answer import Answer, first, shown
from launcher.causes.containers import never_ran
from launcher.causes.memory import is_oom, killed_sentence, oom_sentence
from launcher.objects import age, condition
from launcher.seen import World
from launcher.status import State, state_of
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


_MEMORY = "raise resources.memory in job.yaml, or make it need less: a smaller batch, more hosts, remat."


def failed(world: World) -> Answer | None:
    """It failed for good: the first of these that can say why."""
    if state_of(world) is not State.FAILED:
        return None
    answer = first((_overdue, _out_of_memory, _judged, _never_ran, _exited, _unexplained), world)
    assert answer is not None, "the last one always answers"
    return Answer(
        answer.situation,
        f"failed{_spent(world)}: {answer.headline}",
        (*answer.evidence, *_words(world)),
        (answer.next_move or _AGAIN).replace("NAME", world.name),
    )


def _overdue(world: World) -> Answer | None:
    if not _is_overdue(world):
        return None
    move = "raise deadline: in job.yaml, or submit it again: it resumes at its last checkpoint."
    return Answer("deadline", f"its deadline of {_deadline(world)} passed", next_move=move)


def _out_of_memory(world: World) -> Answer | None:
    return Answer("oom", oom_sentence(world), next_move=_MEMORY) if is_oom(world) else None


def _judged(world: World) -> Answer | None:
    """By the verdict of its agents."""
    if world.told.verdict is None:
        return None
    said = world.told.verdict.verdict
    headline = f"{said.cause} (exit {said.code}): {shown(said.message)}"
    return Answer("failed", headline, _traceback(said.traceback), _MOVES.get(said.code))


def _never_ran(world: World) -> Answer | None:
    answer = never_ran(world)
    return (
        None if answer is None else Answer(answer.situation, f"it {answer.headline}", answer.evidence, answer.next_move)
    )


def _exited(world: World) -> Answer | None:
    """By what the kubelet saw, where no agent said a last word."""
    host = next((host for host in world.hosts if host.ended.get("exitCode")), None)
    if host is None:
        return None
    code, said = host.ended["exitCode"], _traceback(host.ended.get("message"))
    if code == contract.KILLED:
        return Answer("killed", killed_sentence(world, host), said, _MEMORY)
    return Answer("failed", f"{host.name} ended with exit code {code} ({host.ended.get('reason', '')})", said)


def _unexplained(world: World) -> Answer:
    return Answer("failed", shown(condition(world.jobset or {}, "Failed").get("message", "")))


def _words(world: World) -> tuple[str, ...]:
    """How JobSet and the Job that failed first say it."""
    found = condition(world.jobset or {}, "Failed")
    ends = [(job["metadata"]["name"], condition(job, "Failed")) for job in world.jobs]
    said = [f"Job {name}: {one['reason']}: {shown(one.get('message', ''))}" for name, one in ends if one.get("reason")]
    return (f"JobSet: {found.get('reason', '')}: {shown(found.get('message', ''))}", *said[:2])


def _spent(world: World) -> str:
    """ " after 5 restarts", when it was given up for them."""
    is_spent = condition(world.jobset or {}, "Failed").get("reason") == "ReachedMaxRestarts"
    return f" after {count(world.restarts, 'restart')}" if is_spent and world.restarts else ""


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
