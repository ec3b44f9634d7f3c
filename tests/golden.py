"""Golden files: what is rendered, whole, or as the difference from a whole one.

A difference is a unified diff without line numbers, so that a change of the whole file alone
changes no difference. Its first line names the whole file, each hunk begins with the path of its
block, and applies at the first place below the hunk before it that has its unchanged and removed
lines.

After a change that is meant: GOLDEN=write pytest FILE, and read the diff.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxlaunch.launcher.yaml import writer

Documents = Sequence[Mapping[str, Any]]
Lines = list[str]

_IS_WRITING = os.environ.get("GOLDEN") == "write"
_WRITTEN: dict[Path, str] = {}  # the text of each whole: it is compared with many
_GAP = 1  # unchanged lines between two changes that make one hunk
# Blocks that a Kubernetes user knows by a shorter name.
_JOB = "JobSet.spec.replicatedJobs.w.template"
_SHORT = {f"{_JOB}.spec.template": "pod", _JOB: "job"}


def compare(documents: Documents, golden: Path) -> None:
    """Fails unless the documents are, as text, those of a golden file."""
    text = _text(documents)
    if _IS_WRITING:
        _write(golden, text)
    assert text == golden.read_text(encoding="utf-8")


def compare_difference(
    documents: Documents, golden: Path, wholes: Mapping[Path, Documents]
) -> None:
    """Fails unless the documents are, as text, a whole golden file changed as `golden` says.

    `wholes` are the whole golden files, and what is rendered to each; when written, the nearest is
    chosen.
    """
    name, text = _name(documents), _text(documents)
    if _IS_WRITING:
        for path in wholes.keys() - _WRITTEN.keys():
            _WRITTEN[path] = _text(wholes[path])
        renamed = {
            path: _WRITTEN[path].replace(_name(whole), name) for path, whole in wholes.items()
        }
        made = (
            [path.name, *difference(_lines(old), _lines(text))] for path, old in renamed.items()
        )
        _write(golden, "".join(f"{line}\n" for line in min(made, key=len)))
    whole, *hunks = golden.read_text(encoding="utf-8").splitlines()
    (path,) = (path for path in wholes if path.name == whole)
    # Its own is in a dozen places.
    old = path.read_text(encoding="utf-8").replace(_name(wholes[path]), name)
    assert _lines(text) == patched(_lines(old), hunks)


def difference(old: Lines, new: Lines) -> Lines:
    """The hunks that make the new lines of the old ones."""
    made: Lines = []
    end = 0  # of the hunk before, in `old`
    for change in _changes(old, new):
        first, last = change[0][1], change[-1][2]
        start = first
        while start > end and _place(old[start:last], old[end:]) != start - end:
            start -= 1
        at = _path(new, change[0][3]) if change[0][0] == "insert" else _path(old, first)
        made += [f"@@ {at} @@", *(f" {line}" for line in old[start:first])]
        for kind, i, j, k, m in change:
            made += [f"{' ' if kind == 'equal' else '-'}{line}" for line in old[i:j]]
            made += [f"+{line}" for line in new[k:m] if kind != "equal"]
        end = last
    return made


def patched(lines: Lines, hunks: Lines) -> Lines:
    """The lines after the hunks. Raises ValueError where one does not fit."""
    made: Lines = []
    for is_heading, group in itertools.groupby(hunks, key=lambda line: line.startswith("@@")):
        if is_heading:
            continue
        hunk = list(group)
        old = [line[1:] for line in hunk if line[0] in " -"]
        if (place := _place(old, lines)) is None:
            raise ValueError("\n".join(["a hunk that fits nowhere:", *hunk]))
        made += lines[:place] + [line[1:] for line in hunk if line[0] in " +"]
        lines = lines[place + len(old) :]
    return made + lines


def _text(documents: Documents) -> str:
    text = writer.render_documents(documents)
    # By libyaml: a tenth of the time.
    assert list(yaml.load_all(text, yaml.CSafeLoader)) == documents
    return text


def _name(documents: Documents) -> str:
    return str(documents[0]["metadata"]["name"])


def _write(golden: Path, text: str) -> None:
    golden.parent.mkdir(parents=True, exist_ok=True)
    golden.write_text(text, encoding="utf-8")


def _lines(text: str) -> Lines:
    """The lines; JSON has a line for each of its keys."""
    return [
        part
        for line in text.splitlines()
        for part in (_keys(line) if "value: '{" in line else [line])
    ]


def _keys(line: str) -> Iterator[str]:
    depth, start, indent = 0, 0, ""
    for place, sign in enumerate(line):
        depth += (sign in "{[") - (sign in "}]")
        if sign == "," and depth == 1:
            yield indent + line[start : place + 1]
            start, indent = place + 1, " " * (line.index("value") + 2)
    yield indent + line[start:]


def _changes(old: Lines, new: Lines) -> Iterator[list[tuple[str, int, int, int, int]]]:
    """Yield the groups of adjacent changes, as difflib writes them."""
    run: list[tuple[str, int, int, int, int]] = []
    for opcode in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if opcode[0] != "equal" or (run and opcode[2] - opcode[1] <= _GAP and opcode[2] < len(old)):
            run.append(opcode)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _place(wanted: Lines, lines: Lines) -> int | None:
    """Where the lines are first found; nowhere if there are none."""
    places = range(len(lines) - len(wanted) + 1 if wanted else 0)
    return next((place for place in places if lines[place : place + len(wanted)] == wanted), None)


def _path(lines: Lines, place: int) -> str:
    """Return the path of a line's block: `pod.spec.containers.main.env`, `NetworkPolicy.spec`."""
    keys: Lines = []
    depth = _depth(lines[place])
    for line in itertools.takewhile(lambda line: line != "---", reversed(lines[:place])):
        if line.startswith("kind: "):
            keys.append(line.removeprefix("kind: "))
        elif _depth(line) < depth:
            depth = _depth(line)
            if match := re.fullmatch(r" *(?:- name: (\S+)|([^ -][^:]*):.*)", line):
                keys.append(match[1] or match[2])
    path = ".".join(reversed(keys))
    return next(
        (path.replace(long, short, 1) for long, short in _SHORT.items() if path.startswith(long)),
        path,
    )


def _depth(line: str) -> float:
    """How deep a line is; a list's items begin no further to the right than its key."""
    text = line.lstrip()
    return len(line) - len(text) + (0.5 if text.startswith("- ") else 0)
