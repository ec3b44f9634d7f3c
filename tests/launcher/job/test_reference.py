from pathlib import Path

from launcher.job import introspection, reference
from launcher.job.schema import JobSpec

PAGE = Path(__file__).parents[3] / "docs" / "job-yaml.md"


def test_the_page_is_what_the_schema_says() -> None:
    """When it is not: launcher schema --markdown > docs/job-yaml.md"""
    assert PAGE.read_text(encoding="utf-8") == reference.markdown()


def test_every_key_says_what_it_means() -> None:
    page = reference.markdown()
    for path, field in introspection.walk(JobSpec):
        assert field.description, path
        assert not field.description.endswith("."), path
        assert "`" + str(path[-1]) + "`" in page


def test_every_block_says_what_it_is() -> None:
    for title in reference.markdown().split("\n## ")[1:]:
        assert title.split("\n")[2].endswith("."), title


def test_a_block_of_several_kinds_is_not_called_by_one() -> None:
    assert "\n## train.model.rope_scaling\n" in reference.markdown()


def test_the_json_schema_is_closed_and_names_every_key() -> None:
    schema = reference.json_schema()
    assert set(schema["properties"]) == set(introspection.fields(JobSpec))
    assert schema["required"] == ["name", "accelerator"]
    blocks = [schema, *schema["$defs"].values()]
    open_blocks = [block["title"] for block in blocks if block.get("additionalProperties") is not False]
    assert open_blocks == ["CustomModel"]
    assert schema["properties"]["grace"]["default"] == "60s"
