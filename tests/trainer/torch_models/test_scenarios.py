"""Models of transformers: training, resume and export, with torch, torchax and transformers 5."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlaunch.trainer.torch_models import checked
from tests import environments, needs, tutorials

pytestmark = pytest.mark.extended

# With sinks, windows and stacked experts.
FAMILIES = ("gpt_oss",)
# The language model of a model of texts and images.
COMPARED = ("gemma3",)
# The section of docs/fine-tune.md that starts from a model that somebody has downloaded.
SECTION = "\n## With a published model\n"


def torch_environ():
    """Return the environment variables of programs that need the packages of torch."""
    packages = str(needs.packages("torchax"))
    path = os.pathsep.join((str(needs.ROOT), packages))
    programs = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **environments.LAZY, "PYTHONPATH": path, "PATH": programs}


def run_with_torch(module, folder, *names):
    """Return the JSON lines that a module of tests prints in the environment of torch."""
    environ = torch_environ()
    command = [sys.executable, "-m", f"tests.trainer.torch_models.{module}", str(folder), *names]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    return [*map(json.loads, done.stdout.splitlines())]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    names = (*FAMILIES, "classifier", "reward")
    rows = run_with_torch("scenarios", tmp_path_factory.mktemp("models"), *names)
    return {row["model_type"]: row for row in rows}


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory):
    rows = run_with_torch("against_torch", tmp_path_factory.mktemp("comparisons"))
    return {row["case"]: row for row in rows}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    rows = run_with_torch("tasks_against_torch", tmp_path_factory.mktemp("tasks"))
    return {row["case"]: row for row in rows}


@pytest.mark.parametrize("family", COMPARED)
def test_family_trains_resumes_exports_and_answers_as_with_torch(tmp_path, family):
    (result,) = run_with_torch("families", tmp_path, family)

    row = checked.read_table()[family]
    meshes = result["meshes"]
    assert set(meshes) == {"one", "sharded"}
    for differences in meshes.values():
        assert differences["logits"] < 1e-5
        assert differences["unused"]
        assert differences["losses"] < 1e-5
        assert differences["trained"] < 1e-5
        # Rates of decay have larger rounding errors, in PyTorch, too.
        assert differences["gradient"] < max(1e-5, 2 * row.rounding), differences["parameter"]
        assert (differences["packed"] or 0) < 1e-5
        assert (differences["packed"] is not None) == row.packs_rows
    assert result["resumed"]
    chat = result["chat"]
    assert chat["exported"] < 1e-5
    assert chat["sample"] == chat["transformers"] == chat["said"]


@pytest.mark.parametrize("family", ["modernbert", "dinov2"])
def test_encoder_trains_as_with_torch(tmp_path, family):
    (result,) = run_with_torch("encoders", tmp_path, family)
    assert result["parameters"] > 10
    for differences in result["meshes"].values():
        assert max(differences.values()) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_model_trains_resumes_to_the_bit_and_loads_in_transformers(results, family):
    result = results[family]

    assert len(result["losses"]) == 4
    assert result["losses"][-1] < result["losses"][0]
    assert result["resumed"] == result["losses"]
    assert result["equal_exports"]
    assert result["moved"] > 1e-4
    assert result["config"]["model_type"] == family


def test_preferences_are_learned_as_with_torch(comparisons):
    assert comparisons["dpo"]["loss"] < 1e-5
    assert comparisons["dpo"]["gradient"] < 1e-5


# The biases of OPT's keys have gradients of rounding errors alone.
@pytest.mark.parametrize(("case", "tolerance"), [("chunks", 1e-5), ("chunks_of_part", 1e-4)])
def test_logits_in_chunks_have_the_loss_of_torch(comparisons, case, tolerance):
    assert comparisons[case]["chunks"] == 4
    assert comparisons[case]["loss"] < 1e-5
    assert comparisons[case]["gradient"] < tolerance


def test_weights_are_read_in_the_memory_of_their_shares(comparisons):
    sizes = comparisons["memory"]
    assert sizes["grown"] <= 1.3 * sizes["share"] + sizes["largest"]


def test_spans_of_masks_are_found(comparisons):
    assert comparisons["spans"]["spans"] == [[True, None], [True, 8], [False, None], None]


@pytest.mark.parametrize("case", ["lora", "dora", "buffers", "embedding", "layers"])
def test_adapters_are_trained_and_exported_as_with_peft(comparisons, case):
    result = comparisons[case]
    assert result["loss"] < 1e-5
    assert result["trained"] < 1e-5
    assert result["moved"] > 1e-3
    # The job's own folder is the base, which peft was not told.
    assert set(result["keys"]) <= {"base_model_name_or_path"}
    assert result["read"] == 0
    assert result["merged"] < 1e-5


@pytest.mark.parametrize("case", ["fp8", "mxfp4"])
def test_quantized_weights_are_read_as_transformers_dequantizes_them(comparisons, case):
    result = comparisons[case]
    assert result["quantized"] > 0
    assert result["logprobs"] < 1e-5
    assert result["plain"] > 1e-4


def test_random_weights_are_drawn_from_the_seed(comparisons):
    assert comparisons["random"]["equal"] == 0
    assert comparisons["random"]["other"] > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_runs_and_their_adapters_are_evaluated_and_sampled_as_with_torch(results, family):
    result = results[family]
    assert math.isfinite(result["evaluated"]["metrics"]["loss"])
    assert result["sample"] == result["torch"]
    adapted = result["adapters"]
    assert adapted["sample"] == adapted["torch"] == adapted["merged"]


@pytest.mark.parametrize("family", ["mamba", "opt"])
def test_texts_are_generated_as_with_torch(comparisons, family):
    result = comparisons[family]
    assert result["ids"] == result["expected"]
    assert result["logprobs"] < 1e-5
    assert result["beams"] == 2
    assert "every token costs a pass over its whole text" in result["notes"][0]


CLASSIFIERS = ("bert", "roberta", "distilbert", "modernbert", "qwen3", "llama")


@pytest.mark.parametrize("case", [*CLASSIFIERS, "bert on one device"])
def test_texts_are_classified_as_with_torch(tasks, case):
    result = tasks[case]
    assert result["loss"] < 1e-5
    assert result["logits"] < 1e-5
    assert result["gradient"] < 1e-5
    assert result["accuracy"] == 0


def test_head_of_other_classes_is_drawn_for_a_training_alone(tasks):
    result = tasks["new head"]
    assert result["shape"][0] == 3
    assert result["pooler"] == 0
    assert "has no classifier.bias, classifier.weight, without which" in result["fault"]


def test_rewards_are_learned_as_with_torch(tasks):
    result = tasks["reward"]
    assert result["loss"] < 1e-5
    assert result["margin"] < 1e-5
    assert result["gradient"] < 1e-5
    assert 0.015 < result["drawn"] < 0.025


def test_classifier_resumes_to_the_bit_and_predicts_what_its_export_does(results):
    result = results["classifier"]
    whole, resumed = result["losses"]
    assert len(whole) == 4
    assert resumed == whole
    assert 0 <= result["accuracy"] <= 1
    assert result["labels"] == ["bad", "good", "mixed"]
    for predicted in result["predicted"]:
        for (label, probability), (name, expected) in zip(
            predicted, result["expected"], strict=True
        ):
            assert label == name
            assert probability == pytest.approx(expected, abs=1e-5)


def test_reward_model_learns_preferences_and_loads_in_transformers(results):
    result = results["reward"]
    assert len(result["losses"]) == 12
    assert result["losses"][-1] < result["losses"][0]
    assert result["labels"] == 1


# The native decoder knows the first alone.
@pytest.mark.parametrize("family", ["llama", "olmo3", "glm4"])
def test_page_leads_from_instructions_to_a_chat_in_transformers(tmp_path, family):
    page = (needs.ROOT / "docs" / "fine-tune.md").read_text().partition(SECTION)[2]
    steps = tutorials.find_steps(page, shell="bash")
    rows = next(step.text for step in steps if step.file == "instructions.jsonl")
    weights = tmp_path / "weights" / "instruct"
    weights.mkdir(parents=True)
    run_with_torch("instruct", weights, family, rows)

    outputs = []
    for step in steps:
        if step.file is not None:
            # The random weights of a tiny model need a larger rate.
            (tmp_path / step.file).write_text(step.text.replace("lr: 2e-5", "lr: 1e-2"))
            continue
        done = subprocess.run(
            ["bash", "-euc", step.text],
            cwd=tmp_path,
            env=torch_environ(),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        outputs.append((step.output, done.stdout))
    shown, printed = outputs[-1]
    assert printed.splitlines()[-1] == shown.strip()
