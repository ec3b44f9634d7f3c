"""Folders of weights as people leave them, and what transformers reads of each.

`FOLDERS` are tiny models whose files are stale, missing, renamed, tied, cut off or quantized.
`python -m tests.trainer.huggingface.weight_folders`, in an environment with torch, transformers and
peft, writes what transformers makes of each to tests/fixtures/weight_folders.json: the logits, or
why it has none. Otherwise this module needs NumPy alone.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ANSWERS = Path(__file__).parents[2] / "fixtures" / "weight_folders.json"
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
PIXELS_SHAPE = (3, 8, 8)
STALE_SEED = 1

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Raw:
    """A tensor of a dtype that NumPy does not have, as the bytes of its rows."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


# --- models ---------------------------------------------------------------------------------------

DECODER: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **DECODER},
    "tied": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **DECODER,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 32,
        "n_positions": 32,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **DECODER,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "id2label": {str(label): f"label {label}" for label in range(5)},
        "label2id": {f"label {label}": label for label in range(5)},
    },
}


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a model's tensors in transformers."""
    return {"gpt2": _gpt2_shapes, "vit": _vit_shapes}.get(model, lambda: _decoder_shapes(model))()


def _decoder_shapes(model: str) -> dict[str, tuple[int, ...]]:
    names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32, 16)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        names |= {f"{at}self_attn.{name}_proj.weight": (16, 16) for name in "qo"}
        names |= {f"{at}self_attn.{name}_proj.weight": (8, 16) for name in "kv"}
        names |= {f"{at}{name}_layernorm.weight": (16,) for name in ("input", "post_attention")}
        mlps = {f"{at}mlp.": 24}
        if model == "qwen3_moe":
            mlps = {f"{at}mlp.experts.{expert}.": 8 for expert in range(4)}
            names |= {f"{at}mlp.gate.weight": (4, 16)}
            names |= {f"{at}self_attn.{name}_norm.weight": (8,) for name in "qk"}
        for mlp, size in mlps.items():
            names |= {f"{mlp}{name}_proj.weight": (size, 16) for name in ("gate", "up")}
            names[f"{mlp}down_proj.weight"] = (16, size)
    names["model.norm.weight"] = (16,)
    return names | ({} if model == "tied" else {"lm_head.weight": (32, 16)})


def _gpt2_shapes() -> dict[str, tuple[int, ...]]:
    names: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (32, 16),
        "transformer.wpe.weight": (32, 16),
    }
    sizes = {"attn.c_attn": (16, 48), "attn.c_proj": (16, 16)}
    sizes |= {"mlp.c_fc": (16, 64), "mlp.c_proj": (64, 16)}
    for layer in range(2):
        for name, shape in sizes.items():
            names[f"transformer.h.{layer}.{name}.weight"] = shape
            names[f"transformer.h.{layer}.{name}.bias"] = shape[1:]
        for name in ("ln_1", "ln_2"):
            names |= {f"transformer.h.{layer}.{name}.{end}": (16,) for end in ("weight", "bias")}
    return names | {f"transformer.ln_f.{end}": (16,) for end in ("weight", "bias")}


def _vit_shapes() -> dict[str, tuple[int, ...]]:
    names: dict[str, tuple[int, ...]] = {
        "vit.embeddings.cls_token": (1, 1, 16),
        "vit.embeddings.position_embeddings": (1, 5, 16),
        "vit.embeddings.patch_embeddings.projection.weight": (16, 3, 4, 4),
        "vit.embeddings.patch_embeddings.projection.bias": (16,),
    }
    sizes = {f"attention.attention.{name}": (16, 16) for name in ("query", "key", "value")}
    sizes |= {"attention.output.dense": (16, 16)}
    sizes |= {"intermediate.dense": (24, 16), "output.dense": (16, 24)}
    for layer in range(2):
        at = f"vit.encoder.layer.{layer}."
        for name, shape in sizes.items():
            names |= {f"{at}{name}.weight": shape, f"{at}{name}.bias": shape[:1]}
        for name in ("layernorm_before", "layernorm_after"):
            names |= {f"{at}{name}.{end}": (16,) for end in ("weight", "bias")}
    names |= {f"vit.layernorm.{end}": (16,) for end in ("weight", "bias")}
    return names | {"classifier.weight": (5, 16), "classifier.bias": (5,)}


def draw(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return a float32 tensor that depends on its name and the seed alone."""
    random = np.random.default_rng([zlib.crc32(name.encode()), seed])
    array = 0.3 * random.standard_normal(shape)
    is_scale = len(shape) == 1 and name.endswith("weight")
    return (array + is_scale).astype(np.float32)


def weights(model: str = "llama", seed: int = 0) -> Arrays:
    """Return the tensors of a model by name."""
    return {name: draw(name, shape, seed) for name, shape in shapes(model).items()}


# --- files ----------------------------------------------------------------------------------------

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def encode_tensors(arrays: Mapping[str, Any]) -> bytes:
    """Return the content of a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, start = [], 0
    for name, array in arrays.items():
        raw = array
        if not isinstance(array, Raw):
            content = np.ascontiguousarray(array).tobytes()
            raw = Raw(DTYPES[array.dtype.name], array.shape, content)
        end = start + len(raw.content)
        header[name] = {"dtype": raw.dtype, "shape": raw.shape, "data_offsets": [start, end]}
        parts.append(raw.content)
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def to_bfloat16(array: np.ndarray) -> Raw:
    """Return the tensor cut to bfloat16."""
    high_bits = (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return Raw("BF16", array.shape, high_bits.tobytes())


def to_float8(array: np.ndarray, dtype: str = "F8_E4M3") -> Raw:
    """Return a tensor of this shape in a dtype of 8 bits."""
    random = np.random.default_rng(array.size)
    return Raw(dtype, array.shape, random.integers(0, 120, array.size, np.uint8).tobytes())


# A file is tensors, bytes or, with the ending .json, a value.
Files = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Pickle:
    """A file of torch.save."""

    arrays: Arrays

    def encode(self) -> bytes:
        """Return its content; without torch it is one that nobody can read."""
        if "torch" not in sys.modules:
            return b"PK"
        import torch

        file = io.BytesIO()
        torch.save({name: torch.from_numpy(array) for name, array in self.arrays.items()}, file)
        return file.getvalue()


def shards(arrays: Arrays, count: int = 2, index: str | None = INDEX) -> Files:
    """Return the tensors in `count` shards, with an index unless its name is None."""
    names, files = sorted(arrays), Files()
    places: dict[str, str] = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        files[file] = {name: arrays[name] for name in names[number::count]}
        places |= dict.fromkeys(names[number::count], file)
    if index is not None:
        files[index] = {"metadata": {"total_size": 1}, "weight_map": places}
    return files


def indexed(files: Files, places: Mapping[str, str | None]) -> Files:
    """Return shards whose index has other places of these tensors; None removes one."""
    changed = files[INDEX]["weight_map"] | places
    changed = {name: file for name, file in changed.items() if file is not None}
    return files | {INDEX: {**files[INDEX], "weight_map": changed}}


def adapter(*, has_config: bool) -> Files:
    """Return an adapter of peft on the queries of the first layer."""
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    matrices = {f"{stem}A.weight": draw("a", (2, 16)), f"{stem}B.weight": draw("b", (16, 2))}
    files: Files = {"adapter_model.safetensors": matrices}
    if has_config:
        keys = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4}
        keys |= {"target_modules": ["q_proj"], "layers_to_transform": [0]}
        files["adapter_config.json"] = {**keys, "base_model_name_or_path": "somewhere/else"}
    return files


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder of a model; `refused` is a part of our sentence about it, None if it is read."""

    build: Callable[[], Files]
    refused: str | None = None
    model: str = "llama"
    # Keys of config.json besides those of the model; None removes one.
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Whether it is read although transformers stops at something else than the weights.
    is_more: bool = False

    def write(self, path: Path) -> None:
        """Write the folder."""
        config = {**CONFIGS[self.model], **self.config}
        config = {key: value for key, value in config.items() if value is not None}
        for name, content in {"config.json": config, **self.build()}.items():
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                file.mkdir()
            elif isinstance(content, Path):
                file.symlink_to(content)
            elif isinstance(content, bytes):
                file.write_bytes(content)
            elif isinstance(content, Pickle):
                file.write_bytes(content.encode())
            elif name.endswith(".json"):
                file.write_text(json.dumps(content))
            else:
                file.write_bytes(encode_tensors(content))


def prefixed(prefix: str, model: str = "llama") -> Arrays:
    """Return the weights with something before every name."""
    return {prefix + name: array for name, array in weights(model).items()}


def stripped(prefix: str, model: str = "llama") -> Arrays:
    """Return the weights without the beginning of their names."""
    return {name.removeprefix(prefix): array for name, array in weights(model).items()}


def replaced(model: str = "llama", **changes: Any) -> Arrays:
    """Return the weights with other tensors in place of some; None removes one."""
    arrays = weights(model) | changes
    return {name: array for name, array in arrays.items() if array is not None}


def single(arrays: Arrays) -> Files:
    """Return the one file of a small model."""
    return {SINGLE: arrays}


# --- the folders ----------------------------------------------------------------------------------

QUERY = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
THIRD = "model-00003-of-00003.safetensors"
ROPE_OF_5 = {"rope_theta": 10000.0, "rope_type": "default"}
MOE_OF_5 = {"num_experts": None, "num_local_experts": 4, "rope_theta": None}


def stale() -> Arrays:
    """Return the weights of an older save."""
    return weights(seed=STALE_SEED)


AS_SAVED = {
    "single": Folder(lambda: single(weights())),
    "sharded": Folder(lambda: shards(weights(), 3)),
    "shards in a subfolder": Folder(
        lambda: {
            "parts/one.safetensors": weights(),
            INDEX: {
                "metadata": {},
                "weight_map": dict.fromkeys(weights(), "parts/one.safetensors"),
            },
        }
    ),
    "gpt2": Folder(lambda: single(weights("gpt2")), model="gpt2"),
    "vit": Folder(lambda: single(weights("vit")), model="vit"),
    "experts": Folder(lambda: single(weights("qwen3_moe")), model="qwen3_moe"),
    "experts of transformers 5": Folder(
        lambda: single(weights("qwen3_moe")),
        model="qwen3_moe",
        config={**MOE_OF_5, "rope_parameters": ROPE_OF_5},
    ),
    "experts under both names": Folder(
        lambda: single(weights("qwen3_moe")), model="qwen3_moe", config={"num_local_experts": 4}
    ),
    "two numbers of experts": Folder(
        lambda: single(weights("qwen3_moe")),
        "another name of it",
        model="qwen3_moe",
        config={"num_local_experts": 8},
    ),
}
STALE_AND_EXTRA = {
    "single beside an older index and its shards": Folder(
        lambda: shards(stale()) | single(weights())
    ),
    "single beside older shards": Folder(lambda: shards(stale(), index=None) | single(weights())),
    "single beside a torn index": Folder(lambda: single(weights()) | {INDEX: b'{"weight_map": '}),
    "single beside an index without its shards": Folder(
        lambda: single(weights()) | {INDEX: shards(weights())[INDEX]}
    ),
    "older single beside an index and its shards": Folder(
        lambda: single(stale()) | shards(weights())
    ),
    "shards beside older ones of another count": Folder(
        lambda: shards(stale(), 3) | shards(weights())
    ),
    "shards beside one that sorts last": Folder(
        lambda: {"zzz.safetensors": stale()} | shards(weights())
    ),
    "consolidated file beside the single one": Folder(
        lambda: (
            {"consolidated.safetensors": {"output.weight": draw("a", (32, 16))}} | single(weights())
        )
    ),
    "variants beside the single file": Folder(
        lambda: (
            {"model.fp16.safetensors": stale()}
            | shards(stale(), index="model.safetensors.index.fp16.json")
            | single(weights())
        )
    ),
    "pickle beside the single file": Folder(
        lambda: {"pytorch_model.bin": Pickle(stale())} | single(weights())
    ),
    "pickle beside an index": Folder(
        lambda: {"pytorch_model.bin": Pickle(stale())} | shards(weights())
    ),
    "state of a training beside the single file": Folder(
        lambda: (
            {
                "optimizer.safetensors": {"state.0.exp_avg": draw("a", (32, 16))},
                "optimizer.pt": Pickle({"step": np.zeros(1)}),
                "training_args.bin": Pickle({"step": np.zeros(1)}),
            }
            | single(weights())
        )
    ),
    "state of a training beside shards": Folder(
        lambda: (
            {
                "optimizer.safetensors": {QUERY: draw("a", (16, 16))},
                "ema.safetensors": {QUERY: draw("b", (16, 16))},
            }
            | shards(weights())
        )
    ),
    "adapter without its config beside the single file": Folder(
        lambda: adapter(has_config=False) | single(weights())
    ),
    "adapter without its config beside shards": Folder(
        lambda: adapter(has_config=False) | shards(weights())
    ),
    "adapter inside the model": Folder(
        lambda: adapter(has_config=True) | single(weights()),
        "adapter_config.json: transformers adds these adapters",
    ),
    "adapter inside the model in shards": Folder(
        lambda: adapter(has_config=True) | shards(weights()),
        "adapter_config.json: transformers adds these adapters",
    ),
    "older save in a subfolder": Folder(
        lambda: {f"checkpoint-100/{SINGLE}": stale()} | single(weights())
    ),
    "single that is a folder beside an index": Folder(lambda: {SINGLE: None} | shards(weights())),
    "single that is a broken link beside an index": Folder(
        lambda: {SINGLE: Path("blobs/gone")} | shards(weights())
    ),
}
MISSING = {
    "no weights": Folder(dict, "it has neither model.safetensors nor model.safetensors.index.json"),
    "pickle alone": Folder(
        lambda: {"pytorch_model.bin": Pickle(weights())}, "it has pytorch_model.bin"
    ),
    "shards without an index": Folder(lambda: shards(weights(), index=None), f"it has {FIRST}"),
    "variant alone": Folder(
        lambda: {"model.fp16.safetensors": weights()}, "it has model.fp16.safetensors"
    ),
    "file of another name alone": Folder(
        lambda: {"weights.safetensors": weights()}, "it has weights.safetensors"
    ),
    "adapter alone": Folder(lambda: adapter(has_config=False), "it has adapter_model.safetensors"),
    "pickle and other tensors": Folder(
        lambda: {"ema.safetensors": stale(), "pytorch_model.bin": Pickle(weights())},
        "it has ema.safetensors, pytorch_model.bin",
    ),
    "another file named in config.json": Folder(
        lambda: {"b.safetensors": weights()} | single(stale()),
        "names another file of weights",
        config={"transformers_weights": "b.safetensors"},
    ),
    "index with a missing shard": Folder(
        lambda: {name: content for name, content in shards(weights()).items() if name != SECOND},
        f"the folder lacks {SECOND} of ",
    ),
    "index that is torn": Folder(
        lambda: shards(weights()) | {INDEX: b'{"weight_map": '}, "cannot be read"
    ),
    "index without a map": Folder(
        lambda: shards(weights()) | {INDEX: {"metadata": {}}}, "has no weight_map"
    ),
    "index with an empty map": Folder(
        lambda: shards(weights()) | {INDEX: {"metadata": {}, "weight_map": {}}},
        "has no weight_map",
    ),
    "index without metadata": Folder(
        lambda: shards(weights()) | {INDEX: {"weight_map": shards(weights())[INDEX]["weight_map"]}},
        is_more=True,
    ),
    "index that names a tensor that no shard has": Folder(
        lambda: indexed(shards(replaced(**{QUERY: None})), {QUERY: FIRST}), f"{QUERY} is missing"
    ),
    "index that names the other shard": Folder(
        lambda: indexed(shards(weights()), dict.fromkeys(sorted(weights())[1:4], FIRST))
    ),
    "index that leaves out a tensor of a shard": Folder(
        lambda: indexed(shards(weights()), {QUERY: None})
    ),
    "index that names an unused tensor that no shard has": Folder(
        lambda: indexed(shards(weights()), {"extra": FIRST})
    ),
    "two shards with one tensor": Folder(
        lambda: indexed(
            shards(weights()) | {THIRD: {QUERY: draw("other", (16, 16))}}, {QUERY: THIRD}
        ),
        f"both hold {QUERY}",
    ),
    "two shards with one tensor that is equal": Folder(
        lambda: indexed(shards(weights()) | {THIRD: {QUERY: weights()[QUERY]}}, {QUERY: THIRD}),
        f"both hold {QUERY}",
    ),
    "index over two saves": Folder(
        lambda: indexed(
            shards(stale(), 3) | shards(weights()),
            {QUERY: shards(stale(), 3)[INDEX]["weight_map"][QUERY]},
        ),
        "both hold",
    ),
    "single without its last bytes": Folder(
        lambda: {SINGLE: encode_tensors(weights())[:-100]}, "cannot be read"
    ),
    "single with bytes after its end": Folder(
        lambda: {SINGLE: encode_tensors(weights()) + bytes(64)}, "cannot be read"
    ),
    "single that ends in its header": Folder(
        lambda: {SINGLE: encode_tensors(weights())[:300]}, "cannot be read"
    ),
    "shard without its last byte": Folder(
        lambda: shards(weights()) | {SECOND: encode_tensors(shards(weights())[SECOND])[:-1]},
        "cannot be read",
    ),
    "pointer of Git LFS in place of the single file": Folder(
        lambda: {SINGLE: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"},
        "cannot be read",
    ),
    "empty single file": Folder(lambda: {SINGLE: b""}, "cannot be read"),
    "single file without tensors": Folder(lambda: single({}), "and 18 more are missing"),
    "missing tensor": Folder(lambda: single(replaced(**{DOWN: None})), f"{DOWN} is missing"),
    "missing head": Folder(lambda: single(replaced(**{HEAD: None})), f"{HEAD} is missing"),
    "tensor of another shape": Folder(
        lambda: single(replaced(**{QUERY: draw(QUERY, (8, 16))})), f"{QUERY} is [8, 16]"
    ),
    "bias that the model does not have": Folder(
        lambda: single(replaced(**{QUERY.replace("weight", "bias"): draw("a", (16,))})),
        "q_proj.bias is not used",
    ),
    "a layer too many": Folder(
        lambda: single(replaced(**{NORM.replace("0", "2"): draw("a", (16,))})),
        "model.layers.2.input_layernorm.weight is not used",
    ),
    "score of a classifier": Folder(
        lambda: single(replaced(**{"score.weight": draw("a", (2, 16))})), "score.weight is not used"
    ),
    "frequencies of old files": Folder(
        lambda: single(
            replaced(**{"model.layers.0.self_attn.rotary_emb.inv_freq": draw("a", (4,))})
        )
    ),
    "masks of old GPT-2 files": Folder(
        lambda: single(replaced("gpt2", **{"transformer.h.0.attn.bias": np.ones((1, 1, 32, 32))})),
        model="gpt2",
    ),
    "pooler of a ViT": Folder(
        lambda: single(replaced("vit", **{"vit.pooler.dense.weight": draw("a", (16, 16))})),
        model="vit",
    ),
    "fused experts": Folder(
        lambda: single(fuse_experts()),
        "and 21 more are missing; model.layers.0.mlp.experts.down_proj, ",
        model="qwen3_moe",
    ),
}


def fuse_experts() -> Arrays:
    """Return the weights by the names that they have in the memory of transformers 5."""
    kernels = weights("qwen3_moe")
    arrays = {name: array for name, array in kernels.items() if ".experts." not in name}
    for layer in range(2):
        experts = [f"model.layers.{layer}.mlp.experts.{expert}." for expert in range(4)]
        both = [[kernels[f"{at}{name}_proj.weight"] for name in ("gate", "up")] for at in experts]
        down = [kernels[f"{at}down_proj.weight"] for at in experts]
        arrays[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.stack(
            [np.concatenate(pair) for pair in both]
        )
        arrays[f"model.layers.{layer}.mlp.experts.down_proj"] = np.stack(down)
    return arrays


WRAPPED = "was saved from a wrapped model"
WRAPPERS = ("module.", "_orig_mod.", "base_model.model.", "_orig_mod.module.")
WRAPPERS += ("module._orig_mod.", "module.base_model.model.", "_fsdp_wrapped_module.")
WRAPPERS += ("module.model.", "base_model.model._orig_mod.")
PREFIXED = {
    **{
        f"every name after {prefix}": Folder(partial(single, prefixed(prefix)), WRAPPED)
        for prefix in WRAPPERS
    },
    **{
        f"every name of {model} after {prefix}": Folder(
            partial(single, prefixed(prefix, model)), WRAPPED, model=model
        )
        for model, prefix in (("tied", "module."), ("gpt2", "_orig_mod."), ("vit", "module."))
    },
    "layers that were compiled one by one": Folder(
        lambda: single(
            {
                re.sub(r"(layers\.\d\.)", r"\1_orig_mod.", name): array
                for name, array in weights().items()
            }
        ),
        WRAPPED,
    ),
    "some names after module.": Folder(
        lambda: single(replaced(**{f"module.{QUERY}": weights()[QUERY], QUERY: None})), WRAPPED
    ),
    "every name twice, once after module.": Folder(
        lambda: single(weights() | prefixed("module.")), WRAPPED
    ),
    "adapters that were not merged": Folder(
        lambda: single(
            prefixed("base_model.model.")
            | {
                f"base_model.model.{QUERY.replace('weight', 'lora_A.default.weight')}": draw(
                    "a", (2, 16)
                )
            }
        ),
        WRAPPED,
    ),
    "every name after model.": Folder(lambda: single(prefixed("model."))),
    "every name after vit.": Folder(lambda: single(prefixed("vit.", "vit")), model="vit"),
    "no name after model.": Folder(lambda: single(stripped("model."))),
    "no name after transformer.": Folder(
        lambda: single(stripped("transformer.", "gpt2")), model="gpt2"
    ),
    "no name after vit.": Folder(lambda: single(stripped("vit.", "vit")), model="vit"),
    "every name after language_model.": Folder(
        lambda: single(prefixed("language_model.")), "and 18 more are missing; language_model."
    ),
    "one name without model.": Folder(
        lambda: single(replaced(**{NORM: None, NORM.removeprefix("model."): weights()[NORM]})),
        f"{NORM} is missing",
    ),
    "one name with and without model.": Folder(
        lambda: single(replaced(**{"norm.weight": draw("other", (16,))})),
        "norm.weight is not used",
    ),
}


def tied(**changes: Any) -> Files:
    """Return the file of a model whose config says that head and embedding are tied."""
    return single(replaced("tied", **changes))


def nearly_equal() -> np.ndarray:
    """Return the embedding with another number in its last place."""
    matrix = weights("tied")[EMBEDDING].copy()
    matrix[31, 15] += 0.5
    return matrix


def embedding() -> np.ndarray:
    """Return the embedding of the tied model."""
    matrix: np.ndarray = weights("tied")[EMBEDDING]
    return matrix


DIFFERS = "lm_head.weight differs from"
TIED = {
    name: dataclasses.replace(folder, model="tied")
    for name, folder in {
        "tied without a head": Folder(tied),
        "tied with an equal head": Folder(lambda: tied(**{HEAD: embedding()})),
        "tied with another head": Folder(lambda: tied(**{HEAD: draw(HEAD, (32, 16))}), DIFFERS),
        "tied with a nearly equal head": Folder(lambda: tied(**{HEAD: nearly_equal()}), DIFFERS),
        "tied with another head in another shard": Folder(
            lambda: shards(replaced("tied", **{HEAD: draw(HEAD, (32, 16))}), 4), DIFFERS
        ),
        "tied with a rounded head": Folder(
            lambda: tied(**{HEAD: to_bfloat16(embedding())}), DIFFERS
        ),
        "tied with a smaller head": Folder(
            lambda: tied(**{HEAD: draw(HEAD, (16, 16))}), "lm_head.weight is [16, 16]"
        ),
        "tied with the head alone": Folder(lambda: tied(**{HEAD: embedding(), EMBEDDING: None})),
        "tied without either": Folder(lambda: tied(**{EMBEDDING: None}), f"{EMBEDDING} is missing"),
        "tied with a head of another module": Folder(
            lambda: tied(**{"model.draft.lm_head.weight": draw("a", (32, 16))}),
            "model.draft.lm_head.weight is not used",
        ),
    }.items()
}
TIED |= {
    "untied with equal matrices": Folder(lambda: single(replaced(**{HEAD: weights()[EMBEDDING]}))),
    "GPT-2 with an equal head": Folder(
        lambda: single(replaced("gpt2", **{HEAD: weights("gpt2")["transformer.wte.weight"]})),
        model="gpt2",
    ),
    "GPT-2 with another head": Folder(
        lambda: single(replaced("gpt2", **{HEAD: draw(HEAD, (32, 16))})), DIFFERS, model="gpt2"
    ),
}


def cast(*kinds: type[np.floating[Any]]) -> Arrays:
    """Return the weights in these dtypes, one after the other."""
    arrays = enumerate(weights().items())
    return {name: array.astype(kinds[number % len(kinds)]) for number, (name, array) in arrays}


OF_DTYPES = {
    "bfloat16": Folder(
        lambda: single({name: to_bfloat16(array) for name, array in weights().items()})
    ),
    "float16": Folder(lambda: single(cast(np.float16))),
    "float64": Folder(lambda: single(cast(np.float64))),
    "a dtype for each tensor": Folder(
        lambda: single(
            cast(np.float16, np.float64, np.float32) | {HEAD: to_bfloat16(weights()[HEAD])}
        )
    ),
    "float32 where config.json says bfloat16": Folder(
        lambda: single(weights()), config={"dtype": "bfloat16"}
    ),
    "one tensor of whole numbers": Folder(
        lambda: single(replaced(**{QUERY: np.ones((16, 16), np.int64)})), f"{QUERY} is I64"
    ),
}

# --- quantized weights ----------------------------------------------------------------------------

KERNELS = [name for name in shapes("llama") if name.endswith("_proj.weight")]


def fp8(dtype: str = "F8_E4M3", scale: str | None = "_scale_inv") -> Arrays:
    """Return weights whose kernels have 8 bits."""
    arrays = weights()
    for name in KERNELS:
        arrays[name] = to_float8(arrays[name], dtype)
        if scale is not None:
            arrays[name + scale] = np.ones((1, 1), np.float32)
    return arrays


def bnb_int8() -> Arrays:
    """Return weights as bitsandbytes saves them with 8 bits."""
    arrays = weights()
    for name in KERNELS:
        rows = np.abs(arrays[name]).max(1)
        arrays[name] = np.round(arrays[name] / rows[:, None] * 127).astype(np.int8)
        arrays[name.replace("weight", "SCB")] = rows
        arrays[name.replace("weight", "weight_format")] = np.zeros((), np.uint8)
    return arrays


def bnb_int4() -> Arrays:
    """Return weights as bitsandbytes saves them with 4 bits."""
    arrays = weights()
    for name in KERNELS:
        count = arrays[name].size
        arrays[name] = np.zeros((count // 2, 1), np.uint8)
        arrays[f"{name}.absmax"] = np.ones(-(-count // 64), np.float32)
        arrays[f"{name}.quant_map"] = np.linspace(-1, 1, 16, dtype=np.float32)
        arrays[f"{name}.quant_state.bitsandbytes__nf4"] = np.zeros(90, np.uint8)
    return arrays


def packed(*, is_awq: bool) -> Arrays:
    """Return weights as GPTQ or AWQ packs them, eight numbers of 4 bits in one of 32."""
    arrays = weights()
    for name in KERNELS:
        outputs, inputs = arrays.pop(name).shape
        stem = name.removesuffix(".weight")
        shape = (inputs, outputs // 8) if is_awq else (inputs // 8, outputs)
        arrays[f"{stem}.qweight"] = np.zeros(shape, np.int32)
        arrays[f"{stem}.qzeros"] = np.zeros((1, outputs // 8), np.int32)
        arrays[f"{stem}.scales"] = np.ones((1, outputs), np.float16)
        if not is_awq:
            arrays[f"{stem}.g_idx"] = np.zeros(inputs, np.int32)
    return arrays


def mxfp4() -> Arrays:
    """Return weights of experts in blocks of 4 bits, as of gpt-oss."""
    arrays = weights("qwen3_moe")
    arrays = {name: array for name, array in arrays.items() if ".experts." not in name}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        for name, shape in (("gate_up_proj", (4, 16, 1, 8)), ("down_proj", (4, 16, 1, 4))):
            arrays[f"{at}{name}_blocks"] = np.zeros(shape, np.uint8)
            arrays[f"{at}{name}_scales"] = np.zeros(shape[:3], np.uint8)
    return arrays


METHODS: dict[str, tuple[Callable[[], Arrays], dict[str, Any], str]] = {
    "fp8": (
        fp8,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "are F8_E4M3",
    ),
    "bitsandbytes int8": (
        bnb_int8,
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "are I8",
    ),
    "bitsandbytes int4": (
        bnb_int4,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "are U8",
    ),
    "GPTQ": (
        partial(packed, is_awq=False),
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": True},
        "and 11 more are missing",
    ),
    "AWQ": (
        partial(packed, is_awq=True),
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
        "and 11 more are missing",
    ),
    "MXFP4": (mxfp4, {"quant_method": "mxfp4"}, "and 21 more are missing"),
}


def quantized(name: str, build: Callable[[], Arrays], keys: Any, message: str) -> dict[str, Folder]:
    """Return two folders: with what config.json says about the weights, and without it."""
    model = "qwen3_moe" if name == "MXFP4" else "llama"
    said = Folder(
        lambda: single(build()),
        "says that the weights are quantized",
        model=model,
        config={"quantization_config": keys},
    )
    unsaid = Folder(lambda: single(build()), message, model=model)
    return {name: said, f"{name}, unsaid in config.json": unsaid}


QUANTIZED = {
    key: folder
    for name, parts in METHODS.items()
    for key, folder in quantized(name, *parts).items()
} | {
    "fp8 without scales": Folder(lambda: single(fp8(scale=None)), "are F8_E4M3"),
    "fp8 with an exponent of five bits": Folder(
        lambda: single(fp8("F8_E5M2", scale="_scale")), "are F8_E5M2"
    ),
    "one fp8 tensor in the last shard": Folder(
        lambda: shards(replaced(**{DOWN: to_float8(weights()[DOWN])}), 3), f"{DOWN} is F8_E4M3"
    ),
    "whole numbers in place of weights": Folder(
        lambda: single(
            weights() | {name: (weights()[name] * 100).astype(np.int8) for name in KERNELS}
        ),
        "are I8",
    ),
    "GPTQ with a file of its own": Folder(
        lambda: (
            single(packed(is_awq=False)) | {"quantize_config.json": {"bits": 4, "group_size": -1}}
        ),
        "and 11 more are missing",
    ),
    "compressed tensors": Folder(
        lambda: single(fp8(scale="_scale")),
        "compression_config",
        config={"compression_config": {"format": "int-quantized"}},
    ),
}
FOLDERS: dict[str, Folder] = (
    AS_SAVED | STALE_AND_EXTRA | MISSING | PREFIXED | TIED | OF_DTYPES | QUANTIZED
)


# --- transformers' answers ------------------------------------------------------------------------


def pixels() -> np.ndarray:
    """Return an image [C, H, W] for the models of images, normalized."""
    return draw("pixels", PIXELS_SHAPE)


def _ask_transformers(path: Path) -> dict[str, Any]:
    """Return the logits that transformers computes, or what it lacks."""
    import torch
    import transformers

    is_image = "image_size" in json.loads((path / "config.json").read_text())
    kind: Any = transformers.AutoModelForImageClassification
    kind = kind if is_image else transformers.AutoModelForCausalLM
    try:
        model, notes = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        if notes["missing_keys"] or notes["mismatched_keys"]:
            lacks = sorted(map(str, {*notes["missing_keys"], *notes["mismatched_keys"]}))
            return {"drawn_at_random": len(lacks), "first": lacks[0]}
        with torch.no_grad():
            if is_image:
                logits = model.eval()(torch.from_numpy(pixels())[None]).logits[0]
            else:
                logits = model.eval()(torch.tensor([TOKENS])).logits[0, -1]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}"}
    unexpected = sorted(notes["unexpected_keys"])
    return {"logits": [round(float(x), 7) for x in logits], "ignored": len(unexpected)}


def main() -> None:
    """Write the answers of the installed transformers."""
    import torch
    import transformers

    answers = {}
    with tempfile.TemporaryDirectory() as root:
        for number, (name, folder) in enumerate(FOLDERS.items()):
            path = Path(root) / str(number)
            folder.write(path)
            answers[name] = _ask_transformers(path)
            shutil.rmtree(path)
            print(name, {key: value for key, value in answers[name].items() if key != "logits"})
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(answers[name])}" for name in answers)
    ANSWERS.write_text(f'{{"versions": {json.dumps(versions)},\n"answers": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    import torch  # noqa: F401

    main()
