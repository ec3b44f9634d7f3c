"""Reads the weights of a folder into the parameters of a module of transformers.

transformers knows for each architecture how the names in published files become the names of a
module's parameters, and which tensors are stacked or split on the way. Most parameters have one
tensor; of these a process reads only the parts for its own devices. The others are converted one at
a time in memory.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface.tensor_files import TensorFiles

# The number of names that a message lists.
MAX_NAMES = 3
# Dtypes of weights in formats that TensorFiles does not dequantize.
QUANTIZED_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "F4", "U8", "I8"})
# Buffers of older versions of transformers, which compute them now.
COMPUTED_BUFFERS = (r"(^|\.)position_ids$", r"rotary_emb\.inv_freq")


class Conversion(NamedTuple):
    """How some parameters come from tensors of the files.

    Attributes:
        transform: The transform of transformers.
        sources: Names of the tensors by the pattern of the transform that they match.
    """

    transform: Any
    sources: dict[str, list[str]]


class Layout(NamedTuple):
    """Where the parameters of a module are in the files.

    Attributes:
        renamed: The tensor of each parameter that is stored as it is.
        converted: The other conversions, by the name of their first parameter.
        unused: Names of tensors that no parameter takes, without those that transformers ignores.
    """

    renamed: dict[str, str]
    converted: dict[str, Conversion]
    unused: list[str]


def find_layout(module: Any, files: TensorFiles) -> Layout:
    """Match the tensors of the files to the parameters and buffers of a module."""
    from transformers import conversion_mapping, core_model_loading

    transforms = conversion_mapping.get_model_conversion_mapping(module)
    renamings = [
        transform
        for transform in transforms
        if isinstance(transform, core_model_loading.WeightRenaming)
    ]
    converters = [
        transform
        for transform in transforms
        if isinstance(transform, core_model_loading.WeightConverter)
    ]
    by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
    state, prefix = module.state_dict(), module.base_model_prefix
    renamed: dict[str, str] = {}
    converted: dict[str, Conversion] = {}
    unused = []
    for source in sorted(files, key=core_model_loading.dot_natural_key):
        target, pattern = core_model_loading.rename_source_key(
            source, renamings, converters, prefix, state
        )
        if target not in state and source in state:
            target, pattern = source, None
        if target not in state:
            if not is_ignored(module, source):
                unused.append(source)
        elif pattern is None:
            renamed[target] = source
        else:
            transform = copy.deepcopy(by_pattern[pattern])
            conversion = converted.setdefault(target, Conversion(transform, {}))
            conversion.sources.setdefault(pattern, []).append(source)
    return Layout(renamed, converted, unused)


def is_ignored(module: Any, source: str) -> bool:
    """Return whether transformers ignores a tensor that no parameter takes."""
    patterns = (*COMPUTED_BUFFERS, *(module._keys_to_ignore_on_load_unexpected or ()))
    return any(re.search(pattern, source) for pattern in patterns)


def iterate_parameters(
    module: Any,
    folder: str,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    *,
    is_cast: bool = True,
    has_new_head: bool = False,
) -> Generator[tuple[str, Array], None, dict[str, jax.ShapeDtypeStruct]]:
    """Yield the parameters and buffers of `targets` one by one from the files of a folder.

    Args:
        module: Module of transformers, which names the parameters.
        folder: Folder with safetensors.
        targets: Shapes, dtypes and shardings by name.
        is_cast: Whether to cast to the dtypes of `targets` instead of keeping those of the files.
        has_new_head: Whether the files may have another head than the module.

    Returns:
        The parameters of the module's head that the files do not have.

    Raises:
        SpecError: A parameter is missing, has another shape, or a tensor is not used.
    """
    files = TensorFiles(folder, dequantizes=True)
    layout = find_layout(module, files)
    _check_dtypes(folder, files, layout)
    remaining, body = dict(targets), f"{module.base_model_prefix}."
    for name, source in layout.renamed.items():
        if (target := remaining.get(name)) is None:
            continue
        shape = tuple(files[source].get_shape())
        is_head = has_new_head and not _is_in_body(name, body)
        if is_head and shape != target.shape and shape[1:] == target.shape[1:]:
            # The head has another number of classes.
            continue
        del remaining[name]
        check_shape(folder, source, shape, name, target.shape)
        dtype = target.dtype if is_cast else files.tensor_dtype(source)
        yield name, read_tensor(files, source, target, dtype)
    for first_name, conversion in layout.converted.items():
        # Converting the experts of a large model takes long.
        if not remaining:
            break
        values = convert_tensors(module, files, first_name, conversion)
        for name, value in values.items():
            if (target := remaining.pop(name, None)) is None:
                continue
            check_shape(folder, "its tensors", value.shape, name, target.shape)
            dtype = target.dtype if is_cast else value.dtype
            yield name, place_array(value.astype(dtype), target)
    files.close()
    faults = _list_faults(module, files, layout, remaining, has_new_head=has_new_head)
    if faults:
        raise SpecError(
            f"{folder} does not match the {type(module).__name__} of its config.json: "
            f"{'; '.join(faults)}"
        )
    return remaining


def _list_faults(
    module: Any, files: TensorFiles, layout: Layout, missing: Iterable[str], *, has_new_head: bool
) -> list[str]:
    """Return sentences on the parameters that the files lack and the tensors that are not used."""
    unused: list[str] = layout.unused
    if has_new_head:
        body = f"{module.base_model_prefix}."
        missing = [name for name in missing if _is_in_body(name, body)]
        # The files of a model without a head have names without the prefix, all of which are used.
        has_prefix = any(source.startswith(body) for source in files)
        unused = [name for name in unused if has_prefix and _is_in_body(name, body)]
    subjects = ((missing, "missing"), (unused, "not used"))
    return [f"{_list_names(names)} {problem}" for names, problem in subjects if names]


def _is_in_body(name: str, prefix: str) -> bool:
    """Return whether a parameter is below the heads, among which is the pooler of BERT."""
    return name.startswith(prefix) and not name.startswith(f"{prefix}pooler.")


def iterate_head(
    module: Any, targets: Mapping[str, jax.ShapeDtypeStruct], seed: int
) -> Iterator[tuple[str, Array]]:
    """Yield random parameters of a module without memory, as transformers initializes them."""
    import torch

    torch.manual_seed(seed)
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in targets}
    for layer in dict.fromkeys(owners.values()):
        layer.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        # A module may initialize the layers in it. Parameters without memory stay so.
        module.apply(module._init_weights)
    for name, target in targets.items():
        tensor = getattr(owners[name], name.rpartition(".")[2])
        yield name, place_array(tensor.numpy().astype(target.dtype), target)


def _check_dtypes(folder: str, files: TensorFiles, layout: Layout) -> None:
    sources = [names for item in layout.converted.values() for names in item.sources.values()]
    for name in itertools.chain(layout.renamed.values(), *sources, layout.unused):
        if (dtype := files[name].get_dtype()) in QUANTIZED_DTYPES:
            raise SpecError(
                f"{folder}: {name} is quantized, in {dtype}; of the quantized weights only fp8 "
                "with block scales and MXFP4 can be read"
            )


def _list_names(names: Any) -> str:
    names = [*names]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names[:MAX_NAMES])}{more} {verb}"


def check_shape(
    folder: str, source: str, shape: tuple[int, ...], name: str, expected: tuple[int, ...]
) -> None:
    """Raise SpecError unless a tensor has the shape of its parameter."""
    if tuple(shape) != tuple(expected):
        raise SpecError(
            f"{folder}: {source} has the shape {[*shape]}, and {name} of its config.json "
            f"{[*expected]}; use the weights and the config.json of one model"
        )


def read_tensor(files: TensorFiles, source: str, target: jax.ShapeDtypeStruct, dtype: Any) -> Array:
    """Read a tensor, only the parts for the devices of this process."""
    tensor = files[source]

    def read_part(index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
        part = tensor[index] if index else tensor[...]
        return np.asarray(part).astype(dtype)

    assert target.sharding is not None, "the train step gives every parameter a sharding"
    array = jax.make_array_from_callback(target.shape, target.sharding, read_part)
    files.close()
    return array


def place_array(value: np.ndarray[Any, Any], target: jax.ShapeDtypeStruct) -> Array:
    """Put an array that this process has whole on its devices."""
    assert target.sharding is not None, "the train step gives every parameter a sharding"
    return jax.make_array_from_callback(target.shape, target.sharding, value.__getitem__)


def convert_tensors(
    module: Any, files: TensorFiles, first_name: str, conversion: Conversion
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the parameters that a conversion makes, in float32."""
    import torch

    transform = conversion.transform
    for pattern, sources in conversion.sources.items():
        for source in sources:
            array = np.asarray(files[source][...]).astype(np.float32)
            transform.add_tensor(first_name, source, pattern, torch.from_numpy(array))
    files.close()
    values = transform.convert(first_name, model=module, config=module.config)
    return {
        name: (value[0] if isinstance(value, list) else value).numpy()
        for name, value in values.items()
    }


def iterate_random(
    config: Any, targets: Mapping[str, jax.ShapeDtypeStruct], seed: int, auto_class: str
) -> Iterator[tuple[str, Array]]:
    """Yield random parameters as transformers initializes them, in the memory of this process."""
    import torch
    import transformers

    torch.manual_seed(seed)
    module = getattr(transformers, auto_class).from_config(config, dtype=torch.float32)
    for name, tensor in module.state_dict().items():
        if (target := targets.get(name)) is not None:
            yield name, place_array(tensor.numpy().astype(target.dtype), target)
