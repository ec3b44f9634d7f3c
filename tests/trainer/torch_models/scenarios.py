"""Trains tiny models of transformers and exports them: python scenarios.py FOLDER MODEL_TYPE ...

It runs with the packages of the environment torchax. A JSON line for each model has what the test
looks at.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import tokenizers
import torch
import transformers
import yaml

from jaxlaunch.trainer.torch_models import compare
from tests.needs import ROOT

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


LABELS = ("bad", "good", "mixed")
CLASSIFIER_KEYS = {
    "accelerator": {"type": "cpu", "per_host": 8},
    "mesh": {"dp": 2, "fsdp": 2, "mp": 2},
    "batch": 8,
    "optimizer": {"lr": 1e-3, "schedule": "constant"},
    "log_every": 1,
    "checkpoint": {"every": 2},
}


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


def read_example(task: str) -> dict[str, Any]:
    """Return the block of YAML in docs/text.md that begins with this task."""
    page = (ROOT / "docs" / "text.md").read_text()
    block = page.split(f"```yaml\ntask: {task}\n")[1].split("```")[0]
    keys: dict[str, Any] = yaml.safe_load(block)
    return {"task": task, **keys}


def save_encoder(folder: Path, auto_class: str, vocab: int, **keys: Any) -> None:
    tiny = compare.shrink_config(transformers.AutoConfig.for_model("modernbert").to_dict())
    ids = {name: 1 for name in tiny if name.endswith("_token_id")}
    config = transformers.AutoConfig.for_model(
        **{**tiny, **ids, "vocab_size": vocab, "pad_token_id": 0, **keys}
    )
    torch.manual_seed(0)
    getattr(transformers, auto_class).from_config(config).save_pretrained(folder)


def save_tokenizer(folder: Path, texts: list[str]) -> int:
    """Write a tokenizer like that of BERT, and return the size of its vocabulary."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = sorted({word for text in texts for word in text.split()})
    built = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {word: number for number, word in enumerate([*specials, *words])}, "[UNK]"
        )
    )
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad", "unk", "cls", "sep", "mask")
    named = dict(zip((f"{name}_token" for name in names), specials, strict=True))
    transformers.PreTrainedTokenizerFast(tokenizer_object=built, **named).save_pretrained(folder)
    return len(specials) + len(words)


def train_twice(folder: Path, train: dict[str, Any], name: str) -> list[list[float]]:
    """Train 4 steps at once, and 2 and 2 with a resume. Return the losses of both."""
    for run, steps in ((name, 4), (f"{name}-again", 2), (f"{name}-again", 4)):
        keys = {**CLASSIFIER_KEYS, **train, "steps": steps}
        job = {"name": run, "accelerator": keys.pop("accelerator"), "train": keys}
        (folder / f"{run}.yaml").write_text(json.dumps(job))
        run_launcher("run", f"{run}.yaml", cwd=folder)
    return [read_losses(folder, run) for run in (name, f"{name}-again")]


def try_classifier(folder: Path) -> dict[str, object]:
    """A classifier of the encoder of a masked language model, by the job of docs/text.md."""
    draw, model, name = random.Random(0), folder / "encoder", "classifier"
    texts = [" ".join(draw.choices(LABELS, k=draw.randint(1, 14))) for _ in range(60)]
    vocab = save_tokenizer(model, texts)
    save_encoder(model, "AutoModelForMaskedLM", vocab)
    rows = [{"text": text, "label": max(LABELS, key=text.count)} for text in texts]
    (folder / "reviews").mkdir()
    (folder / "reviews" / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train = read_example("classify")
    train["model"] |= {"transformers": str(model), "length": 16}
    train["data"] |= {"tokenizer": str(model)}
    losses = train_twice(folder, train, name)
    run_launcher("export", name, "--to", f"{name}-export", cwd=folder)
    evaluated = json.loads(run_launcher("eval", name, "-o", "json", cwd=folder))
    exported = folder / f"{name}-export"
    module = transformers.AutoModelForSequenceClassification.from_pretrained(exported).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    inputs = tokenizer(
        texts[:20], padding=True, truncation=True, max_length=16, return_tensors="pt"
    )
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        best = module(**inputs).logits.softmax(-1).max(-1)
    expected = [
        [module.config.id2label[int(index)], float(p)] for p, index in zip(*best, strict=True)
    ]
    (exported / "inputs.json").rename(folder / "inputs.json")
    predicted = []
    for place in (name, exported):
        output = folder / "predicted.jsonl"
        run_launcher("predict", str(place), "reviews/a.jsonl", "-o", str(output), cwd=folder)
        lines = [json.loads(line) for line in output.read_text().splitlines()[:20]]
        predicted.append([[line["label"], line["probability"]] for line in lines])
    return {
        "model_type": name,
        "losses": losses,
        "accuracy": evaluated["classification"]["top1"],
        "labels": [*module.config.id2label.values()],
        "expected": expected,
        "predicted": predicted,
    }


def try_reward(folder: Path) -> dict[str, object]:
    """A reward model of the body of an encoder, by the job of docs/text.md."""
    model, name = folder / "rated", "rated"
    vocab = save_tokenizer(model, [" ".join(LABELS)])
    save_encoder(model, "AutoModelForMaskedLM", vocab)
    pairs = [
        {"prompt": "mixed", "chosen": " good" * count, "rejected": " bad" * count}
        for count in range(1, 13)
    ]
    (folder / "preferences.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    train = {**CLASSIFIER_KEYS, **read_example("reward"), "steps": 12}
    train["model"] |= {"transformers": str(model), "length": 31}
    train["data"] |= {"tokenizer": str(model), "eval_split": 0}
    job = {"name": name, "accelerator": train.pop("accelerator"), "train": train}
    (folder / f"{name}.yaml").write_text(json.dumps(job))
    run_launcher("run", f"{name}.yaml", cwd=folder)
    run_launcher("export", name, "--to", f"{name}-export", cwd=folder)
    module = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / f"{name}-export"
    )
    losses = read_losses(folder, name)
    return {"model_type": "reward", "losses": losses, "labels": module.config.num_labels}


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        place = Path(sys.argv[1])
        tasks = {"classifier": try_classifier, "reward": try_reward}
        result = tasks[wanted](place) if wanted in tasks else try_model(place, wanted)
        print(json.dumps(result), flush=True)
