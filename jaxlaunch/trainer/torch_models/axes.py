"""The axes of the parameters of a module, by the tensor-parallel plan of transformers.

A plan maps patterns of module or parameter names to how torch would split them: `colwise` splits
the outputs of a linear layer, `rowwise` its inputs. Here the splits become logical axes, which
`sharding.RULES` maps to the mesh. torch stores a linear layer's weight as [outputs, inputs].
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch.trainer.parallel.sharding import Axes
from jaxlaunch.trainer.torch_models import adapters

# Styles of a plan whose outputs, or rows of a table, are split over mp.
COLUMN_STYLES = (
    "colwise",
    "colwise_rep",
    "colwise_gather_output",
    "packed_colwise",
    "local_colwise",
    "local_packed_colwise",
)
ROW_STYLES = ("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise", "packed_rowwise")
TABLE_STYLES = ("embedding_rowwise",)
EXPERT_STYLE = "grouped_gemm"


def parameter_axes(module: Any) -> dict[str, Axes | None]:
    """Return the logical axes of each parameter of a module of transformers, by its torch name.

    The matrices of adapters are not in a plan and are split over fsdp only.
    """
    tensor_plan = _compile_plan(getattr(module, "_tp_plan", None) or {})
    expert_plan = _compile_plan(getattr(module, "_ep_plan", None) or {})
    names = adapters.parameter_names(module)
    return {
        name: _find_axes(
            # A copy of a module is split like the module.
            names[name].replace(adapters.SAVED_PART, ""),
            tuple(parameter.shape),
            tensor_plan,
            expert_plan,
        )
        for name, parameter in module.named_parameters()
    }


Plan = Sequence[tuple[re.Pattern[str], str]]


def _compile_plan(plan: Mapping[str, str]) -> Plan:
    return [
        (re.compile(re.escape(name).replace(r"\*", r"\d+")), style) for name, style in plan.items()
    ]


def _find_style(name: str, plan: Plan) -> str | None:
    """Return the style of a parameter, which a plan names itself or by its module."""
    owner = name.rpartition(".")[0]
    for candidate in (name, owner):
        for pattern, style in plan:
            if pattern.fullmatch(candidate):
                return style
    return None


def _find_axes(
    name: str, shape: tuple[int, ...], tensor_plan: Plan, expert_plan: Plan
) -> Axes | None:
    style, dims = _find_style(name, tensor_plan), len(shape)
    if ".lora_" in name:
        return (None,) * dims
    experts: Axes = ()
    if _find_style(name, expert_plan) == EXPERT_STYLE:
        experts, dims = ("experts",), dims - 1
    if dims == 0:
        return experts
    is_bias = dims == 1
    if style in COLUMN_STYLES:
        # The bias of a layer is split with its outputs.
        axes: Axes = ("hidden",) if is_bias else ("hidden", *("embed",) * (dims - 1))
    elif style in ROW_STYLES and not is_bias:
        axes = (*("embed",) * (dims - 1), "hidden")
    elif style in TABLE_STYLES:
        axes = ("vocab", *("embed",) * (dims - 1))
    else:
        axes = (None,) * dims
    if is_head(name) and dims == 2:
        axes = ("vocab", "embed")
    return (*experts, *axes)


def is_head(name: str) -> bool:
    """Return whether a parameter is the output matrix of a language model."""
    return name in {"lm_head.weight", "embed_out.weight"}
