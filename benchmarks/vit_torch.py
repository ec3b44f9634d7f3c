"""Hugging Face's PyTorch ViT in eager mode, on one thread. Runs in the environment of benchmarks.environment."""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

from benchmarks.side import serve


def main() -> None:
    torch.set_num_threads(1)
    folder = pathlib.Path(sys.argv[1])
    sizes, read = json.loads((folder / "sizes.json").read_text()), np.load(folder / "batch.npz")
    model = transformers.ViTForImageClassification.from_pretrained(folder / "weights").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes["lr"], weight_decay=0.0)
    pixels = torch.from_numpy((read["images"].astype(np.float32) - 128) / 64).permute(0, 3, 1, 2).contiguous()
    labels = torch.from_numpy(read["labels"]).long()

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(pixels).logits, labels)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    serve(f"torch {torch.__version__} eager, {model.config._attn_implementation} attention", step)


if __name__ == "__main__":
    main()
