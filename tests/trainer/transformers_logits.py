"""Computes logits with transformers, in an environment that holds it. Nothing of ours is imported.

Arguments: pairs of a Hugging Face folder and a file of inputs; prints one JSON object a pair.
"""

import json
import sys

import torch
import transformers
from safetensors import safe_open


def compute_logits(folder, file):
    with open(f"{folder}/config.json") as config:
        architecture = json.load(config)["architectures"][0]
    # eager: the others leave out the cap of the scores
    keys = {"output_loading_info": True, "attn_implementation": "eager"}
    model, loading = getattr(transformers, architecture).from_pretrained(folder, **keys)
    with safe_open(file, "pt") as tensors, torch.no_grad():
        inputs = {
            name: tensors.get_tensor(name)
            for name in ("pixel_values", "input_ids")
            if name in set(tensors.keys())
        }
        logits = model.eval()(**inputs).logits
    faults = {name: sorted(map(str, loading[name])) for name in loading if loading[name]}
    return {"logits": logits.tolist(), "dtype": str(model.dtype), "faults": faults}


torch.set_num_threads(1)
for folder, file in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    print(json.dumps(compute_logits(folder, file)))
