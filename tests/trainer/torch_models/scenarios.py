"""Trains tiny models of transformers and exports them: python scenarios.py FOLDER MODEL_TYPE ...

It runs with the packages of the environment torchax. A JSON line for each model has what the test
looks at.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

from jaxlaunch.trainer.torch_models import compare

LENGTH = 32
JOB = """
name: {name}
accelerator: {{type: cpu, per_host: 8}}
train:
  task: lm
  model: {{transformers: {folder}, length: {length}}}
  data: {{source: synthetic}}
  mesh: {{dp: 2, fsdp: 2, mp: 2}}
  remat: full
  batch: 8
  steps: {steps}
  optimizer: {{lr: 1e-3, schedule: {{name: constant}}}}
  log_every: 1
  checkpoint: {{every: 2}}
  lora: {lora}
"""
LORA = "{targets: [q, o], rank: 2, dora: true}"
PROMPT = [5, 6, 7, 8]


def save_tiny_model(
    model_type: str, folder: Path, scale: float = 1.0, layers: int | None = None
) -> None:
    """Write a tiny random model of a family as transformers does, its matrices times `scale`."""
    keys = transformers.AutoConfig.for_model(model_type).to_dict()
    for block in (keys, keys.get("text_config", {})):
        if layers is not None and "num_hidden_layers" in block:
            block["num_hidden_layers"] = layers
    keys = compare.shrink_config(keys)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**keys)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.ndim > 1 else 1.0)
    for name, buffer in model.named_buffers():
        # transformers draws buffers of the files as zeros.
        if name in model.state_dict():
            torch.nn.init.normal_(buffer)
    model.save_pretrained(folder, max_shard_size="100KB")


def run_launcher(*arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-m", "jaxlaunch.launcher.cli.main", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def train(folder: Path, model: Path, name: str, steps: int, lora: str = "null") -> None:
    job = folder / f"{name}.yaml"
    job.write_text(JOB.format(name=name, folder=model, length=LENGTH, steps=steps, lora=lora))
    run_launcher("run", str(job), cwd=folder)


def read_losses(folder: Path, name: str) -> list[float]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["loss"] for row in rows if "loss" in row and "eval/loss" not in row]


def load_logits(folder: Path) -> np.ndarray:
    tokens = torch.arange(2, 2 + 2 * LENGTH).reshape(2, LENGTH) % 120
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits.numpy()


def sample(folder: Path, name: str) -> list[int]:
    prompt = " ".join(map(str, PROMPT))
    options = ("--ids", prompt, "--max-tokens", "6", "-o", "json")
    ((first,),) = json.loads(run_launcher("sample", name, *options, cwd=folder))["samples"]
    ids: list[int] = first["ids"]
    return ids


def generate_torch(module: torch.nn.Module) -> list[int]:
    ids = [*PROMPT]
    with torch.no_grad():
        for _ in range(6):
            logits_V = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits_V.argmax()))
    return ids[len(PROMPT) :]


def try_adapters(folder: Path, model: Path, name: str) -> dict[str, object]:
    train(folder, model, name, steps=2, lora=LORA)
    run_launcher("export", name, "--to", f"{name}-export", cwd=folder)
    run_launcher("export", name, "--to", f"{name}-merged", "--merged", cwd=folder)
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        folder / f"{name}-merged", attn_implementation="eager"
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    wrapper = peft.PeftModel.from_pretrained(base, folder / f"{name}-export").eval()
    return {
        "sample": sample(folder, name),
        "torch": generate_torch(wrapper),
        "merged": generate_torch(merged.eval()),
    }


def try_model(folder: Path, model_type: str) -> dict[str, object]:
    model, name = folder / f"{model_type}-weights", model_type.replace("_", "-")
    save_tiny_model(model_type, model)
    # The first checkpoint of a run without a step is that of its start.
    train(folder, model, name, steps=4)
    train(folder, model, f"{name}-again", steps=2)
    train(folder, model, f"{name}-again", steps=4)
    whole, resumed = (read_losses(folder, run) for run in (name, f"{name}-again"))
    for run in (name, f"{name}-again"):
        run_launcher("export", run, "--to", f"{run}-export", cwd=folder)
    evaluated = run_launcher("eval", name, "-o", "json", cwd=folder)
    exported = transformers.AutoModelForCausalLM.from_pretrained(
        folder / f"{name}-export", attn_implementation="eager"
    )
    exports = [load_logits(folder / f"{run}-export") for run in (name, f"{name}-again")]
    return {
        "model_type": model_type,
        "losses": whole,
        "evaluated": json.loads(evaluated),
        "sample": sample(folder, name),
        "torch": generate_torch(exported.eval()),
        "adapters": try_adapters(folder, model, f"{name}-lora"),
        "resumed": resumed,
        "equal_exports": bool(np.array_equal(*exports)),
        "moved": float(np.abs(exports[0] - load_logits(model)).max()),
        "config": json.loads((folder / f"{name}-export" / "config.json").read_text()),
    }


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        print(json.dumps(try_model(Path(sys.argv[1]), wanted)), flush=True)
