"""Compares many architectures of transformers with PyTorch, and writes the package's table.

It runs in an environment with torch, torchax and transformers:
python -m tests.trainer.torch_models.architectures [MODEL_TYPE ...]
Rows of architectures that are not named stay as they are.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import jax

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.torch_models import checked, compare, modules

# Language models by model_type.
ARCHITECTURES = [
    "llama",
    "olmo3",
    "gpt_oss",
    "qwen3_next",
    "deepseek_v3",
    "glm4_moe",
    "llama4_text",
    "gemma3_text",
    # The language model of a model of texts and images.
    "gemma3",
    "qwen3",
    "phi3",
    "smollm3",
    "granite",
    "qwen3_moe",
    "mistral",
    "ministral",
    "mixtral",
    "qwen2",
    "gemma",
    "gemma2",
    "olmo2",
    "gpt2",
    "cohere2",
    "exaone4",
    "ernie4_5",
    "hunyuan_v1_dense",
    "lfm2",
    "starcoder2",
    "seed_oss",
    "glm4",
    "glm",
    "olmoe",
    "qwen2_moe",
    "deepseek_v2",
    "granitemoe",
    "apertus",
    "arcee",
    "nemotron",
    "stablelm",
    "helium",
    "falcon",
    "gpt_neox",
    "bloom",
    "opt",
    "phi",
    "phimoe",
    "olmo",
    "cohere",
    "mamba2",
    "mamba",
    "jamba",
    "falcon_h1",
    "bamba",
    "granitemoehybrid",
    "minimax_m2",
    "ernie4_5_moe",
    "dots1",
    "hunyuan_v1_moe",
    "persimmon",
    "gpt_bigcode",
    "gptj",
    "gpt_neo",
    "codegen",
    "mpt",
    "biogpt",
    "bitnet",
    "recurrent_gemma",
    "rwkv",
    "diffllama",
    "doge",
    "vaultgemma",
    "modernbert-decoder",
    "flex_olmo",
    "lfm2_moe",
    "nanochat",
    "exaone_moe",
    "cohere2_moe",
    "granitemoeshared",
    "longcat_flash",
    "minimax",
    "zamba2",
    "jetmoe",
    "dbrx",
    "xglm",
    "openai-gpt",
    "youtu",
    "solar_open",
    "falcon_mamba",
    "zamba",
    "ctrl",
    "xlstm",
]
# Encoders, whose masked language models are compared.
ENCODERS = [
    "bert",
    "roberta",
    "distilbert",
    "modernbert",
    "deberta-v2",
    "electra",
    "albert",
    "xlm-roberta",
    "camembert",
    "mpnet",
]

# Sizes of Mamba layers, whose heads must be as wide as the layer.
MAMBA_SIZES = {
    "hidden_size": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}
# Sizes that published configurations have, and that the default configuration leaves out.
SIZES: dict[str, dict[str, Any]] = {
    "bamba": MAMBA_SIZES,
    "deepseek_v2": {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 2},
    "dots1": {
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**MAMBA_SIZES, "layer_types": ["mamba", "attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "mamba2": {
        "hidden_size": 32,
        "expand": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
    },
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}


def compare_architecture(model_type: str) -> compare.Comparison:
    """Compare an architecture in its default configuration. Raises SpecError, and much else."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **SIZES.get(model_type, {}))
    return compare.compare_config(config.to_dict())


def main(names: list[str]) -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", compare.MESH_DEVICES)
    modules.import_libraries()
    rows = dict(checked.read_table())
    for name in names or [*ARCHITECTURES, *ENCODERS]:
        rows.pop(name, None)
        try:
            rows[name] = compare_architecture(name)
            print(json.dumps(rows[name]._asdict()), flush=True)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            reason = " ".join(str(error).split())[:400]
            kind = "" if isinstance(error, SpecError) else f"{place.filename}:{place.lineno}: "
            print(f"{name}: {kind}{type(error).__name__}: {reason}", flush=True)
        checked.TABLE.write_bytes(checked.encode_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
