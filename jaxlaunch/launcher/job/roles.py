"""The roles of a job (`jobs:`): each becomes a document that is read like a job. Pure."""

from __future__ import annotations

import dataclasses
import graphlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxlaunch.launcher.errors import Fault, KeyPath
from jaxlaunch.launcher.job.schema import HostRange, JobSpec, Role
from jaxlaunch.launcher.wording import join_choices
from jaxlaunch.launcher.yaml.reader import Document

# Keys of the whole job, which a role must not set.
JOB_KEYS = {
    *("schema", "name", "namespace", "queue", "priority", "platform", "network_policy"),
    *("gang_secret", "deadline", "ttl", "labels", "annotations", "allow_literal", "notify", "jobs"),
}
# Blocks whose entries are added to those of the job. Any other key replaces the job's.
_MERGED_KEYS = ("env", "secrets")
# If a role sets one of these, it does not get the other one from the job.
_PROGRAM_KEYS = {"command", "train"}


def sort_roles(settings: Mapping[str, Role]) -> list[str]:
    """Return the names of the roles, each after those that it needs. Cycles are ignored."""
    sorter = graphlib.TopologicalSorter(
        {
            name: [*(needed for needed in role.needs if needed in settings)]
            for name, role in settings.items()
        }
    )
    try:
        return [*sorter.static_order()]
    except graphlib.CycleError:
        return [*settings]


def role_document(source: Document, name: str) -> Document:
    """Return the document of a role: its own keys, and the keys of the job that it does not set."""
    block = source.data["jobs"][name]
    role_data = {key: value for key, value in block.items() if key not in Role.model_fields}
    replaced = {"jobs", *role_data} - {*_MERGED_KEYS}
    replaced |= _PROGRAM_KEYS if _PROGRAM_KEYS & role_data.keys() else set()
    data = {key: value for key, value in source.data.items() if key not in replaced}
    for key, value in role_data.items():
        default = data.get(key)
        is_merged = isinstance(default, dict) and isinstance(value, dict)
        data[key] = default | value if is_merged else value
    if isinstance(source.data.get("name"), str):
        data["name"] = f"{source.data['name']}-{name}"

    dropped = {(key,) for key in replaced}

    def select(entries: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
        defaults = {path: entry for path, entry in entries.items() if path[:1] not in dropped}
        prefix = ("jobs", name)
        role_entries = {
            path[2:]: entry
            for path, entry in entries.items()
            if path[:2] == prefix and len(path) > 2
        }
        return defaults | role_entries

    return Document(
        source.name, data, select(source.lines), select(source.texts), select(source.overrides)
    )


def locate_fault(fault: Fault, document: Document, source: Document, name: str) -> Fault:
    """Return the fault of a role with its location, and with the role unless it is a default's."""
    block = source.data["jobs"][name]
    path, located = fault.path, document.locate(fault)
    is_default = bool(path) and path[0] in source.data and path[0] not in block
    if is_default or path == ("name",):
        return located
    if not path or located.line == 0:
        located = source.locate(dataclasses.replace(fault, path=("jobs", name)))
    return dataclasses.replace(located, message=f"jobs.{name}: {fault.message}")


def find_role_faults(data: Mapping[str, Any], settings: Mapping[str, Role]) -> Iterator[Fault]:
    """Yield the faults of the roles among each other."""
    names = join_choices(list(settings))
    for name, role in settings.items():
        path: KeyPath = ("jobs", name)
        for key in filter(JOB_KEYS.__contains__, data["jobs"][name]):
            message = f"jobs.{name}.{key} is set, but {key} applies to the whole job."
            yield Fault((*path, key), message, f"write {key} at the top of the file.")
        if role.ends and role.may_fail:
            message = f"jobs.{name} has both ends: true and may_fail: true."
            yield Fault((*path, "may_fail"), message, "the role that ends the job may not fail.")
        for needed in role.needs:
            if needed not in settings or needed == name:
                message = f"jobs.{name}.needs.{needed}: there is no other role of that name."
                yield Fault((*path, "needs", needed), message, f"the roles are {names}.")
    if not any(role.ends for role in settings.values()):
        message = "jobs has no role with ends: true, so the job would never be done."
        yield Fault(("jobs",), message, f"add ends: true to one of them: {names}.")
    try:
        graphlib.TopologicalSorter(
            {name: [*role.needs] for name, role in settings.items()}
        ).prepare()
    except graphlib.CycleError as error:
        cycle = [str(name) for name in error.args[1]]
        if len(set(cycle)) > 1:
            message = f"jobs: these roles need each other: {', '.join(cycle[:-1])}."
            yield Fault(("jobs", cycle[0], "needs"), message, "remove one of their needs.")


def find_unsupported_keys(spec: JobSpec, role: Role) -> Iterator[Fault]:
    """Yield the keys of a role that are not supported with roles."""
    unsupported = {
        "hosts": isinstance(spec.hosts_or_range, HostRange),
        "spares": bool(spec.spares),
        "compute_domain": spec.compute_domain,
    }
    if role.may_fail and spec.accelerator.platform == "tpu":
        message = "may_fail = true is not supported on TPUs, where a lost host ends its Job."
        yield Fault(("may_fail",), message, "leave it out.")
    hints = {"hosts": "use a fixed number of hosts."}
    for key, is_set in unsupported.items():
        if is_set:
            value = "{min, max}" if key == "hosts" else str(getattr(spec, key)).lower()
            message = f"{key} = {value} is not supported together with jobs."
            yield Fault((key,), message, hints.get(key, "leave it out."))
