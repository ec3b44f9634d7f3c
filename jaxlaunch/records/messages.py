"""Renders the facts of a failure as a sentence: the only place with the words of a verdict. Pure.

No decision may depend on these words; a test replaces all of them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.records.failure import (
    DiskExcess,
    Failure,
    FailureKind,
    HangFacts,
    LostHost,
    Numbers,
    RendezvousFacts,
    StopFacts,
    StopOutcome,
    StopReason,
)

CATALOG: dict[str, str] = {
    # Parts of sentences.
    "host": "host",
    "rank": "rank",
    "one": "{noun} {number}",
    "several": "{noun}s {numbers}",
    "several_cut": "{noun}s {numbers} and {more} more",
    "in_phase": "in {phase}",
    "at_step": "at step {step}",
    "signal": "signal {number}",
    "kill_hint": " (by the kernel because memory ran out, or by a person)",
    "exception": "{type}: {message}",
    "mebibytes": "{count:,.0f} MiB",
    # A process.
    "done_one": "the process finished",
    "done_all": "every process finished",
    "raised": "rank {rank} raised{place}: {exception}",
    "trainer_error": "rank {rank} ended{place}: {exception}",
    "exit_code": "rank {rank}'s program ended with exit code {code}{place}",
    "killed": "rank {rank} was killed by {signal}{place}{hint}",
    "oom_killed": "rank {rank} was OOMKilled{place}: its container reached its memory limit",
    "not_started": "rank {rank} could not be started: {detail}",
    "not_started_code": "exit code {code}",
    "no_trainer": "rank {rank}'s program ended with exit code 0 before the trainer began",
    "ended_early": "rank {rank}'s program ended{place}, before its last step",
    "left_early": "rank {rank}'s program ended while other ranks were still running",
    "heartbeats": "rank {rank} stopped sending heartbeats to JAX, which then aborted its peers",
    "versions": "rank {rank} imported jax {version}, rank {first_rank} imported {first_version}",
    # A hang.
    "timeout": "the {phase} timeout of {limit_s:.0f} s passed first on rank {rank}, after {elapsed_s:.0f} s",
    "hang": "rank {rank} makes no progress{place} ({timeout}): {stacks}",
    "hang_wait_one": "; {waiting} waits for {late}",
    "hang_wait": "; {waiting} wait for {late}",
    "hang_nccl": "; NCCL: {faults}",
    "stands_still": "rank {rank} makes no progress{place}: its process stands still, and its peers gave up: {cause}",
    # A host.
    "host_with_rank": "host {host} (rank {first})",
    "host_with_ranks": "host {host} (ranks {first} to {last})",
    "host_alone": "host {host}",
    "lost": "{host} was lost: {reason}{agent}",
    "lost_unseen": "its agent was killed before it could write how the attempt ended",
    "lost_agent": " (its agent was killed by {signal}{hint})",
    "not_joined": "rendezvous: {hosts} did not join within {waited_s:.0f} s ({timeout})",
    "not_joined_refused": "; refused: {refused}",
    "cannot_join": "rendezvous: cannot join host 0 at {address}: {reason}",
    "no_other_leader": "; no other host 0 within {waited_s:.0f} s ({timeout})",
    "agent_killed": "host 0's agent was killed by {signal}{hint}",
    "agent_exited": "host 0's agent ended with exit code {code}",
    "agents_killed": "every agent was killed: host 0's was killed by {signal}{hint}",
    "unrecorded": "{meaning}; the agents could not write more about it into the run folder",
    "run_killed": (
        "launcher and agents were killed together, or the machine was restarted, before they could write how it ended"
    ),
    # A stop.
    "stop_outside": "stopped from outside",
    "stop_user": "stopped by you",
    "stop_growth": "stopped to continue with {hosts} hosts instead of {hosts_before}",
    "stop_deadline": "the job's deadline of {limit_s:g} s passed",
    "stop_disk": (
        "host {host} uses {used} of ephemeral storage, over its limit of {limit} (resources.ephemeral), "
        "for which its pod is evicted"
    ),
    "stop_volume": (
        "host {host} has {used} in {folder}, over that volume's limit of {limit} of ephemeral storage "
        "(volumes: ephemeral), for which its pod is evicted"
    ),
    "stop_not_joined": "{reason} before every host had joined",
    "stop_no_rank": "{reason}: it held no rank",
    "stop_after": "{reason}, after: {cause}",
    "stop_saved": "{reason}: saved at step {step}",
    "stop_late": "; {late} did not end",
    "stop_not_reported": "{reason}: the program did not report whether it saved",
    "stop_note": "{reason}: {note}",
    "stop_not_saved": "{reason}: not saved",
    "stop_not_saved_cause": "{reason}: not saved: {cause}",
    "stop_not_saved_killed": ", killed",
    "late_in_phase": "{ranks} in {phase}",
    "its_program": "its program",
    "nothing_saved": "; nothing is saved",
    "is_saved": "; step {step} is saved",
    "was_deleted": "; step {step} was saved, and somebody deleted it",
    "was_deleted_by_other": "; step {step} was, and somebody deleted it",
    # A run.
    "repeated": "{cause}; so did the attempt before, and neither made progress",
    "repeated_output": "{cause} ({output}); so did the attempt before, and neither made progress",
    "no_progress": "no newly committed step in {count} sets of pods; the first error was: {cause}",
    "preempted": "no newly committed step in {count} preemptions in a row, of {limit} (restarts.preempted): {cause}",
    "preempted_unseen": (
        "no newly committed step in at least {count} preemptions in a row, of {limit} (restarts.preempted): "
        "the job keeps no checkpoints"
    ),
}


def phrase(name: str, **values: Any) -> str:
    """Return a text of the catalog with these values."""
    return CATALOG[name].format(**values)


def render(failure: Failure) -> str:
    """Return the sentence that tells a person how an attempt or a run ended."""
    text = _RENDERERS[failure.kind](failure)
    rendezvous = failure.rendezvous
    if rendezvous is not None and failure.kind not in (FailureKind.NOT_JOINED, FailureKind.CANNOT_JOIN):
        waited_s = float("inf") if rendezvous.waited_s is None else rendezvous.waited_s
        text += phrase("no_other_leader", waited_s=waited_s, timeout=rendezvous.timeout)
    return text


def names(numbers: Sequence[int] | Numbers, noun: str = "host") -> str:
    """Return "host 3" or "hosts 2, 5"; after 20 the list is cut."""
    sample = numbers if isinstance(numbers, Numbers) else Numbers.of(numbers)
    word = CATALOG[noun]
    if sample.count == 1:
        return phrase("one", noun=word, number=sample.first[0])
    listed, more = ", ".join(map(str, sample.first)), sample.count - len(sample.first)
    name = "several_cut" if more else "several"
    return phrase(name, noun=word, numbers=listed, more=more)


def place(phase: str | None, step: int | None) -> str:
    """Return where a rank is: "in data at step 20"; may be empty."""
    in_phase = phrase("in_phase", phase=phase) if phase else ""
    at_step = phrase("at_step", step=step) if step is not None else ""
    return " ".join(part for part in (in_phase, at_step) if part)


def render_timeout(hang: HangFacts) -> str:
    """Return the phrase for the timeout that passed."""
    return phrase("timeout", phase=hang.phase, limit_s=hang.limit_s, rank=hang.first_rank, elapsed_s=hang.elapsed_s)


def render_excess(excess: DiskExcess) -> str:
    """Return the sentence for a limit of ephemeral storage that is exceeded."""
    used, limit = (phrase("mebibytes", count=size / 2**20) for size in (excess.used_bytes, excess.limit_bytes))
    name = "stop_volume" if excess.folder else "stop_disk"
    return phrase(name, host=excess.host, used=used, limit=limit, folder=excess.folder)


def render_stop_reason(stop: StopFacts) -> str:
    """Return the phrase for the reason of a stop."""
    if stop.reason is StopReason.DEADLINE:
        return phrase("stop_deadline", limit_s=stop.deadline_s or 0.0)
    if stop.reason is StopReason.DISK_EXCEEDED and stop.excess is not None:
        return render_excess(stop.excess)
    if stop.reason is StopReason.GROWTH:
        return phrase("stop_growth", hosts=stop.hosts, hosts_before=stop.hosts_before)
    return phrase("stop_user" if stop.reason is StopReason.USER else "stop_outside")


# --- the kinds --------------------------------------------------------------------------------------------------------


def _place_after(failure: Failure) -> str:
    text = place(failure.phase, failure.step)
    return f" {text}" if text else ""


def _signal(number: int | None) -> dict[str, str]:
    """Return the name of a signal and the hint behind it, as values of a template."""
    try:
        name = signal.Signals(number or 0).name
    except ValueError:
        name = phrase("signal", number=number)
    return {"signal": name, "hint": CATALOG["kill_hint"] if number == signal.SIGKILL else ""}


def _of_process(name: str) -> Callable[[Failure], str]:
    """Return the renderer of a template that needs only the rank, its place, an exit code and a signal."""

    def rendered(failure: Failure) -> str:
        values = {"rank": failure.rank, "place": _place_after(failure), "code": failure.exit_code}
        return phrase(name, **values, **_signal(failure.signal))

    return rendered


def _cause(failure: Failure) -> str:
    return "" if failure.cause is None else render(failure.cause)


def _exception(failure: Failure) -> str:
    facts = failure.exception
    kind, message = ("", "") if facts is None else (facts.type, facts.message)
    if failure.kind is FailureKind.TRAINER_ERROR:
        shown = message or kind
    else:
        shown = phrase("exception", type=kind, message=message) if message else kind
    name = "trainer_error" if failure.kind is FailureKind.TRAINER_ERROR else "raised"
    return phrase(name, rank=failure.rank, place=_place_after(failure), exception=shown)


def _not_started(failure: Failure) -> str:
    detail = failure.detail or phrase("not_started_code", code=failure.exit_code)
    return phrase("not_started", rank=failure.rank, detail=detail)


def _versions(failure: Failure) -> str:
    (first_rank, first_version), (rank, version) = sorted(failure.versions.items())[:2]
    return phrase("versions", rank=rank, version=version, first_rank=first_rank, first_version=first_version)


def _hang(failure: Failure) -> str:
    hang, where = failure.hang or HangFacts(), _place_after(failure)
    if not hang.phase:
        return phrase("stands_still", rank=failure.rank, place=where, cause=_cause(failure))
    text = phrase("hang", rank=failure.rank, place=where, timeout=render_timeout(hang), stacks=hang.stacks)
    if hang.waiting.count:
        name = "hang_wait_one" if hang.waiting.count == 1 else "hang_wait"
        text += phrase(name, waiting=names(hang.waiting, "rank"), late=names(hang.late, "rank"))
    return text + (phrase("hang_nccl", faults=hang.nccl) if hang.nccl else "")


def _lost_host(lost: LostHost) -> str:
    if lost.first_rank is None:
        host = phrase("host_alone", host=lost.host)
    else:
        name = "host_with_rank" if lost.first_rank == lost.last_rank else "host_with_ranks"
        host = phrase(name, host=lost.host, first=lost.first_rank, last=lost.last_rank)
    agent = "" if lost.agent_signal is None else phrase("lost_agent", **_signal(lost.agent_signal))
    return phrase("lost", host=host, reason=lost.reason or CATALOG["lost_unseen"], agent=agent)


def _lost_hosts(failure: Failure) -> str:
    return "; ".join(map(_lost_host, failure.lost_hosts))


def _not_joined(failure: Failure) -> str:
    wait = failure.rendezvous or RendezvousFacts()
    text = phrase("not_joined", hosts=names(wait.hosts), waited_s=wait.waited_s or 0.0, timeout=wait.timeout)
    return text + (phrase("not_joined_refused", refused="; ".join(wait.refused)) if wait.refused else "")


def _cannot_join(failure: Failure) -> str:
    wait = failure.rendezvous or RendezvousFacts()
    return phrase("cannot_join", address=wait.address, reason=failure.detail)


def _agent_ended(failure: Failure) -> str:
    if failure.signal is None:
        return phrase("agent_exited", code=failure.exit_code)
    return phrase("agent_killed", **_signal(failure.signal))


def _late(stop: StopFacts) -> str:
    return ", ".join(
        phrase("late_in_phase", ranks=names(ranks, "rank"), phase=phase or CATALOG["its_program"])
        for phase, ranks in stop.late.items()
    )


def _stopped(failure: Failure) -> str:
    stop = failure.stop or StopFacts(StopReason.OUTSIDE)
    reason = render_stop_reason(stop)
    if stop.outcome is StopOutcome.NOT_JOINED:
        return phrase("stop_not_joined", reason=reason)
    if stop.outcome is StopOutcome.NO_RANK:
        return phrase("stop_no_rank", reason=reason)
    if stop.outcome is StopOutcome.BETWEEN_ATTEMPTS:
        return phrase("stop_after", reason=reason, cause=_cause(failure))
    if stop.outcome is StopOutcome.SAVED:
        late = phrase("stop_late", late=_late(stop)) if stop.late else ""
        lost = "".join(f"; {_lost_host(lost)}" for lost in failure.lost_hosts)
        return phrase("stop_saved", reason=reason, step=stop.saved_step) + lost + late
    if stop.outcome is None:
        saved = CATALOG["nothing_saved"]
        if stop.committed_step is not None:
            saved = phrase("is_saved", step=stop.committed_step)
        if stop.deleted_step is not None:
            saved += phrase("was_deleted_by_other", step=stop.deleted_step)
        return reason + saved
    if stop.outcome is StopOutcome.NOT_REPORTED:
        text = phrase("stop_not_reported", reason=reason)
    elif failure.cause is not None:
        text = phrase("stop_not_saved_cause", reason=reason, cause=_cause(failure))
    elif failure.detail:
        text = phrase("stop_note", reason=reason, note=failure.detail)
    elif stop.late:
        text = phrase("stop_not_saved_cause", reason=reason, cause=_late(stop))
    else:
        text = phrase("stop_not_saved", reason=reason)
    text += CATALOG["stop_not_saved_killed"] if stop.was_killed else ""
    if stop.committed_step is not None:
        text += phrase("is_saved", step=stop.committed_step)
    if stop.deleted_step is not None:
        text += phrase("was_deleted", step=stop.deleted_step)
    return text


def _repeated(failure: Failure) -> str:
    name = "repeated_output" if failure.detail else "repeated"
    return phrase(name, cause=_cause(failure), output=failure.detail)


def _preempted(failure: Failure) -> str:
    name = "preempted_unseen" if failure.cause is None else "preempted"
    return phrase(name, count=failure.count, limit=failure.limit, cause=_cause(failure))


_RENDERERS: Mapping[FailureKind, Callable[[Failure], str]] = {
    FailureKind.OTHER: lambda failure: failure.detail,
    FailureKind.REFUSED: lambda failure: failure.detail,
    FailureKind.DONE: lambda failure: CATALOG["done_one" if failure.count == 1 else "done_all"],
    FailureKind.EXCEPTION: _exception,
    FailureKind.TRAINER_ERROR: _exception,
    FailureKind.EXIT_CODE: _of_process("exit_code"),
    FailureKind.SIGNAL: _of_process("killed"),
    FailureKind.OOM_KILLED: _of_process("oom_killed"),
    FailureKind.NOT_STARTED: _not_started,
    FailureKind.NO_TRAINER: _of_process("no_trainer"),
    FailureKind.ENDED_EARLY: _of_process("ended_early"),
    FailureKind.LEFT_EARLY: _of_process("left_early"),
    FailureKind.HANG: _hang,
    FailureKind.HEARTBEATS_MISSED: _of_process("heartbeats"),
    FailureKind.MIXED_VERSIONS: _versions,
    FailureKind.HOST_LOST: _lost_hosts,
    FailureKind.NOT_JOINED: _not_joined,
    FailureKind.CANNOT_JOIN: _cannot_join,
    FailureKind.AGENT_ENDED: _agent_ended,
    FailureKind.AGENTS_KILLED: _of_process("agents_killed"),
    FailureKind.UNRECORDED: lambda failure: phrase(
        "unrecorded", meaning=contract.outcome(failure.exit_code or 0).meaning
    ),
    FailureKind.RUN_KILLED: lambda failure: CATALOG["run_killed"],
    FailureKind.STOPPED: _stopped,
    FailureKind.REPEATED: _repeated,
    FailureKind.NO_PROGRESS: lambda failure: phrase("no_progress", count=failure.count, cause=_cause(failure)),
    FailureKind.PREEMPTED_TOO_OFTEN: _preempted,
}
