import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.launcher.cli import schema
from jaxlaunch.launcher.job import introspection, load
from jaxlaunch.launcher.job.schema import JobSpec

PAGE = Path(__file__).parents[3] / "docs" / "job-yaml.md"


def test_the_page_is_what_the_schema_says() -> None:
    """When it is not: launcher schema --markdown > docs/job-yaml.md"""
    assert PAGE.read_text(encoding="utf-8") == schema.job_page()


def test_every_key_says_what_it_means() -> None:
    page = schema.job_page()
    for path, field in introspection.walk(JobSpec):
        assert field.description, path
        assert not field.description.endswith("."), path
        assert "`" + str(path[-1]) + "`" in page


def test_every_block_says_what_it_is() -> None:
    for title in schema.job_page().split("\n## ")[1:]:
        assert title.split("\n")[2].endswith("."), title


def test_a_block_of_several_kinds_is_not_called_by_one() -> None:
    assert "\n## train.model.rope_scaling\n" in schema.job_page()


def test_the_json_schema_is_closed_and_names_every_key() -> None:
    found = schema.json_schema()
    assert set(found["properties"]) == set(introspection.fields(JobSpec))
    assert found["required"] == ["name", "accelerator"]
    blocks = [found, *found["$defs"].values()]
    open_blocks = [block["title"] for block in blocks if block.get("additionalProperties") is not False]
    assert open_blocks == ["CustomModel"]
    assert found["properties"]["grace"]["default"] == "60s"


SECTIONS = {part.partition("\n")[0]: part for part in schema.job_page().split("\n## ")[1:]}
LEFT_OUT = {"name": "x", "image": "registry.example/train:1.4", "accelerator": {"type": "cpu", "per_host": 8}}


def example(title: str) -> str:
    found = re.findall(r"^```yaml\n(.*?)^```$", SECTIONS[title], re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"{title}: give the docstring of this block one example, in a fence of yaml"
    return str(found[0])


@pytest.mark.parametrize("title", SECTIONS)
def test_a_section_opens_with_an_annotated_example_that_is_part_of_a_valid_job(title: str) -> None:
    text = example(title)
    assert " # " in text and len(text.splitlines()) <= 14
    part = yaml.safe_load(text)
    rest: dict[str, Any] = {} if "train" in part or "command" in part else {"command": ["python", "train.py"]}
    spec = load.parse(yaml.safe_dump({**LEFT_OUT, **rest, **part}))
    assert spec.name


@pytest.mark.parametrize("title", [title for title in SECTIONS if title != "job"])
def test_an_example_is_of_its_section(title: str) -> None:
    path, _, which = title.partition(", ")
    found = yaml.safe_load(example(title))
    for key in path.split("."):
        found = found[key]
    if isinstance(found, list):
        found = found[0]
    elif path in ("secrets", "train.data.parts"):
        found = next(iter(found.values()))
    assert isinstance(found, dict)
    key, _, value = which.partition(": ")
    named = value and value != "module:Name" and "preset" not in found
    assert found[key] == value if named else not key or value or key in found


def test_every_row_says_a_default_and_a_meaning() -> None:
    rows = [re.split(r"(?<!\\)\|", line) for line in schema.job_page().splitlines() if line.startswith("| `")]
    assert [row for row in rows if not (row[3].strip() and row[4].strip())] == []
