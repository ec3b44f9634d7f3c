"""The job of a run as its folder keeps it: its text, some of its keys, and what differs between two of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch import regular_files
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.wording import visible
from jaxlaunch.launcher.yaml import reader, writer
from jaxlaunch.records.summary import Start, Summary
from jaxlaunch.runs import layout
from jaxlaunch.runs.run_folder import RunFolder

FILE = "job.yaml"
_LONGEST = 300  # characters of a value
_MADE_OF = {"code": "digest of code"}
_PRIVATE = ("env",)  # blocks whose values no page repeats: somebody puts a token there


def read(path: Path) -> dict[str, Any]:
    """The job in a file as plain values; empty where there is none that can be read. Others may write there."""
    try:
        found = reader.read(path, regular_files.beneath(path.parent)).data
    except (OSError, UserError):
        return {}
    return found if isinstance(found, dict) else {}


def text(folder: Path) -> str:
    """The job of a run as YAML, without the values of its environment."""
    job = read(folder / FILE)
    for block in _PRIVATE:
        if isinstance(job.get(block), dict):
            job[block] = dict.fromkeys(job[block], "…")
    return visible(writer.document(job)) if job else ""


def flat(job: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Its keys as overrides write them, with their values; those of private blocks say only that they are set."""
    for key, value in job.items():
        path = f"{before}{key}"
        if isinstance(value, dict) and value:
            yield from flat(value, f"{path}.")
        else:
            yield visible(path), "…" if before.startswith(tuple(f"{block}." for block in _PRIVATE)) else _shown(value)


def _shown(value: Any) -> str:
    found = "true" if value is True else "false" if value is False else "null" if value is None else str(value)
    return visible(found)[:_LONGEST]


def differences(jobs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The keys that not all jobs have with one value, and the value of each; a key that one lacks is "–" there."""
    return differing([dict(flat(job)) for job in jobs])


def differing(tables: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """The keys that not all tables have with one value, and the value of each; a key that one lacks is "–" there."""
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [(key, [table.get(key, "–") for table in tables]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def changes(folder: Path, starts: Sequence[Start]) -> list[dict[str, Any]]:
    """What each start of a run changed since the one before it that trained, as its rows say."""
    found = []
    for start in starts:
        for key, values in start.changed.items():
            then, now = (*map(_shown, values), "", "")[:2]
            found.append({"start": start.start, "key": visible(key), "then": then, "now": now})
    kept = RunFolder(folder)
    before: dict[str, str] = {}
    for start in starts:
        name = layout.SUMMARY if start is starts[-1] else layout.start_file(start.start, layout.SUMMARY)
        now_made = made_of(kept.summary(name=name))
        for key in before.keys() & now_made.keys():
            if before[key] != now_made[key]:
                found.append({"start": start.start, "key": key, "then": before[key], "now": now_made[key]})
        before |= now_made
    return sorted(found, key=lambda one: one["start"])


def made_of(found: Summary | None) -> dict[str, str]:
    """What a run, or a start of it, was made of beside its job, as keys beside those of the job."""
    known = {} if found is None or found.of is None else found.of.made_of
    return {_MADE_OF.get(name, f"version of {visible(name)[:_LONGEST]}"): _shown(each) for name, each in known.items()}


def best(folder: Path) -> tuple[str | None, str]:
    """The metric by which the job keeps its best step, and which way it gets better."""
    found = _at(read(folder / FILE), "train", "checkpoint", "best")
    if not isinstance(found, dict):
        return None, "min"
    return str(found.get("metric", "eval/loss")), str(found.get("mode", "min"))


def epochs(folder: Path) -> float | None:
    """How often the job passes over its data; None where it counts steps."""
    found = _at(read(folder / FILE), "train", "epochs")
    return float(found) if type(found) in (int, float) else None


def batch(folder: Path) -> int | None:
    """The examples of a step; None where the job does not say."""
    found = _at(read(folder / FILE), "train", "batch")
    return found if type(found) is int else None


def quoted(folder: Path) -> str:
    """The folder of a run as commands are given it: below the working folder without what leads there."""
    try:
        return shlex.quote(str(folder.relative_to(Path.cwd())))
    except ValueError:
        return shlex.quote(str(folder))


def _at(job: Any, *keys: str) -> Any:
    for key in keys:
        job = job.get(key) if isinstance(job, dict) else None
    return job
