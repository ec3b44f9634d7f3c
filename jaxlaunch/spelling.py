"""Suggestions for misspelled and abbreviated words in error messages ("Did you mean …?")."""

from __future__ import annotations

from collections.abc import Iterable


def find_nearest(word: str, options: Iterable[str], limit: int = 1) -> list[str]:
    """Return the options that `word` probably misspells, the nearest first."""
    # Imported here to save time, because only misspelled words need it.
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


def suggest_name(word: str, names: Iterable[str]) -> str:
    """Return the nearest of the user's own names, as ` (did you mean 'age'?)`, or ""."""
    nearest = find_nearest(word, names)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def find_completions(word: str, options: Iterable[str], limit: int = 1) -> list[str]:
    """Return the options that `word` abbreviates, by a prefix or else by some letters in order."""
    word, options = word.lower(), list(options)
    completions: list[str] = []
    if len(word) > 1:
        completions = [option for option in options if option.lower().startswith(word)]
    if not completions:
        completions = [option for option in options if _is_abbreviation(word, option.lower())]
    return completions[:limit]


def _is_abbreviation(word: str, option: str) -> bool:
    # Each `in` continues after the letter that the previous one found.
    letters = iter(option)
    return len(word) > 3 and word[0] == option[:1] and all(letter in letters for letter in word)
