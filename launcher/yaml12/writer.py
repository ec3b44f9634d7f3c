"""Plain data as YAML that every reader takes for the same: 1.1 ones such as kubectl, 1.2 ones such as ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from launcher import scalars

_ALSO_TRUTHS = {"y", "Y", "n", "N"}  # to Go's YAML 1.1; PyYAML takes them for text
_ONE_LINE = 2**31


class _Dumper(yaml.SafeDumper):
    """Quotes what either version would not read as text; PyYAML's own rule is 1.1's."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    try:
        is_plain = scalars.resolve(text) == text and not scalars.has_two_readings(text) and text not in _ALSO_TRUTHS
    except ValueError:
        is_plain = False
    style = "|" if "\n" in text else None if is_plain else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def document(data: Any, width: int = 120) -> str:
    """One document, keys in the order they have."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


def documents(all_data: Iterable[Any]) -> str:
    """Several, as `kubectl apply -f -` takes them; a value stands on one line, however long."""
    return "---\n".join(document(data, width=_ONE_LINE) for data in all_data)
