"""The schemas of job.yaml and of the outputs of commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fastjsonschema
import pytest

from jaxlaunch.launcher.cli import schema
from jaxlaunch.launcher.job import introspection
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, NAMESPACES
from tests.launcher import apiserver, objects
from tests.launcher.apiserver import Server
from tests.launcher.invoke import CommandResult, launcher
from tests.launcher.report import made_runs
from tests.launcher.schemas import check_output

Call = Callable[..., CommandResult]
JOB = "name: x\nimage: i\naccelerator: {type: cpu}\n"


@pytest.fixture
def call(
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Call:
    """A folder with job.yaml and the run lm, and a cluster with the job far."""
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, "team")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(f"{JOB}command: [python, train.py]\n")
    train = "{task: classify, model: {kind: mlp}, data: {source: synthetic}, batch: 8, steps: 2}"
    (tmp_path / "elastic.yaml").write_text(f"{JOB}hosts: {{min: 1, max: 2}}\ntrain: {train}\n")
    made_runs.run(tmp_path / "runs" / "lm", (137, 65))
    log = tmp_path / "runs" / "lm" / "starts" / "1" / "logs" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("step 1\n")
    server.put(NAMESPACES.path(None, "team"), {})
    metadata = {"metadata": {"name": "far", "namespace": "team"}}
    server.put(JOBSETS.path("team", "far"), apiserver.merge_patch(objects.jobset(), metadata))
    return lambda *arguments: launcher(capsys, monkeypatch, *arguments, "-o", "json")


@pytest.mark.parametrize(
    "words",
    ["status lm", "status far", "explain lm", "explain far", "explain nothing", "list", "logs lm"]
    + ["validate job.yaml", "validate elastic.yaml", "plan job.yaml", "doctor job.yaml"],
)
def test_output_has_the_fields_of_its_schema(call: Call, words: str) -> None:
    result = call(*words.split())
    output = check_output(words.split()[0], result.out)
    assert output, result.err


def test_validation_of_an_output_is_strict(call: Call) -> None:
    output = json.loads(call("status", "far").out)
    del output["restarts"]["by_cause"]
    for changed in (output, {**json.loads(call("status", "lm").out), "more": 1}):
        with pytest.raises(fastjsonschema.JsonSchemaValueException):
            check_output("status", json.dumps(changed))


def test_schema_of_an_output_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = launcher(capsys, monkeypatch, "schema", "status").out
    assert json.loads(printed)["title"] == "launcher status -o json, version 1"
    refused = launcher(capsys, monkeypatch, "schema", "stop")
    assert refused.code == 2 and "There is no schema of the output of stop." in refused.err


def test_json_schema_is_closed_and_complete() -> None:
    json_schema = schema.json_schema()
    assert set(json_schema["properties"]) == set(introspection.block_fields(JobSpec))
    assert json_schema["required"] == ["name"]
    assert json_schema["anyOf"] == [{"required": ["accelerator"]}, {"required": ["jobs"]}]
    role_keys = json_schema["$defs"]["Role"]["properties"]
    assert {"ends", "hosts", "train"} <= role_keys.keys() and "name" not in role_keys
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


def test_default_that_no_value_states_is_a_fact_of_the_field() -> None:
    """The page has it in its own column, and the JSON schema behind the description."""
    row = next(line for line in schema.job_page().splitlines() if line.startswith("| `batches` |"))
    meaning = "batches per evaluation, at least one per part of a mixture"
    assert row.split(" | ")[2:] == ["all", f"{meaning} |"]
    evaluation = schema.json_schema()["$defs"]["Eval"]["properties"]
    assert evaluation["batches"]["description"] == f"{meaning}; null: all"
    assert evaluation["every"]["default"] == 500
