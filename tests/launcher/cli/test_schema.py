import re

from jaxlaunch.launcher.cli import schema
from jaxlaunch.launcher.job import introspection
from jaxlaunch.launcher.job.schema import JobSpec


def test_the_json_schema_is_closed_and_names_every_key() -> None:
    found = schema.json_schema()
    assert set(found["properties"]) == set(introspection.fields(JobSpec))
    assert found["required"] == ["name", "accelerator"]
    blocks = [found, *found["$defs"].values()]
    open_blocks = [block["title"] for block in blocks if block.get("additionalProperties") is not False]
    assert open_blocks == ["CustomModel"]
    assert found["properties"]["grace"]["default"] == "60s"


SECTIONS = {part.partition("\n")[0]: part for part in schema.job_page().split("\n## ")[1:]}


def example(title: str) -> str:
    found = re.findall(r"^```yaml\n(.*?)^```$", SECTIONS[title], re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"{title}: give the docstring of this block one example, in a fence of yaml"
    return str(found[0])
