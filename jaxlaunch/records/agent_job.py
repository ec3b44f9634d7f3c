"""The part of a job that its agents read, out of the text that contract.AgentJob writes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from jaxlaunch.contract import AgentJob
from jaxlaunch.records import checked

# Fields of an AgentJob in version 0.1, whose JobSets and run folders may still be read; until version 0.3.
_RENAMED = {
    "budgets_s": "timeouts_s",
    "crash_budget": "crash_limit",
    "in_place_budget": "in_place_limit",
    "preempted_budget": "preempted_limit",
}


def read_agent_job(text: str) -> AgentJob:
    """The job of JAXLAUNCH_JOB. Raises ValueError, which says what is wrong with which field."""
    fields = checked.decoded(text)
    if isinstance(fields, Mapping):
        fields = {_RENAMED.get(name, name): value for name, value in fields.items()}
    return checked.read(AgentJob, fields)
