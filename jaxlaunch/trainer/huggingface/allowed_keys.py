"""Which keys a config.json may have: those that are read, those that say nothing, and no other. Reads no file.

transformers ignores a key that it does not know; here it is refused, since it may be of code that computes otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxlaunch.trainer.huggingface.families import DOES, SAYING_NOTHING, UNSUPPORTED, Family

OF_EXPERTS = frozenset({"router_aux_loss_coef", "output_router_logits"})
OF_ROPE = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
# Keys of a block of rotary positions; `finetuned` is of YaRN's own models.
IN_ROPE = frozenset(
    "attention_factor beta_fast beta_slow factor finetuned high_freq_factor low_freq_factor mscale mscale_all_dim "
    "original_max_position_embeddings rope_theta rope_type truncate type".split()
)
# What each way of a family to say its windows reads.
OF_WINDOWS: Mapping[str | None, frozenset[str]] = {
    None: frozenset(),
    "all": frozenset({"sliding_window"}),
    "all_switched": frozenset({"sliding_window", "use_sliding_window"}),
    "switched": frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}),
    "layers": frozenset({"sliding_window", "layer_types", "sliding_window_pattern"}),
}
BOOLEANS = frozenset(
    "attention_bias mlp_bias norm_topk_prob output_router_logits tie_word_embeddings use_sliding_window".split()
)


def read(name: str, family: Family) -> frozenset[str]:
    """The keys of theirs that make a model of the family what it is."""
    found = {*family.keys, *family.constant, family.activation}
    if family.kind == "decoder":
        found |= OF_ROPE | OF_WINDOWS[family.window]
    if family.has_biases:
        found |= {"attention_bias"} | ({"mlp_bias"} if name == "llama" else set())
    if "experts" in family.keys.values():
        found |= OF_EXPERTS | ({"decoder_sparse_step", "mlp_only_layers"} if name == "qwen3_moe" else set())
    return frozenset(found)


def faults(name: str, family: Family, config: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each key of a config.json that the family does not have, or whose value it has not."""
    known, plain = read(name, family), {**UNSUPPORTED, **family.constant}
    for key, value in config.items():
        said = f"{key} is {json.dumps(value)}"
        if key in family.constant or (key in UNSUPPORTED and key not in known):
            if value != plain[key] and (value is not None or plain[key]):
                only = json.dumps(plain[key])
                yield f"{said}, which {DOES[key]}: only {only} is supported; start from weights that have it so"
        elif key in known:
            yield from _of_wrong_type(key, value, family)
        elif key in SAYING_NOTHING or key in family.silent or (key == "head_dim" and _is_quotient(value, config)):
            continue
        elif value not in (None, False, "", [], {}):
            yield (
                f"{said}, and {name} has no such key: what it changes is not known here; remove it if the weights "
                "were trained without it"
            )


def _of_wrong_type(key: str, value: Any, family: Family) -> Iterator[str]:
    """A switch that is none, and a null that transformers cannot read."""
    if key in BOOLEANS and value is not None and not isinstance(value, bool):
        yield f"{key} is {json.dumps(value)}, not true or false"
    if value is None and family.keys.get(key) in ("experts", "experts_per_token", "expert_hidden", "head_size"):
        if family.absent.get(key) is not None:
            yield f"{key} is null, not a number; leave it out for {family.absent[key]}"


def _is_quotient(value: Any, config: Mapping[str, Any]) -> bool:
    """Whether a size of the heads is the one that a family without such a key has by itself."""
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return isinstance(width, int) and isinstance(heads, int) and heads > 0 and value == width // heads
