"""Merges a patch into a manifest as Kubernetes does: mappings deeply, lists by name, null removes. Pure."""

from __future__ import annotations

import copy
from typing import Any

# List -> the merge key of its items, where that is not `name`.
_KEYS = {"volumeMounts": "mountPath"}
# Lists whose items are replaced whole: a merge of two kinds of volume would be neither.
_WHOLE = ("env", "volumes")


def merge(base: Any, patch: Any, key: str = "") -> Any:
    """`base` with `patch` over it; neither is changed. Items of lists are merged by name or added; scalars replaced."""
    if isinstance(patch, dict):
        base = base if isinstance(base, dict) else {}
        merged = {name: copy.deepcopy(value) for name, value in base.items() if patch.get(name, value) is not None}
        for name, value in patch.items():
            if value is not None:
                merged[name] = merge(base.get(name), value, name)
        return merged
    if isinstance(patch, list) and _are_blocks(patch) and (patch or _are_blocks(base)):
        return _lists(base if _are_blocks(base) else [], patch, key)
    return copy.deepcopy(patch)


def _are_blocks(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, dict) for item in items)


def _lists(base: list[dict[str, Any]], patch: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Short lists: they are searched, because a name in a patch may be of any type."""
    name = _KEYS.get(key, "name")
    merged = [copy.deepcopy(item) for item in base]
    for item in patch:
        same = [place for place, one in enumerate(merged) if name in item and one.get(name) == item[name]]
        if same:
            merged[same[0]] = merge({} if key in _WHOLE else merged[same[0]], item)
        elif item not in merged:
            merged.append(merge({}, item))
    return merged
