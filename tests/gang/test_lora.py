"""Adapters of a published model: trained, resumed on other hosts, and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gang.runs import assert_success, run_job, run_launcher
from tests.trainer import references

pytestmark = [pytest.mark.computes, pytest.mark.extended]

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora.yaml"


def lora_job(weights: Path, steps: int, hosts: int) -> dict[str, Any]:
    """Return the example on small weights, for few steps, on two devices of `hosts` hosts."""
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    document |= {
        "hosts": hosts,
        "accelerator": {"type": "cpu", "per_host": 2 // hosts},
        "restarts": {"in_place": 0},
    }
    document["train"] |= {
        "steps": steps,
        "log_every": 1,
        "eval": {"every": None},
        "checkpoint": {"every": 3, "keep": 1},
    }
    document["train"]["model"]["init_from"] = str(weights)
    document["train"]["data"]["eval_examples"] = document["train"]["batch"]
    return document


def run_export(*arguments: object) -> str:
    done = run_launcher("export", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_adapters_resume_on_other_hosts_and_are_exported(tmp_path: Path) -> None:
    weights = references.folder("qwen2_tiny", tmp_path / "weights")
    whole = assert_success(run_job(tmp_path / "whole", lora_job(weights, 6, hosts=1)))
    assert_success(run_job(tmp_path / "part", lora_job(weights, 3, hosts=2)))
    part = assert_success(run_job(tmp_path / "part", lora_job(weights, 6, hosts=1)))
    assert "train.lora: rank 16 at k_proj, o_proj, q_proj, v_proj; " in part.stdout
    assert sorted(part.losses) == list(range(1, 7))
    for step, loss in whole.losses.items():
        assert part.losses[step] == pytest.approx(loss, rel=1e-5), f"step {step}"
    output = run_export(part.folder, "--to", tmp_path / "peft")
    assert output.startswith(f"{tmp_path / 'peft'}: adapters of Qwen2ForCausalLM of step 6, ")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(weights)
    output = run_export(part.folder, "--to", tmp_path / "merged", "--merged")
    assert output.startswith(f"{tmp_path / 'merged'}: Qwen2ForCausalLM of step 6, ")
    file = next(weights.glob("*.safetensors"))
    changed = bytearray(file.read_bytes())
    changed[-2] ^= 64
    file.unlink()  # a link to the fixture
    file.write_bytes(changed)
    refused = run_job(tmp_path / "part", lora_job(weights, 9, hosts=1))
    assert refused.code == 78
    assert "step 6 of " in refused.stderr and "holds adapters of the weights of" in refused.stderr
