from jaxlaunch.launcher.cli import schema
from jaxlaunch.launcher.job import introspection
from jaxlaunch.launcher.job.schema import JobSpec


def test_json_schema_is_closed_and_complete() -> None:
    json_schema = schema.json_schema()
    assert set(json_schema["properties"]) == set(introspection.block_fields(JobSpec))
    assert json_schema["required"] == ["name", "accelerator"]
    blocks = [json_schema, *json_schema["$defs"].values()]
    open_blocks = [
        block["title"] for block in blocks if block.get("additionalProperties") is not False
    ]
    assert open_blocks == ["CustomModel"]
    assert json_schema["properties"]["grace"]["default"] == "60s"


def test_page_shows_an_empty_map_as_the_default_of_a_map() -> None:
    rows = {line.split(" | ")[0]: line for line in schema.job_page().splitlines() if "|" in line}
    assert all("| `{}` |" in rows[f"| `{key}`"] for key in ("labels", "node_selector", "secrets"))
    assert "| those of its keys |" in rows["| `resources`"]
