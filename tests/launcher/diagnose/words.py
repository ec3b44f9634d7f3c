"""A catalog in which all words of the templates of texts are replaced."""

from __future__ import annotations

import re
import string


def replace_words(template: str) -> str:
    """Return the template with another word in place of each of its own."""
    parts = []
    for literal, field, spec, _ in string.Formatter().parse(template):
        parts.append(_replace_letters(literal).replace("{", "{{").replace("}", "}}"))
        if field is not None:
            has_words = spec not in ("", "age") and "%" not in (spec or "")
            parts.append(f"{{{field}:{_replace_letters(spec or '') if has_words else spec}}}")
    return "".join(parts)


def _replace_letters(text: str) -> str:
    return re.sub(r"[A-Za-z]+", "qux", text)
