"""Plain data as YAML that readers of YAML 1.1, such as kubectl, and of 1.2, such as ours, read alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from jaxlaunch.launcher.wording import CONTROL, visible
from jaxlaunch.launcher.yaml import reader

_ALSO_BOOLEANS = {"y", "Y", "n", "N"}  # of Go's YAML 1.1; PyYAML reads them as text
_ONE_LINE = 2**31


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version would read as something else; PyYAML itself follows 1.1 only."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    try:
        is_plain = (
            reader.resolve_scalar(text) == text and not reader.has_two_readings(text) and text not in _ALSO_BOOLEANS
        )
    except ValueError:
        is_plain = False
    # CONTROL has line breaks of YAML 1.1, which single quotes would fold into spaces.
    style = '"' if CONTROL.search(text) else "|" if "\n" in text else None if is_plain else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def document(data: Any, width: int = 120) -> str:
    """One document, its keys in their order."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)
    return visible(text)  # what PyYAML takes for printable is between double quotes, where such escapes mean it


def documents(all_data: Iterable[Any]) -> str:
    """Several documents, as `kubectl apply -f -` reads them; a value is on one line, however long."""
    return "---\n".join(document(data, width=_ONE_LINE) for data in all_data)
