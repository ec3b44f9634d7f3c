"""Print the median step time of a transformers model with SDPA and bf16 autocast."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers

from benchmarks import side


def build_model(sizes: dict[str, Any]) -> torch.nn.Module:
    shared_sizes = {
        "num_hidden_layers": sizes["layers"],
        "hidden_size": sizes["width"],
        "num_attention_heads": sizes["heads"],
        "attn_implementation": "sdpa",
    }
    if sizes["kind"] == "vit":
        config = transformers.ViTConfig(
            **shared_sizes,
            intermediate_size=4 * sizes["width"],
            image_size=sizes["image"],
            patch_size=sizes["patch"],
            num_labels=sizes["classes"],
        )
        return transformers.ViTForImageClassification(config)
    config = transformers.LlamaConfig(
        **shared_sizes,
        intermediate_size=sizes["hidden"],
        vocab_size=sizes["vocab"],
        max_position_embeddings=sizes["length"],
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def make_batch(sizes: dict[str, Any], device: str) -> dict[str, torch.Tensor]:
    rows = sizes["batch"]
    if sizes["kind"] == "vit":
        images = torch.randn(rows, 3, *sizes["image"], device=device)
        return {
            "pixel_values": images,
            "labels": torch.randint(sizes["classes"], (rows,), device=device),
        }
    tokens = torch.randint(sizes["vocab"], (rows, sizes["length"]), device=device)
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    sizes = json.loads(sys.argv[1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(sizes).to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=sizes["lr"], weight_decay=0.0, fused=device == "cuda"
    )
    forward, batch = torch.compile(model) if sizes["compile"] else model, make_batch(sizes, device)

    def launch_step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = forward(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), sizes["clip"])
        optimizer.step()
        return loss.detach()

    print(json.dumps(side.median_step_s(launch_step, torch.Tensor.item)))


if __name__ == "__main__":
    main()
