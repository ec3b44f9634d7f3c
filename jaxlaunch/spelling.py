"""What a word was probably meant to be, for "Did you mean …?"; the launcher and the trainer ask alike."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, options: Iterable[str], most: int = 1) -> list[str]:
    """The options that `word` was probably meant to be, at `most` so many, the nearest first."""
    import difflib  # only for words that are wrong

    written = {option.lower(): option for option in options}
    if swapped := [option for lower, option in written.items() if sorted(lower) == sorted(word.lower())]:
        return swapped[:most]
    return [written[found] for found in difflib.get_close_matches(word.lower(), written, most, cutoff=0.7)]


def in_full(word: str, options: Iterable[str], most: int = 1) -> list[str]:
    """The options that `word` is short for: their beginning, or some of their letters in order (bf16, bfloat16)."""
    spelled = word.lower()
    begun = [option for option in options if len(spelled) > 1 and option.lower().startswith(spelled)]
    return (begun or [option for option in options if _is_short_for(spelled, option.lower())])[:most]


def _is_short_for(word: str, option: str) -> bool:
    letters = iter(option)
    return len(word) > 3 and word[0] == option[:1] and all(letter in letters for letter in word)
