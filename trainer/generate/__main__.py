"""Samples from a trained model: `python -m jaxlaunch.trainer.generate FOLDER --prompt TEXT`.

A process of its own, because the launcher never imports jax. FOLDER holds checkpoints, or a Hugging Face model. Prints
JSON lines: `{"piece": …}` for every few characters of a single sample, then one object with all samples. Exits with a
code of the contract.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.checkpoint import stored_model
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.generator import Ids, Sample
from jaxlaunch.trainer.generate.loaded import Prompt, TextModel, described, load
from jaxlaunch.trainer.start.process import print_result

LOST = "\ufffd"  # stands for a character whose last bytes are still to come
HOW = ("n", "max_tokens", "temperature", "top_p", "top_k", "beams", "seed")  # arguments that are Sampling's


def main() -> int:
    """Samples as the arguments say and prints JSON; returns the exit code."""
    options = _parser().parse_args()
    answers = sys.stdout

    def say(piece: str) -> None:
        """Prints a piece of the one sample, while notes and libraries print to stderr."""
        print(json.dumps({"piece": piece}), file=answers, flush=True)

    return print_result(lambda: sample(options, say))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxlaunch.trainer.generate", description=__doc__)
    parser.add_argument("folder", help="folder or URL of checkpoints, or of a Hugging Face model")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be repeated")
    parser.add_argument("--ids", action="append", default=[], help="a prompt as token ids, '1 2 3'; may be repeated")
    parser.add_argument("--step", type=stored_model.step, help="the step to load, or best; default: the newest")
    parser.add_argument("--ema", action="store_true", help="the moving average instead of the weights")
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), help="default: that of the training, or fp32")
    parser.add_argument("--n", type=int, help="samples of each prompt")
    parser.add_argument("--max-tokens", type=int, help="tokens of a sample")
    parser.add_argument("--temperature", type=float, help="0: greedy")
    parser.add_argument(
        "--top-p", type=float, help="top-p (nucleus) sampling: the most likely tokens whose probabilities sum to this"
    )
    parser.add_argument("--top-k", type=int, help="top-k sampling: only the k most likely tokens")
    parser.add_argument("--beams", type=int, help="beam search with this many beams")
    parser.add_argument("--seed", type=int, help="of what is drawn")
    return parser


def sample(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """The samples that the arguments ask for; `say` gets a single one piece by piece."""
    notes: list[str] = []
    of: spec.Precision | None = options.precision
    loaded = load(options.folder, step=options.step, ema=options.ema, precision=of, note=notes.append)
    rows = loaded.rows([*options.prompt, *map(_ids, options.ids)])
    how = {name: getattr(options, name) for name in HOW if getattr(options, name) is not None}
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
