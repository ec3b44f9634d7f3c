"""Writer of YAML whose text has the same meaning in YAML 1.1, as in kubectl, and in YAML 1.2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from jaxlaunch.launcher.wording import CONTROL, escape_controls
from jaxlaunch.launcher.yaml import reader

# Booleans in Go's YAML 1.1, which PyYAML reads as text.
_GO_BOOLEANS = {"y", "Y", "n", "N"}
_UNLIMITED_WIDTH = 2**31


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    try:
        is_plain = (
            reader.resolve_scalar(text) == text
            and not reader.has_two_readings(text)
            and text not in _GO_BOOLEANS
        )
    except ValueError:
        is_plain = False
    # CONTROL includes line breaks of YAML 1.1, which single quotes would fold into spaces.
    style = '"' if CONTROL.search(text) else "|" if "\n" in text else None if is_plain else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def render_document(data: Any, width: int = 120) -> str:
    """Return one document as YAML, with its keys in the order of the data."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)
    # PyYAML writes some control characters unescaped, always in double quotes, where an escape has
    # the same meaning.
    return escape_controls(text)


def render_documents(documents: Iterable[Any]) -> str:
    """Return several documents for `kubectl apply -f -`, with each value on one line."""
    return "---\n".join(render_document(data, width=_UNLIMITED_WIDTH) for data in documents)
