"""JSON schemas of what commands print with `-o json`, made from the types of the outputs.

Within a version, fields are only added. `make generated` writes the schemas to docs/schemas.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from jaxlaunch.launcher.cli.models import EvaluationOutput
from jaxlaunch.launcher.cli.output import LogRow
from jaxlaunch.launcher.diagnose.doctor.finding import FindingTexts
from jaxlaunch.launcher.diagnose.explain.explanation import Explanation
from jaxlaunch.launcher.job.request import JobRequest
from jaxlaunch.launcher.jobs.status.job_status import JobStatus
from jaxlaunch.launcher.plan.job_plan import JobPlan
from jaxlaunch.records.verdict import Verdict

VERSION = 1
# The type of each command's output. `logs` prints one such object in each line.
TYPES: Mapping[str, Any] = {
    "doctor": list[FindingTexts],
    "eval": EvaluationOutput,
    "explain": Explanation,
    "list": list[JobStatus],
    "logs": LogRow,
    "plan": JobPlan,
    "status": JobStatus,
    "validate": JobRequest,
}


class _SchemaWithoutTitles(GenerateJsonSchema):
    """Leaves out the titles, which repeat the names of the fields."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def output_schema(command: str) -> dict[str, Any]:
    """Return the schema of the output of `launcher COMMAND -o json`, draft 2020-12."""
    schema = _type_schema(TYPES[command])
    if "JobStatus" in schema.get("$defs", {}):
        _adapt_status(schema["$defs"]["JobStatus"], schema)
    elif TYPES[command] is JobStatus:
        _adapt_status(schema, schema)
    title = f"launcher {command} -o json, version {VERSION}"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}


def _type_schema(output_type: Any) -> dict[str, Any]:
    adapter = TypeAdapter(output_type)
    schema = adapter.json_schema(mode="serialization", schema_generator=_SchemaWithoutTitles)
    for definition in (schema, *schema.get("$defs", {}).values()):
        definition.pop("title", None)
        if "description" in definition:
            definition["description"] = inspect.cleandoc(definition["description"])
    return schema


def _adapt_status(status: dict[str, Any], root: dict[str, Any]) -> None:
    """Change the schema of the fields of JobStatus to that of `JobStatus.to_json`."""
    fields, definitions = status["properties"], root["$defs"]
    restarts = definitions["Restarts"]
    restarts["properties"]["by_cause"] = fields.pop("restarts")
    restarts["required"].append("by_cause")
    fields["restarts"] = fields.pop("restart_counts")
    roles = {"type": "object", "additionalProperties": {"$ref": "#/$defs/JobStatus"}}
    fields["roles"] = roles
    status["required"] = list(fields)
    verdict = _type_schema(Verdict)
    # A failure has only the facts that apply to its kind.
    verdict["properties"]["failure"] = {"type": "object"}
    del verdict["$defs"]
    definitions["Verdict"] = verdict
    fields["verdict"] = {"anyOf": [{"$ref": "#/$defs/Verdict"}, {"type": "null"}]}
