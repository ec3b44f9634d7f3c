"""What host 0 and the hosts send to each other once both have proven the key, read as strictly on either side. Pure.

A host may run a damaged or an older agent: a message of the wrong form ends the connection, and no agent. What a host
reports of its ranks is in gang/verdict (events) and gang/progress (statuses).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from jaxlaunch.records.checked import Cause, ExitCode, Seconds, Whole, at_most, like
from jaxlaunch.records.failure import DiskExcess
from jaxlaunch.records.members import Wire
from jaxlaunch.records.summary import Of
from jaxlaunch.records.verdict import Verdict

Text = Annotated[str, at_most(4_000)]


@dataclasses.dataclass(frozen=True)
class Welcome:
    """Host 0 admits a host."""

    epoch: Annotated[str, at_most(64)]


@dataclasses.dataclass(frozen=True)
class Refused:
    """Host 0 does not."""

    message: Text
    code: ExitCode
    may_retry: bool


@dataclasses.dataclass(frozen=True)
class Start:
    """A host starts its processes."""

    attempt: Whole
    coordinator: Annotated[str, like(r"\S{1,300}:\d{1,5}")]
    start: Whole
    members: Wire  # which hosts hold ranks
    saved: Whole | None = None  # by earlier attempts; 0: they only trained; None: none did


@dataclasses.dataclass(frozen=True)
class Judged:
    """An attempt has ended: a host kills its processes."""

    attempt: Whole
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class Leave:
    """Every host may exit; `alone`: this one, for which another takes its place."""

    verdict: Verdict
    alone: bool = False


@dataclasses.dataclass(frozen=True)
class State:
    """All hosts, for the metrics of each; what host 1 puts on record when host 0 is lost."""

    attempt: Whole
    of: Of
    seconds: Mapping[str, Seconds]
    unsafe_s: Seconds = 0.0
    foremost: Whole | None = None
    silence_s: Seconds = 0.0
    ended: Mapping[Cause, Whole] = dataclasses.field(default_factory=dict)
    left: Mapping[str, Whole] = dataclasses.field(default_factory=dict)
    code: ExitCode | None = None


@dataclasses.dataclass(frozen=True)
class Ping:
    """Host 0 lives."""

    gang: State


@dataclasses.dataclass(frozen=True)
class Stop:
    """A host was told to stop; for an `excess` of its own if it used more of its node's disk than it may."""

    excess: DiskExcess | None = None


FROM_LEADER: Mapping[str, Any] = {"ping": Ping, "start": Start, "verdict": Judged, "leave": Leave}
