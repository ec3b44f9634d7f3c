"""Suggestions for misspelled words, for "Did you mean …?"."""

from __future__ import annotations

from collections.abc import Iterable


def find_nearest(word: str, options: Iterable[str], limit: int = 1) -> list[str]:
    """Return the options that `word` was probably meant to be, the nearest first."""
    # Imported here, because only misspelled words need it.
    import difflib

    options_by_lower = {option.lower(): option for option in options}
    if anagrams := [
        option
        for lower, option in options_by_lower.items()
        if sorted(lower) == sorted(word.lower())
    ]:
        return anagrams[:limit]
    matches = difflib.get_close_matches(word.lower(), options_by_lower, limit, cutoff=0.7)
    return [options_by_lower[match] for match in matches]


def find_completions(word: str, options: Iterable[str], limit: int = 1) -> list[str]:
    """Return the options that `word` abbreviates: a prefix, or letters in order."""
    prefix = word.lower()
    completions = [
        option for option in options if len(prefix) > 1 and option.lower().startswith(prefix)
    ]
    return (
        completions or [option for option in options if _is_abbreviation(prefix, option.lower())]
    )[:limit]


def _is_abbreviation(word: str, option: str) -> bool:
    letters = iter(option)
    return len(word) > 3 and word[0] == option[:1] and all(letter in letters for letter in word)
