"""Outputs of commands, compared with the schemas in docs/schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fastjsonschema

from jaxlaunch.launcher.cli.output_schemas import VERSION

FOLDER = Path(__file__).parents[2] / "docs" / "schemas" / f"v{VERSION}"


def check_output(command: str, text: str) -> Any:
    """Return the output of a command, which has the fields of its schema and no others."""
    schema = json.loads((FOLDER / f"{command}.json").read_text())
    for definition in (schema, *schema.get("$defs", {}).values()):
        if "properties" in definition:
            definition["additionalProperties"] = False
    return fastjsonschema.validate(schema, json.loads(text))
