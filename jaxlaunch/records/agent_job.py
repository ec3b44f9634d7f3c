"""The part of a job that its agents read, out of the text that contract.AgentJob writes. Pure."""

from __future__ import annotations

from jaxlaunch.contract import AgentJob
from jaxlaunch.records import checked


def read_agent_job(text: str) -> AgentJob:
    """The job of JAXLAUNCH_JOB. Raises ValueError, which says what is wrong with which field."""
    return checked.read(AgentJob, checked.decoded(text))
