"""`launcher schema`: the keys of job.yaml and the outputs of commands as JSON schemas or a page."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jaxlaunch.launcher.cli import output
from jaxlaunch.launcher.errors import KeyPath, UserError
from jaxlaunch.launcher.job.introspection import (
    Type,
    block_fields,
    describe_type,
    nested_blocks,
    types_at,
)
from jaxlaunch.launcher.job.roles import JOB_KEYS
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.trainer.spec import Unset

# Examples in the descriptions of types are left out of the tables.
_EXAMPLES = re.compile(r",? such as [^,]+(, [^,]+)* or [^,]+")
_FENCED = re.compile(r"^```yaml\n.*?^```$", re.MULTILINE | re.DOTALL)

_INTRODUCTION = """\
# job.yaml

This page lists every key. `launcher schema --markdown` prints it, and `launcher schema` prints the
JSON schema. Only `name`, `accelerator` and one of `train` and `command` are required. An unknown
key is an error.

The file is YAML 1.2: `3e-4` is a number; `no`, `on` and `12:30` are text. A duration is `90s`,
`10m`, `1h30m`, `3d` or whole seconds. A quantity is written as in Kubernetes: `8`, `500m`, `32Gi`.
Relative paths start at the file's folder. Any key can be set on the command line:
`launcher run job.yaml train.steps=100 train.mesh.mp=2`.

Each example is a part of a job: keys that do not matter there are left out. For complete jobs see
the [quickstart](quickstart.md), [your own script](your-script.md) and
[your own model](your-model.md). The terms are in the [glossary](glossary.md).
"""


@click.command("schema")
@click.argument("command", required=False, metavar="[COMMAND]")
@click.option(
    "--markdown", is_flag=True, help="Print the reference page instead: every key with its meaning."
)
def schema_command(command: str | None, markdown: bool) -> None:
    """Print the JSON schema of job.yaml, or of an output.

    Editors use it to complete and check keys: put `# yaml-language-server: $schema=FILE` at the top
    of a job. With COMMAND, it is the schema of what that command prints with -o json: doctor, eval,
    explain, list, logs, plan, status or validate. Within a version, fields are only added.
    """
    if command is not None:
        # Imported here, because editors ask for the schema of job.yaml at each start.
        from jaxlaunch.launcher.cli import output_schemas

        if command not in output_schemas.TYPES:
            names = ", ".join(output_schemas.TYPES)
            raise UserError(f"There is no schema of the output of {command}.", f"one of {names}.")
        output.show_data(output_schemas.output_schema(command), "json")
    elif markdown:
        output.show_lines(job_page().removesuffix("\n"))
    else:
        output.show_data(json_schema(), "json")


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of job.yaml, draft 2020-12."""
    schema = JobSpec.model_json_schema(by_alias=True)
    # The keys of a role are added here, because its model leaves them to the check of the job.
    role = schema["$defs"]["Role"]
    keys = {key: schema["properties"][key] for key in schema["properties"].keys() - JOB_KEYS}
    role["properties"] |= {key: keys[key] for key in sorted(keys)}
    role["additionalProperties"] = False
    # Each role may have its own accelerator.
    schema["required"].remove("accelerator")
    schema["anyOf"] = [{"required": [key]} for key in ("accelerator", "jobs")]
    draft = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**draft, **schema, "title": "job.yaml"}


def job_page() -> str:
    """Return the reference page: each block with an example and a table of its keys."""
    return "\n".join([_INTRODUCTION, *_render_sections(JobSpec, ())])


def _render_sections(model: type[BaseModel], path: KeyPath) -> Iterator[str]:
    text = inspect.getdoc(model) or ""
    summary = text.split("\n\n")[0].replace("\n", " ")
    example = "\n\n".join(_FENCED.findall(text))
    yield f"## {_section_title(model, path)}\n\n{summary}\n\n{example}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    fields = block_fields(model)
    yield from (_format_row(name, field) for name, field in fields.items())
    yield ""
    for name, field in fields.items():
        for block in nested_blocks(Type.from_field(field)):
            yield from _render_sections(block, (*path, name))


def _section_title(model: type[BaseModel], path: KeyPath) -> str:
    title = ".".join(map(str, path)) or "job"
    for key in ("kind", "source"):
        if key in model.model_fields:
            choice = Type.from_field(model.model_fields[key])
            # Several kinds share the block.
            if len(choice.literals) > 1:
                continue
            return f"{title}, {key}: {choice.literals[0] if choice.literals else 'module:Name'}"
    if path and len(nested_blocks(types_at(JobSpec, path)[0])) > 1:
        return f"{title}, {next(iter(block_fields(model)))}"
    return title


def _format_row(name: str, field: FieldInfo) -> str:
    kind = Type.from_field(field)
    text = _EXAMPLES.sub("", describe_type(kind)).removeprefix("a ").removeprefix("an ")
    if kind.model is not None:
        text = "block"
    elif kind.items is not None and nested_blocks(kind):
        text = "list of blocks"
    cells = [f"`{name}`", text + (", or null" if kind.nullable else ""), *_default_cells(field)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default_cells(field: FieldInfo) -> tuple[str, str]:
    """Return the default and the meaning of a field."""
    meaning, value, unset = field.description or "", field.default, field.json_schema_extra
    if field.is_required():
        return "required", meaning
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_unset=True)
    if field.default_factory is not None:
        value = {} if nested_blocks(Type.from_field(field)) else None
    if value is not None and value != {}:
        return f"`{value if isinstance(value, str) else json.dumps(value)}`", meaning
    if isinstance(unset, Unset):
        return unset.meaning, meaning
    assert value == {}, f"{meaning!r}: no Unset says what null means"
    return "those of its keys" if Type.from_field(field).model is not None else "`{}`", meaning
