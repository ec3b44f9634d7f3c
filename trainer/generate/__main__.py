"""Samples from a trained model: `python -m jaxlaunch.trainer.generate FOLDER --prompt TEXT`.

A process of its own, because the launcher never imports jax. FOLDER holds checkpoints, or a Hugging Face model. Prints
JSON lines: `{"piece": …}` for every few characters of a single sample, then one object with all samples. Exits with a
code of the contract.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from jaxlaunch import programs
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.generator import Ids, Sample
from jaxlaunch.trainer.generate.loaded import Prompt, TextModel, described, load
from jaxlaunch.trainer.start.process import print_result

LOST = "\ufffd"  # stands for a character whose last bytes are still to come


def main() -> int:
    """Samples as the arguments say and prints JSON; returns the exit code."""
    asked = programs.read(programs.Sample, "jaxlaunch.trainer.generate", __doc__)
    answers = sys.stdout

    def say(piece: str) -> None:
        """Prints a piece of the one sample, while notes and libraries print to stderr."""
        print(json.dumps({"piece": piece}), file=answers, flush=True)

    return print_result(lambda: sample(asked, say))


def sample(asked: programs.Sample, say: Callable[[str], None]) -> dict[str, Any]:
    """The samples that the arguments ask for; `say` gets a single one piece by piece."""
    notes: list[str] = []
    loaded = load(asked.folder, step=asked.step, ema=asked.ema, precision=asked.precision, note=notes.append)
    rows, how = loaded.rows([*asked.prompt, *map(_ids, asked.ids)]), asked.how()
    began = time.perf_counter()
    if len(rows) == 1 and how.get("n", 1) == 1 and how.get("beams", 1) == 1:
        samples = [[_streamed(loaded, rows[0], how, say)]]
    else:
        samples = loaded.generate(rows, **how)
    seconds = time.perf_counter() - began
    return {
        "step": loaded.step,
        "samples": described(samples, loaded.text),
        "tokens": sum(len(each.ids) + each.ended for of_prompt in samples for each in of_prompt),
        "seconds": seconds,
        "notes": notes,
    }


def _ids(text: str) -> Prompt:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise SpecError(f"--ids {text!r} are not token ids; write whole numbers, such as '1 2 3'") from None


def _streamed(loaded: TextModel, prompt: Ids, how: dict[str, Any], say: Callable[[str], None]) -> Sample:
    """The sample, said as far as its characters are whole."""
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


if __name__ == "__main__":
    sys.exit(main())
