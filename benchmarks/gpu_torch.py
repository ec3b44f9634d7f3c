"""A model of transformers under torch.compile, SDPA and bf16 autocast: the median seconds of a step, on stdout."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
import transformers

WARM, STEPS = 5, 20


def model_of(sizes: dict[str, Any]) -> torch.nn.Module:
    same = {
        "num_hidden_layers": sizes["layers"],
        "hidden_size": sizes["width"],
        "num_attention_heads": sizes["heads"],
        "attn_implementation": "sdpa",
    }
    if sizes["kind"] == "vit":
        config = transformers.ViTConfig(
            **same,
            intermediate_size=4 * sizes["width"],
            image_size=sizes["image"],
            patch_size=sizes["patch"],
            num_labels=sizes["classes"],
        )
        return transformers.ViTForImageClassification(config)
    config = transformers.LlamaConfig(
        **same,
        intermediate_size=sizes["hidden"],
        vocab_size=sizes["vocab"],
        max_position_embeddings=sizes["length"],
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def batch_of(sizes: dict[str, Any], device: str) -> dict[str, torch.Tensor]:
    rows = sizes["batch"]
    if sizes["kind"] == "vit":
        images = torch.randn(rows, 3, *sizes["image"], device=device)
        return {"pixel_values": images, "labels": torch.randint(sizes["classes"], (rows,), device=device)}
    tokens = torch.randint(sizes["vocab"], (rows, sizes["length"]), device=device)
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    sizes = json.loads(sys.argv[1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.compile(model_of(sizes).to(device).train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")
    batch, before, stamps = batch_of(sizes, device), None, []
    for _ in range(WARM + STEPS):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if before is not None:
            before.item()  # as ours: a step is launched before the one before it is waited for
        before = loss.detach()
        stamps.append(time.perf_counter())
    took = stamps[WARM:]
    print(json.dumps(statistics.median([after - since for since, after in zip(took, took[1:], strict=False)])))


if __name__ == "__main__":
    main()
