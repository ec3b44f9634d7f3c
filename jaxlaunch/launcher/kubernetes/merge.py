"""Merge patches of manifests: mappings merge deeply, lists by name, null deletes a key. Pure."""

from __future__ import annotations

import copy
from typing import Any

# Merge key of the items of a list, if it is not `name`.
_MERGE_KEYS = {"volumeMounts": "mountPath"}
# Items of these lists are replaced as a whole: a volume merged from two types would be invalid.
_REPLACED_LISTS = ("env", "volumes")


def merge_patch(base: Any, patch: Any, key: str = "") -> Any:
    """Return a copy of `base` with `patch` applied.

    Items of lists are merged by name or appended, and scalars are replaced.
    """
    if isinstance(patch, dict):
        fields = base if isinstance(base, dict) else {}
        merged = {name: copy.deepcopy(value) for name, value in fields.items() if value is not None}
        for name, value in patch.items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = merge_patch(merged.get(name), value, name)
        return merged
    if not _are_mappings(patch) or not (patch or _are_mappings(base)):
        return copy.deepcopy(patch)
    # A name in a patch may be of any type, also one that cannot be a key of a dict.
    name = _MERGE_KEYS.get(key, "name")
    items = copy.deepcopy(base) if _are_mappings(base) else []
    for patch_item in patch:
        for position, base_item in enumerate(items):
            if name in patch_item and base_item.get(name) == patch_item[name]:
                items[position] = merge_patch(
                    {} if key in _REPLACED_LISTS else base_item, patch_item
                )
                break
        else:
            if patch_item not in items:
                items.append(merge_patch({}, patch_item))
    return items


def _are_mappings(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, dict) for item in items)
