"""Reading and writing of job.yaml, with overrides such as `train.steps=100`.

All faults of a file are reported at once. Validation therefore runs in rounds: each round removes
the values that the previous one refused, or replaces those that are required, until the rest is
valid and the checks across keys can run.
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
from jaxlaunch.launcher.errors import MAX_SHOWN_FAULTS, Fault, JobFaultsError, KeyPath
from jaxlaunch.launcher.job import checks, credentials, introspection, messages, roles
from jaxlaunch.launcher.job.schema import VERBATIM_KEYS, JobSpec, Role
from jaxlaunch.launcher.wording import format_key_path, shorten_text
from jaxlaunch.launcher.yaml import reader, writer
from jaxlaunch.launcher.yaml.reader import LINE_AFTER_FILE, Document

__all__ = [
    "JobFile",
    "JobSpec",
    "RoleJob",
    "dump_job",
    "load_job",
    "parse_job",
    "read_job",
    "read_job_text",
    "read_run_job",
]

# Valid values that replace required values with faults, so that the rest can still be checked. They
# are never part of a result.
_STAND_INS: dict[KeyPath, Any] = {
    ("name",): "x",
    ("accelerator",): {"type": "cpu"},
    ("train", "task"): "stand_in:Task",
}
_MISSING = object()
# Limits the loop in case that a fault has no value that can be removed.
_MAX_ROUNDS = 8


@dataclasses.dataclass(frozen=True)
class JobFile:
    """A job, the document it was read from, and the folder that its paths are relative to."""

    spec: JobSpec
    source: Document
    folder: Path
    # In the order in which they start. If there are some, `spec` is that of the lead.
    roles: tuple[RoleJob, ...] = ()
    # Contents of files that are shipped with the code, by their names in it.
    code_files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the job."""
        return str(self.source.data["name"]) if self.roles else self.spec.name

    @property
    def lead(self) -> RoleJob | None:
        """The first role that ends the job; None without roles."""
        return next((role for role in self.roles if role.role.ends), None)

    def with_values(self, **values: Any) -> JobFile:
        """Return the job, and each of its roles, with these values of keys."""
        role_jobs = tuple(
            dataclasses.replace(role, file=role.file.with_values(**values)) for role in self.roles
        )
        lead = next((role.file.spec for role in role_jobs if role.role.ends), None)
        spec = lead or self.spec.model_copy(update=values)
        return dataclasses.replace(self, spec=spec, roles=role_jobs)

    def list_parts(self) -> list[tuple[JobFile, tuple[str, Role] | None]]:
        """Return the file of each role with its name and settings, or this file alone."""
        return [(role.file, (role.name, role.role)) for role in self.roles] or [(self, None)]


@dataclasses.dataclass(frozen=True)
class RoleJob:
    """A role of a job, as a job of its own whose name is `JOB-ROLE`."""

    name: str
    role: Role
    file: JobFile


def read_job(
    path: str | Path, overrides: Sequence[str] = (), *, may_have_roles: bool = False
) -> JobFile:
    """Read a job file, with dotted overrides such as `train.steps=100`.

    Raises JobFaultsError with all faults, and UserError if the file cannot be read, or has roles
    and may not.
    """
    source, folder = reader.read_document(Path(path)), Path(path).absolute().parent
    return _build_file(source, folder, overrides, may_have_roles)


def read_job_text(
    text: str, name: str = "job.yaml", folder: Path = Path(), *, may_have_roles: bool = False
) -> JobFile:
    """Read a job from a text. Faults show `name` as its file. Raises JobFaultsError."""
    return _build_file(reader.parse_document(text, name), folder, (), may_have_roles)


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job file and return only its specification."""
    return read_job(path, overrides).spec


def read_run_job(folder: Path, overrides: Sequence[str] = (), root: Path | None = None) -> JobSpec:
    """Read the job of a run folder. Raises JobFaultsError and UserError.

    Links inside `root` are not followed, because other users may write to that folder.
    """
    opener = regular_files.open_regular if root is None else regular_files.make_opener(root)
    return _build_job(reader.read_document(folder / "job.yaml", opener), overrides)


def parse_job(text: str, name: str = "job.yaml") -> JobSpec:
    """Read a job from a text and return only its specification."""
    return read_job_text(text, name).spec


def _apply_overrides(source: Document, overrides: Sequence[str]) -> None:
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
        source.forget_path(override.path)
        source.texts.update(override.texts)
        source.overrides[override.path] = override.redacted


def _build_file(
    source: Document, folder: Path, overrides: Sequence[str], may_have_roles: bool
) -> JobFile:
    if may_have_roles:
        _apply_overrides(source, overrides)
        if messages.value_at(source.data, ("jobs",)) is not None:
            return _build_roles(source, folder)
        overrides = ()
    return JobFile(_build_job(source, overrides), source, folder)


def _build_job(source: Document, overrides: Sequence[str] = ()) -> JobSpec:
    _apply_overrides(source, overrides)
    faults = [messages.add_expected_number(fault) for fault in source.faults]
    spec = None
    if messages.value_at(source.data, ("jobs",)) is not None:
        message = "jobs: this command does not support a job with roles."
        faults.append(
            Fault(("jobs",), message, "run, validate, plan, render and submit support them.")
        )
        raise JobFaultsError([source.locate(fault) for fault in faults])
    if isinstance(source.data, dict):
        spec = _validate_data(source, faults)
    elif not faults:
        kind = {type(None): "empty", list: "a list"}.get(type(source.data), "plain text")
        hint = "`launcher init` writes a first job."
        faults.append(Fault((), f"is {kind}, not a block of keys.", hint))
    if spec is None or faults:
        raise JobFaultsError([source.locate(fault) for fault in faults])
    return spec


def _build_roles(source: Document, folder: Path) -> JobFile:
    """Return a job with roles, each validated as a job of its own."""
    faults = [messages.add_expected_number(fault) for fault in source.faults]
    blocks = source.data["jobs"]
    stub = {"name": "x", "accelerator": {"type": "cpu"}, "command": ["x"], "jobs": blocks}
    try:
        settings = JobSpec.model_validate(stub).jobs or {}
    except ValidationError as error:
        faults += messages.translate_errors(error, source)
        raise JobFaultsError([source.locate(fault) for fault in faults]) from None
    faults += roles.find_role_faults(source.data, settings)
    located = {source.locate(fault): None for fault in faults}
    role_jobs = []
    for name in roles.sort_roles(settings):
        document = roles.role_document(source, name)
        role_faults: list[Fault] = []
        spec = _validate_data(document, role_faults)
        unsupported = (
            [] if spec is None else list(roles.find_unsupported_keys(spec, settings[name]))
        )
        keys = {fault.path[0] for fault in unsupported}
        role_faults = [fault for fault in role_faults if keys.isdisjoint(fault.path[:1])]
        for fault in (*unsupported, *role_faults):
            located[roles.locate_fault(fault, document, source, name)] = None
        if spec is not None:
            role = RoleJob(name, settings[name], JobFile(spec, document, folder))
            role_jobs.append(role)
    if located:
        raise JobFaultsError([*located])
    spec = next(role.file.spec for role in role_jobs if role.role.ends)
    return JobFile(spec, source, folder, tuple(role_jobs))


def _validate_data(source: Document, faults: list[Fault]) -> JobSpec | None:
    """Return the specification as far as it is valid, and add all faults to `faults`."""
    data = _restore_verbatim_values(source)
    unsupported = list(_unsupported_faults(source.data))
    broken_paths = {fault.path for fault in (*faults, *unsupported) if fault.path}
    faults += [
        *_credential_faults(data),
        *_ambiguous_number_faults(source),
        *_program_faults(source.data),
        *unsupported,
    ]
    for path in broken_paths:
        _remove_value(data, path)
    for _ in range(_MAX_ROUNDS):
        try:
            spec = JobSpec.model_validate(data)
        except ValidationError as error:
            new_faults = list(messages.translate_errors(error, source))
            faults += [
                fault
                for fault in new_faults
                if not any(path and fault.path[: len(path)] == path for path in broken_paths)
            ]
            for fault in new_faults:
                broken_paths |= {fault.path, _remove_value(data, fault.path)}
            if len(faults) > MAX_SHOWN_FAULTS:
                return None
        else:
            faults.extend(checks.find_faults(spec, broken_paths))
            return spec
    return None


def _restore_verbatim_values(source: Document) -> Any:
    """Return a copy of the data with scalars as written where text is expected: `--lr 3e-4`."""
    data = copy.deepcopy(source.data)
    for block in VERBATIM_KEYS:
        items = data.get(block)
        keys = range(len(items)) if isinstance(items, list) else items
        for key in keys if isinstance(items, dict | list) else ():
            if isinstance(items[key], int | float):
                items[key] = source.texts[(block, key)]
    return data


def _remove_value(data: Any, path: KeyPath) -> KeyPath:
    """Remove the value at a path, or the nearest block around it; return the removed path."""
    path = tuple(itertools.takewhile(lambda key: not isinstance(key, int), path))
    while path:
        block = messages.value_at(data, path[:-1])
        if path in _STAND_INS:
            block[path[-1]] = copy.deepcopy(_STAND_INS[path])
            break
        if isinstance(block, dict) and block.pop(path[-1], _MISSING) is not _MISSING:
            break
        path = path[:-1]
    return path


# --- checks of the plain data, before its types are validated -------------------------------------


def _credential_faults(data: Any) -> Iterator[Fault]:
    reasons = data.get("allow_literal")
    reasons = reasons if isinstance(reasons, dict) else {}
    for path, text in credentials.walk_strings(data):
        # The name of the environment variable, if the text is the value of one.
        name = str(path[-1]) if path[0] == "env" else ""
        if path[-1] == "value" and path[0] != "env":
            name = str(messages.value_at(data, (*path[:-1], "name")) or "")
        setting = format_key_path(path)
        if reasons.get(setting) or not credentials.has_credential(text, name):
            continue
        alternative = f"write secrets: {{{name or 'NAME'}: {{name: my-secret, key: token}}}}"
        if path[0] in ("pod", "init") and name:
            alternative = "use valueFrom: {secretKeyRef: …}"
        elif not name:
            alternative += ", and read that variable"
        hint = f"put it in a Secret and {alternative}; "
        hint += f"if it is none, allow_literal: {{{setting}: REASON}}."
        message = f"{setting} holds a credential, and everyone who sees the job sees it."
        yield Fault(path, message, hint)


def _ambiguous_number_faults(source: Document) -> Iterator[Fault]:
    """Yield faults for numbers such as 010, which YAML 1.1 and 1.2 read differently."""
    for path, text in source.texts.items():
        if path[:1] and path[0] not in VERBATIM_KEYS and reader.has_two_readings(text):
            setting, decimal = messages.describe_setting(source, path), int(text)
            octal = "text" if set(text) & set("89") else int(text, 8)
            readings = f"{decimal} in YAML 1.2, {octal} in YAML 1.1."
            hint = f'write {decimal}, or "{text}" for text.'
            yield Fault(path, f"{setting} has two readings: {readings}", hint)


def _program_faults(data: Any) -> Iterator[Fault]:
    programs = [key for key in ("command", "train") if data.get(key) is not None]
    if len(programs) == 2:
        hint = "keep train for the built-in trainer, command for any other."
        yield Fault(("train",), "command and train are both set.", hint)
    elif not programs:
        hint = "train: {task: classify}, or command: [python, train.py]"
        yield Fault((), "neither train nor command is set: there is nothing to run.", hint)


# Keys whose values, or all of whose values if none are listed, are not supported yet.
_UNSUPPORTED: Mapping[KeyPath, tuple[str, ...]] = {
    ("train", "mesh", "cp"): (),
    ("train", "mesh", "pp"): (),
    ("train", "precision"): ("fp8", "int8"),
    ("train", "precision", "compute"): ("fp8", "int8"),
    ("train", "checkpoint", "memory"): (),
    ("train", "checks"): (),
}


def _unsupported_faults(data: Any) -> Iterator[Fault]:
    for path, values in _UNSUPPORTED.items():
        value = messages.value_at(data, path)
        if value is not None and (not values or value in values):
            setting = f"{format_key_path(path)} = {value}" if values else format_key_path(path)
            yield Fault(path, f"{setting} is not supported yet.", "leave it out.")


# --- writing and overrides ------------------------------------------------------------------------


def dump_job(job: JobSpec) -> str:
    """Return the job as YAML, including overrides. Reading it returns an equal job.

    Defaults are not written, because they would take precedence over the defaults of the task.
    """
    return writer.render_document(job.model_dump(mode="json", by_alias=True, exclude_unset=True))


@dataclasses.dataclass(frozen=True)
class Override:
    """A parsed override of the command line.

    Attributes:
        path: Path of the key that it sets.
        value: Plain data of the value.
        texts: Plain scalars of the value as written, by their path in the job.
        redacted: The argument as messages show it, shortened and without secrets.
    """

    path: KeyPath
    value: Any
    texts: Mapping[KeyPath, str]
    redacted: str


def parse_override(argument: str) -> Override | Fault:
    """Parse an override, or return the fault that prevents it."""
    try:
        # In a C locale, Python decodes arguments as ASCII and represents other bytes as surrogates.
        argument = argument.encode(errors="surrogateescape").decode()
    except UnicodeError:
        redacted = _redact_argument(argument.encode(errors="replace").decode())
        return _override_fault(redacted, "is not UTF-8.", "check how the shell writes it.")
    redacted = _redact_argument(argument)
    key, equals, text = argument.partition("=")
    if key.startswith("-"):
        hint = "a key has none, as in hosts=2; arguments of your program belong in its command:."
        return _override_fault(redacted, "begins with a dash.", hint)
    if not equals or not all(part.strip() for part in key.split(".")):
        return _override_fault(redacted, "is not of the form key=value.", "for example hosts=2")
    value = reader.parse_document(text, "override", _parse_path(key))
    if value.faults:
        hint = f"""quote the value, and the whole for the shell: '{key}="…"'."""
        location = f"{redacted} (override)"
        fault = value.faults[0]
        return dataclasses.replace(fault, hint=hint, location=location, line=LINE_AFTER_FILE)
    return Override(_parse_path(key), value.data, value.texts, redacted)


def override_argument(key: str, value: Any) -> str:
    """Return the argument that sets a key to a value, not quoted for a shell."""
    if isinstance(value, Mapping):
        value = "{" + ", ".join(f"{name}: {item}" for name, item in value.items()) + "}"
    elif isinstance(value, list):
        value = f"[{', '.join(map(str, value))}]"
    return f"{key}={value}"


def put_override(override: Override, data: Any) -> Fault | None:
    """Set the value in plain data; return a fault if its path leads through a scalar or a gap."""
    path = override.path
    for depth, key in enumerate(path, 1):
        if isinstance(data, dict):
            key = str(key)
            if depth < len(path) and data.get(key) is None:
                if _is_list(path[:depth]):
                    return _missing_entry_fault(override, depth)
                data[key] = {}
        elif not (isinstance(data, list) and isinstance(key, int) and key < len(data)):
            return _missing_entry_fault(override, depth - 1)
        if depth == len(path):
            data[key] = override.value
        data = data[key]
    return None


def _is_list(path: KeyPath) -> bool:
    return any(kind.items is not None for kind in introspection.types_at(JobSpec, path))


def _missing_entry_fault(override: Override, depth: int) -> Fault:
    parent, key = override.path[:depth], override.path[depth]
    form = "list instead, as [value]" if _is_list(parent) else "block instead, as {key: value}"
    message = f"{format_key_path(parent)} has no entry {shorten_text(str(key))}."
    return _override_fault(override.redacted, message, f"set the whole {form}.")


def _override_fault(redacted: str, message: str, hint: str | None) -> Fault:
    return Fault((), message, hint, location=f"{redacted} (override)", line=LINE_AFTER_FILE)


def _parse_path(key: str) -> KeyPath:
    return tuple(int(part) if part.isdecimal() else part for part in key.strip().split("."))


def _redact_argument(argument: str) -> str:
    """Return the argument as messages show it, shortened and without secrets."""
    key, equals, text = argument.partition("=")
    is_private = credentials.is_private_path(_parse_path(key))
    # Without an equals sign, everything after the first key may be a secret value.
    if is_private and not equals:
        return f"{key.partition('.')[0]}…"
    is_hidden = is_private or credentials.has_credential(text)
    return f"{key}=…" if is_hidden else shorten_text(argument)
