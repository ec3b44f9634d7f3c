"""What the run folder of a job holds, as launcher/jobs/status/read_run answers it from a pod. Pure.

The files are on a volume that others may write, and the program runs in the job's own image: everything is checked.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import hashlib
import json
import zlib
from collections.abc import Iterable
from typing import Any

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.jobs.status import read_run
from jaxlaunch.launcher.jobs.status.agent_report import AttemptEnd
from jaxlaunch.records import checked
from jaxlaunch.records.checked import Malformed, Whole
from jaxlaunch.records.log_lines import Recorded, shortened
from jaxlaunch.records.summary import Record, Summary, ratio

MAX_LOGS = 16 * 1024 * 1024  # bytes of all logs together
_MAX_ANSWER = 8 * MAX_LOGS  # bytes of JSON, in which a letter may take six
_MAX_ATTEMPTS = 20  # the newest


@dataclasses.dataclass(frozen=True)
class RankText:
    """The last lines of a rank, of all attempts; `left_out` bytes are before them."""

    rank: Whole
    text: str
    left_out: Whole

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of the text."""
        return tuple(self.text.splitlines())


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The files of a run folder that are of this job. None or empty: not there, or not of this job."""

    recorded: Recorded | None
    attempts: tuple[AttemptEnd, ...]
    logs: tuple[RankText, ...]


def read(lines: Iterable[str], uid: str) -> RunFiles:
    """The answer in a pod's log, of the job whose JobSet has this uid. Raises UserError when it is not whole."""
    answer = _answer(lines)
    return RunFiles(
        _recorded(answer.get("summary"), uid),
        tuple(_attempts(answer.get("attempts"), uid))[-_MAX_ATTEMPTS:],
        _logs(answer.get("logs")),
    )


def _answer(lines: Iterable[str]) -> dict[str, Any]:
    """The answer as JSON gives it; other lines, such as an image's greeting, are passed over."""
    parts, size, digest, other = list[str](), 0, None, ""
    for line in lines:
        if line.startswith(read_run.PREFIX):
            parts.append(line.removeprefix(read_run.PREFIX))
            size += len(parts[-1])
            if size > _MAX_ANSWER:
                raise _broken(f"it is longer than {_MAX_ANSWER} bytes")
        elif line.startswith(read_run.END):
            digest = line.removeprefix(read_run.END)
        else:
            other = line
    if digest is None:
        raise _broken(f"it has no end; the last line is {other[:200]!r}" if other else "it has no end")
    try:
        packed = base64.b64decode("".join(parts), validate=True)
        if hashlib.sha256(packed).hexdigest() != digest:
            raise _broken("lines of it are missing")
        answer = json.loads(zlib.decompressobj().decompress(packed, _MAX_ANSWER))
    except (binascii.Error, zlib.error, ValueError, RecursionError) as error:
        raise _broken(str(error)) from None
    if not isinstance(answer, dict):
        raise _broken("it is not an object")
    return answer


def _broken(why: str) -> UserError:
    return UserError(f"What the pod answered of the run folder cannot be used: {why}.", "try again.")


def _recorded(text: Any, uid: str) -> Recorded | None:
    """What summary.json says; None for another run's, and for what is no such file."""
    try:
        found = Summary.from_json(checked.decode_line(text.encode()))
        if found.of is None:
            return None
        of, verdict = checked.fields_of(found.of), found.verdict and found.verdict.to_json()
        reached = {"step": found.step, "committed": found.saved, "goodput": ratio(found.seconds)}
        return Recorded.read({**of, **reached, "when": "volume", "ends": found.restarts, "verdict": verdict}, uid)
    except (ValueError, AttributeError):
        return None


def _attempts(text: Any, uid: str) -> Iterable[AttemptEnd]:
    """The attempts of this job in attempts.jsonl, the oldest first; what is no such line is left out."""
    for line in text.splitlines() if isinstance(text, str) else ():
        with contextlib.suppress(ValueError):
            one = checked.read(Record, checked.decode_record(line))
            if one.uid == uid:
                yield AttemptEnd(shortened(one.verdict), one.attempt, one.generation, one.ended)


def _logs(found: Any) -> tuple[RankText, ...]:
    """The logs of the ranks. Raises UserError when they are none."""
    try:
        return tuple(checked.read(RankText, one) for one in found) if isinstance(found, list) else ()
    except Malformed as error:
        raise _broken(f"of a log {error}") from None
