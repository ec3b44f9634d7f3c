"""What values.schema.json says of the cluster defaults, from their own keys: `make generated` writes it."""

from __future__ import annotations

import json
from typing import Any

from jaxlaunch.launcher.job.defaults import Defaults
from tests.helm.charts import CHART

PATH = CHART / "values.schema.json"


def made(text: str) -> str:
    """The file as it is to be: what `text` says of the chart's other values stays."""
    schema = json.loads(text)
    wanted = _plain(Defaults.model_json_schema(by_alias=True))
    schema["$defs"] |= wanted.pop("$defs")
    del wanted["properties"]["schema"]
    wanted["properties"] = {"enabled": {"type": "boolean"}, **wanted["properties"]}
    schema["properties"]["defaults"] = wanted
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _plain(schema: Any, *, of_names: bool = False) -> Any:
    """A JSON schema without what only explains."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _plain(value, of_names=key in ("properties", "$defs"))
        for key, value in schema.items()
        if of_names or key not in ("title", "description", "default")
    }
