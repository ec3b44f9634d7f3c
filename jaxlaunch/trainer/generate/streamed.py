"""A sample as text while it grows: said as far as its characters are whole."""

from __future__ import annotations

from collections.abc import Callable

from jaxlaunch.trainer.generate.choose import SamplingOptions
from jaxlaunch.trainer.generate.generator import Ids, Sample
from jaxlaunch.trainer.generate.loaded import TextModel

LOST = "\ufffd"  # stands for a character whose last bytes are still to come


def streamed(loaded: TextModel, prompt: Ids, how: SamplingOptions, say: Callable[[str], None]) -> Sample:
    """The sample of a prompt; `say` gets its text piece by piece, or its ids where there is no tokenizer."""
    said, last = "", Sample([], 0.0, False)
    for last in loaded.stream(prompt, **how):
        text = _shown(loaded, last).rstrip(LOST)
        if len(text) > len(said):
            say(text[len(said) :])
            said = text
    if rest := _shown(loaded, last)[len(said) :]:
        say(rest)
    return last


def _shown(loaded: TextModel, sample: Sample) -> str:
    text = loaded.text(sample)
    return "".join(f"{each} " for each in sample.ids) if text is None else text
