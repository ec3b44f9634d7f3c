"""The failure policies of a JobSet and its Jobs, which decide what follows a failed pod. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import LEFT_GANG, OUTCOMES, Action
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.kubernetes.labels import MAIN_CONTAINER
from jaxlaunch.trainer.spec.block import MAX_INT32


def exit_codes(action: Action) -> list[int]:
    """Return the exit codes to which JobSet responds with this action."""
    return sorted(code for code, outcome in OUTCOMES.items() if outcome.action is action)


def failure_policy(
    names: Sequence[str], max_restarts: int, *, has_deadline: bool
) -> dict[str, Any]:
    """Return JobSet's rules for a failed Job; the first match applies.

    The patterns match messages of Kubernetes' pod failure policy. After any other failure, all pods
    are restarted, which counts toward `restarts.crash`.
    """

    def exit_code_pattern(action: Action) -> str:
        numbers = "|".join(map(str, exit_codes(action)))
        return f"failed with exit code {numbers if '|' not in numbers else f'({numbers})'} matching"

    targets = {"targetReplicatedJobs": list(names)}
    free = f"has condition DisruptionTarget|{exit_code_pattern(Action.RESTART_UNCHARGED)}"
    rules = [
        _failure_rule("stopped_from_outside", Action.RESTART_UNCHARGED, targets, free),
        _failure_rule("permanent", Action.FAIL, targets, exit_code_pattern(Action.FAIL)),
    ]
    if has_deadline:
        rules.append(_failure_rule("deadline", Action.FAIL, targets))
    limit = {"maxRestarts": max_restarts, "restartStrategy": "BlockingRecreate"}
    return {**limit, "rules": rules}


def _failure_rule(
    name: str, action: Action, targets: Mapping[str, Any], pattern: str | None = None
) -> dict[str, Any]:
    rule = {"name": name, "action": action.value, **targets}
    if pattern is None:
        return {**rule, "onJobFailureReasons": ["DeadlineExceeded"]}
    patterns = {"onJobFailureMessagePatterns": [pattern]}
    return {**rule, "onJobFailureReasons": ["PodFailurePolicy"], **patterns}


def job_spec(job: JobSpec, *, replaces_hosts: bool, may_fail: bool) -> dict[str, Any]:
    """Return the specification of each Job, without its pod template."""
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.pods,
        "parallelism": job.pods,
        "podReplacementPolicy": "Failed",
    }
    if replaces_hosts:
        spec |= _replacement_spec(job, may_fail=may_fail)
    else:
        # A failed pod ends its Job at once, and JobSet decides what follows.
        deciding_codes = sorted([*exit_codes(Action.FAIL), *exit_codes(Action.RESTART_UNCHARGED)])
        rules = [_disruption_rule("FailJob"), _exit_code_rule("FailJob", deciding_codes)]
        spec |= {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}
    if job.deadline is not None:
        # This limits the time of each Job. Only Kueue limits the sum over restarts.
        spec["activeDeadlineSeconds"] = int(job.deadline)
    return spec


def _replacement_spec(job: JobSpec, *, may_fail: bool) -> dict[str, Any]:
    """Return the keys of a Job that replaces each failed pod alone, while the other hosts wait.

    The pods of a TPU slice are always replaced together. Exit codes on which the gang has agreed
    still end the Job. Disruptions, and pods that the gang has stopped, do not count. The limit
    applies to each pod. Kubernetes delays a replacement by 10 s, doubled for each failure of the
    same pod.
    """
    rules = [
        _exit_code_rule("FailJob", list(contract.GANG_CODES)),
        _disruption_rule("Ignore"),
        _exit_code_rule("Ignore", [LEFT_GANG]),
    ]
    spare_pods = job.pods - min(job.trainable_host_counts, default=job.pods)
    # A Job that fails would end or restart the whole JobSet.
    limit = MAX_INT32 if may_fail else job.restarts.crash
    limits: dict[str, Any] = {"backoffLimitPerIndex": limit}
    limits["maxFailedIndexes"] = spare_pods
    # Host 0 ends last, so its success completes the Job even if other pods were never replaced.
    if spare_pods:
        limits["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    return {**limits, "podFailurePolicy": {"rules": rules}}


def _disruption_rule(action: str) -> dict[str, Any]:
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _exit_code_rule(action: str, values: list[int]) -> dict[str, Any]:
    codes = {"containerName": MAIN_CONTAINER, "operator": "In", "values": values}
    return {"action": action, "onExitCodes": codes}
