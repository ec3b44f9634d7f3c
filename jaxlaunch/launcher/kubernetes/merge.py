"""Merges a patch into a manifest as Kubernetes does: mappings deeply, lists by name, null removes. Pure."""

from __future__ import annotations

import copy
from typing import Any

# List -> the merge key of its items, where that is not `name`.
_KEYS = {"volumeMounts": "mountPath"}
# Lists whose items are replaced whole: a merge of two kinds of volume would be neither.
_WHOLE = ("env", "volumes")


def merge(base: Any, patch: Any, key: str = "") -> Any:
    """Return `base` with `patch` over it; neither is changed.

    Items of lists are merged by name or added; scalars are replaced.
    """
    if isinstance(patch, dict):
        base = base if isinstance(base, dict) else {}
        merged = {name: copy.deepcopy(value) for name, value in base.items() if patch.get(name, value) is not None}
        for name, value in patch.items():
            if value is not None:
                merged[name] = merge(base.get(name), value, name)
        return merged
    if not _are_mappings(patch) or not (patch or _are_mappings(base)):
        return copy.deepcopy(patch)
    # The lists are short, and searched because a name in a patch may be of any type.
    name = _KEYS.get(key, "name")
    items = copy.deepcopy(base) if _are_mappings(base) else []
    for item in patch:
        places = [place for place, other in enumerate(items) if name in item and other.get(name) == item[name]]
        if places:
            items[places[0]] = merge({} if key in _WHOLE else items[places[0]], item)
        elif item not in items:
            items.append(merge({}, item))
    return items


def _are_mappings(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, dict) for item in items)
