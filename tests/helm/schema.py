"""Write the cluster defaults of values.schema.json from their keys: `make generated`."""

from __future__ import annotations

import json
from typing import Any

from jaxlaunch.launcher.job.defaults import Defaults
from tests.helm.charts import CHART

PATH = CHART / "values.schema.json"


def update_schema(text: str) -> str:
    """Return the file with current defaults; the other values of `text` stay."""
    schema = json.loads(text)
    wanted = _plain(Defaults.model_json_schema(by_alias=True))
    schema["$defs"] |= wanted.pop("$defs")
    del wanted["properties"]["schema"]
    wanted["properties"] = {"enabled": {"type": "boolean"}, **wanted["properties"]}
    schema["properties"]["defaults"] = wanted
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _plain(schema: Any, *, of_names: bool = False) -> Any:
    """Return a JSON schema without titles, descriptions and defaults."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _plain(value, of_names=key in ("properties", "$defs"))
        for key, value in schema.items()
        if of_names or key not in ("title", "description", "default")
    }
