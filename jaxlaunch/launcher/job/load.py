"""Reading and writing of job.yaml, with dotted overrides of the command line such as `train.steps=100`.

All faults of a file are reported at once. Validation therefore runs in rounds: each round removes the values that the
previous one refused, or replaces those that are required, until the rest is valid and the checks across keys can run.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxlaunch import regular_files
from jaxlaunch.launcher.errors import SHOWN_FAULTS, Fault, JobFaults, KeyPath
from jaxlaunch.launcher.job import checks, credentials, introspection, messages
from jaxlaunch.launcher.job.schema import AS_WRITTEN, JobSpec
from jaxlaunch.launcher.wording import cut, dotted
from jaxlaunch.launcher.yaml import reader, writer
from jaxlaunch.launcher.yaml.reader import AFTER_THE_FILE, Document

__all__ = ["JobFile", "JobSpec", "dump", "kept", "load", "parse", "read", "read_text"]

# Replaces a required value that is wrong, so that the rest can still be checked. Never part of a result.
_STAND_INS: dict[KeyPath, Any] = {
    ("name",): "x",
    ("accelerator",): {"type": "cpu"},
    ("train", "task"): "stand_in:Task",
}
# Each round removes what the previous one refused.
_MOST_ROUNDS = 8


@dataclasses.dataclass(frozen=True)
class JobFile:
    """A job, the document it was read from, and the folder that its paths are relative to."""

    spec: JobSpec
    source: Document
    folder: Path


def read(path: str | Path, overrides: Sequence[str] = ()) -> JobFile:
    """Read a job file, with dotted overrides such as `train.steps=100`.

    Raises JobFaults with all faults, and UserError if the file cannot be read.
    """
    source = reader.read(Path(path))
    return JobFile(_job(source, overrides), source, Path(path).absolute().parent)


def read_text(text: str, name: str = "job.yaml", folder: Path = Path()) -> JobFile:
    """Read a job from a text, which faults call `name`. Raises JobFaults."""
    source = reader.parse(text, name)
    return JobFile(_job(source), source, folder)


def load(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job file and return only its specification."""
    return read(path, overrides).spec


def kept(folder: Path, overrides: Sequence[str] = (), below: Path | None = None) -> JobSpec:
    """Read the job that a run folder contains. Raises JobFaults, UserError.

    With `below`, links inside that folder are not followed, because other users may write to it.
    """
    opener = regular_files.opener if below is None else regular_files.beneath(below)
    return _job(reader.read(folder / "job.yaml", opener), overrides)


def parse(text: str, name: str = "job.yaml") -> JobSpec:
    """Read a job from a text and return only its specification."""
    return read_text(text, name).spec


def _override(source: Document, overrides: Sequence[str]) -> None:
    for argument in overrides:
        override = parse_override(argument)
        if isinstance(override, Fault):
            source.faults.append(override)
            continue
        if source.data is None:
            source.data = {}
        if (fault := put_override(override, source.data)) is not None:
            source.faults.append(fault)
            continue
        source.forget(override.path)
        source.texts.update(override.texts)
        source.overrides[override.path] = override.shown


def _job(source: Document, overrides: Sequence[str] = ()) -> JobSpec:
    _override(source, overrides)
    faults = [messages.with_wanted_number(fault) for fault in source.faults]
    spec = None
    if isinstance(source.data, dict):
        spec = _judge(source, faults)
    elif not faults:
        kind = "empty" if source.data is None else "a list" if isinstance(source.data, list) else "plain text"
        faults.append(Fault((), f"is {kind}, not a block of keys.", "`launcher init` writes a first job."))
    if spec is None or faults:
        raise JobFaults([source.locate(fault) for fault in faults])
    return spec


def _judge(source: Document, faults: list[Fault]) -> JobSpec | None:
    """Return the specification as far as it is valid, and add all faults to `faults`."""
    data = _as_written(source)
    not_built = list(_not_built(source.data))
    broken = {fault.path for fault in (*faults, *not_built) if fault.path}
    faults += [*_secrets(data), *_two_readings(source), *_one_program(source.data), *not_built]
    for path in broken:
        _take_away(data, path)
    for _ in range(_MOST_ROUNDS):
        try:
            spec = JobSpec.model_validate(data)
        except ValidationError as error:
            new = list(messages.translate(error, source))
            faults += [fault for fault in new if not any(path and fault.path[: len(path)] == path for path in broken)]
            for fault in new:
                broken |= {fault.path, _take_away(data, fault.path)}
            if len(faults) > SHOWN_FAULTS:
                return None
        else:
            faults.extend(checks.run(spec, broken))
            return spec
    return None


def _as_written(source: Document) -> Any:
    """Return the data with scalars as written where the schema expects text: `--lr 3e-4` must not become 0.0003."""
    data = copy.deepcopy(source.data)
    for block in AS_WRITTEN:
        items = data.get(block)
        pairs = items.items() if isinstance(items, dict) else enumerate(items) if isinstance(items, list) else ()
        for key, value in list(pairs):
            if isinstance(value, int | float):
                items[key] = source.texts[(block, key)]
    return data


def _take_away(data: Any, path: KeyPath) -> KeyPath:
    """Remove the value at a path, or the nearest enclosing block that exists, and return the removed path."""
    path = tuple(itertools.takewhile(lambda key: not isinstance(key, int), path))
    while path:
        block = messages.value_at(data, path[:-1])
        if path in _STAND_INS:
            block[path[-1]] = copy.deepcopy(_STAND_INS[path])
            break
        if isinstance(block, dict) and path[-1] in block:
            del block[path[-1]]
            break
        path = path[:-1]
    return path


# --- faults of the text, before types are validated -------------------------------------------------------------------


def _secrets(data: Any) -> Iterator[Fault]:
    reasons = data.get("allow_literal")
    allowed = {key for key, reason in reasons.items() if reason} if isinstance(reasons, dict) else set()
    for path, text in credentials.strings(data):
        name, where = _variable(data, path), dotted(path)
        if credentials.in_value(text, name) and where not in allowed:
            instead = f"write secrets: {{{name or 'NAME'}: {{name: my-secret, key: token}}}}"
            if path[0] in ("pod", "init") and name:
                instead = "use valueFrom: {secretKeyRef: …}"
            elif not name:
                instead += ", and read that variable"
            hint = f"put it in a Secret and {instead}; if it is none, allow_literal: {{{where}: REASON}}."
            yield Fault(path, f"{where} holds a credential, and everyone who sees the job sees it.", hint)


def _variable(data: Any, path: KeyPath) -> str:
    """Return the name of the environment variable whose value is at this path, empty if it is none."""
    if path[0] == "env":
        return str(path[-1])
    beside = messages.value_at(data, path[:-1]) if path[-1] == "value" else None
    return str(beside.get("name", "")) if isinstance(beside, dict) else ""


def _two_readings(source: Document) -> Iterator[Fault]:
    """Yield faults for numbers such as 010 that YAML 1.1 and 1.2 read differently."""
    for path, text in source.texts.items():
        if path[:1] and path[0] not in AS_WRITTEN and reader.has_two_readings(text):
            decimal, octal = int(text), int(text, 8) if not set(text) & set("89") else None
            older = "text" if octal is None else octal
            message = f"{messages.describe(source, path)} has two readings: {decimal} in YAML 1.2, {older} in YAML 1.1."
            yield Fault(path, message, f'write {decimal}, or "{text}" for text.')


def _one_program(data: Any) -> Iterator[Fault]:
    programs = [key for key in ("command", "train") if data.get(key) is not None]
    if len(programs) == 2:
        hint = "keep train for the built-in trainer, command for any other."
        yield Fault(("train",), "command and train are both given.", hint)
    elif not programs:
        hint = "train: {task: classify}, or command: [python, train.py]"
        yield Fault((), "neither train nor command is given: there is nothing to run.", hint)


# Keys, and the values of each that are not supported yet; empty for all values.
_NOT_BUILT: Mapping[KeyPath, tuple[str, ...]] = {
    ("jobs",): (),
    ("train", "mesh", "cp"): (),
    ("train", "mesh", "pp"): (),
    ("train", "precision"): ("fp8", "int8"),
    ("train", "precision", "compute"): ("fp8", "int8"),
    ("train", "checkpoint", "memory"): (),
    ("train", "checks"): (),
}


def _not_built(data: Any) -> Iterator[Fault]:
    for path, values in _NOT_BUILT.items():
        value = messages.value_at(data, path)
        if value is not None and (not values or value in values):
            what = f"{dotted(path)} = {value}" if values else dotted(path)
            yield Fault(path, f"{what} is not supported yet.", "leave it out.")


# --- writing and overrides --------------------------------------------------------------------------------------------


def dump(job: JobSpec) -> str:
    """Return the job as YAML, including overrides. Reading it gives an equal job.

    Defaults are not written, because they would then take precedence over the defaults of the task.
    """
    return writer.document(job.model_dump(mode="json", by_alias=True, exclude_unset=True))


@dataclasses.dataclass(frozen=True)
class Override:
    """A parsed override of the command line."""

    path: KeyPath
    value: Any
    texts: Mapping[KeyPath, str]  # of the value's plain scalars, by their path in the job
    shown: str  # the argument as messages repeat it


def parse_override(argument: str) -> Override | Fault:
    """Parse an override, or return the fault that prevents it."""
    try:
        # In a C locale, Python decodes arguments as ASCII and represents other bytes as surrogates.
        argument = argument.encode(errors="surrogateescape").decode()
    except UnicodeError:
        legible = argument.encode(errors="replace").decode()
        return _fault(_shown(legible), "is not UTF-8.", "check how the shell writes it.")
    key, equals, text = argument.partition("=")
    if key.startswith("-"):
        hint = "a key has none, as in hosts=2; arguments of your program belong in its command:."
        return _fault(_shown(argument), "begins with a dash.", hint)
    if not equals or not all(part.strip() for part in key.split(".")):
        return _fault(_shown(argument), "is not of the form key=value.", "for example hosts=2")
    path = _path(key)
    value = reader.parse(text, "override", path)
    if value.faults:
        first = value.faults[0]
        hint = f"""quote the value, and the whole for the shell: '{key}="…"'."""
        return dataclasses.replace(first, where=f"{_shown(argument)} (override)", line=AFTER_THE_FILE, hint=hint)
    return Override(path, value.data, value.texts, _shown(argument))


def override_argument(key: str, value: Any) -> str:
    """Return the argument that sets a key to a value, not quoted for a shell."""
    if isinstance(value, Mapping):
        value = "{" + ", ".join(f"{name}: {item}" for name, item in value.items()) + "}"
    elif isinstance(value, list):
        value = f"[{', '.join(map(str, value))}]"
    return f"{key}={value}"


def put_override(override: Override, data: Any) -> Fault | None:
    """Set the value in plain data and create missing blocks; return a fault if a list or a scalar prevents it."""
    path = override.path
    for depth, key in enumerate(path):
        is_last = depth == len(path) - 1
        if isinstance(data, dict):
            key = str(key)
            if not is_last and data.get(key) is None:
                if _is_list(path[: depth + 1]):
                    return _no_entry(override, depth + 1)
                data[key] = {}
        elif not (isinstance(data, list) and isinstance(key, int) and key < len(data)):
            return _no_entry(override, depth)
        if is_last:
            data[key] = override.value
        data = data[key]
    return None


def _is_list(path: KeyPath) -> bool:
    return any(kind.items is not None for kind in introspection.at(JobSpec, path))


def _no_entry(override: Override, depth: int) -> Fault:
    above, key = override.path[:depth], override.path[depth]
    whole = "list instead, as [value]" if _is_list(above) else "block instead, as {key: value}"
    return _fault(override.shown, f"{dotted(above)} has no entry {cut(str(key))}.", f"set the whole {whole}.")


def _fault(shown: str, message: str, hint: str | None) -> Fault:
    return Fault((), message, hint, where=f"{shown} (override)", line=AFTER_THE_FILE)


def _path(key: str) -> KeyPath:
    return tuple(int(part) if part.isdecimal() else part for part in key.strip().split("."))


def _shown(argument: str) -> str:
    """Return the argument as shown in messages: truncated, and without a value that may be secret."""
    key, equals, text = argument.partition("=")
    # Without an equals sign, everything after the first name may be the value.
    if not equals:
        return cut(argument) if not credentials.is_private(_path(key)) else f"{key.partition('.')[0]}…"
    hidden = credentials.is_private(_path(key)) or credentials.in_value(text)
    return f"{key}=…" if hidden else cut(argument)
