"""Hugging Face's PyTorch ViT on one thread: eager, compiled, or with torch_xla.

It runs in the environment that benchmarks.vit builds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pathlib
import sys

import numpy as np
import torch
import transformers

from benchmarks.side import serve_steps


def main() -> None:
    torch.set_num_threads(1)
    folder, mode = pathlib.Path(sys.argv[1]), sys.argv[2]
    sizes, arrays = json.loads((folder / "sizes.json").read_text()), np.load(folder / "batch.npz")
    xla = importlib.import_module("torch_xla") if mode == "xla" else None
    device = "cpu" if xla is None else xla.device()
    model = (
        transformers.ViTForImageClassification.from_pretrained(folder / "weights")
        .to(device)
        .train()
    )
    forward = torch.compile(model) if mode == "compile" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes["lr"], weight_decay=0.0)
    pixels = (
        torch.from_numpy((arrays["images"].astype(np.float32) - 128) / 64)
        .permute(0, 3, 1, 2)
        .contiguous()
    )
    pixels, labels = pixels.to(device), torch.from_numpy(arrays["labels"]).long().to(device)
    is_bf16 = sizes["precision"] == "bf16"

    def run_step() -> float:
        optimizer.zero_grad()
        with (
            torch.autocast(pixels.device.type, torch.bfloat16)
            if is_bf16
            else contextlib.nullcontext()
        ):
            loss = torch.nn.functional.cross_entropy(forward(pixels).logits, labels)
        loss.backward()
        optimizer.step()
        if xla is not None:
            xla.sync()
        return float(loss.detach())

    serve_steps(
        f"torch {torch.__version__} {mode}, {model.config._attn_implementation} attention", run_step
    )


if __name__ == "__main__":
    main()
