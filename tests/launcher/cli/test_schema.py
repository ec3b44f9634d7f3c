from jaxlaunch.launcher.cli import schema
from jaxlaunch.launcher.job import introspection
from jaxlaunch.launcher.job.schema import JobSpec


def test_the_json_schema_is_closed_and_names_every_key() -> None:
    found = schema.json_schema()
    assert set(found["properties"]) == set(introspection.block_fields(JobSpec))
    assert found["required"] == ["name", "accelerator"]
    blocks = [found, *found["$defs"].values()]
    open_blocks = [
        block["title"] for block in blocks if block.get("additionalProperties") is not False
    ]
    assert open_blocks == ["CustomModel"]
    assert found["properties"]["grace"]["default"] == "60s"
