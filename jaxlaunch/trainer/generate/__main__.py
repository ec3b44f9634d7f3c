"""Samples from a trained model: `python -m jaxlaunch.trainer.generate FOLDER --prompt TEXT`.

A process of its own, because the launcher never imports jax. FOLDER holds checkpoints, or a Hugging Face model. Prints
JSON lines: `{"piece": …}` for every few characters of a single sample, then one object with all samples. With `--chat`
each line of stdin is what the user says, as a JSON string; `{"ask": …}` asks for the next one. Exits with a code of the
contract.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from jaxlaunch import programs
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.chat import Chat
from jaxlaunch.trainer.generate.choose import SamplingOptions
from jaxlaunch.trainer.generate.loaded import Prompt, described, load, streamed
from jaxlaunch.trainer.start.process import print_result


def main() -> int:
    """Samples as the arguments say and prints JSON; returns the exit code."""
    asked = programs.read(programs.Sample, "jaxlaunch.trainer.generate", __doc__)
    answers = sys.stdout

    def tell(event: Mapping[str, Any]) -> None:
        """Prints an event, while notes and libraries print to stderr."""
        print(json.dumps(event), file=answers, flush=True)

    def say(piece: str) -> None:
        tell({"piece": piece})

    return print_result(lambda: converse(asked, sys.stdin, tell) if asked.chat else sample(asked, say))


def sample(asked: programs.Sample, say: Callable[[str], None]) -> dict[str, Any]:
    """The samples that the arguments ask for; `say` gets a single one piece by piece."""
    notes: list[str] = []
    loaded = load(asked.folder, step=asked.step, ema=asked.ema, precision=asked.precision, note=notes.append)
    rows, how = loaded.rows([*asked.prompt, *map(_ids, asked.ids)]), asked.how()
    began = time.perf_counter()
    if len(rows) == 1 and how.get("n", 1) == 1 and how.get("beams", 1) == 1:
        samples = [[streamed(loaded, rows[0], cast(SamplingOptions, how), say)]]
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


def converse(asked: programs.Sample, lines: Iterable[str], tell: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Answers what each line says until there are no more; `tell` gets the answers in pieces, and how each ended."""
    notes: list[str] = []
    loaded = load(asked.folder, step=asked.step, ema=asked.ema, precision=asked.precision, note=notes.append)
    chat = Chat(loaded, cast(SamplingOptions, asked.how()), asked.system)
    tokens, seconds = 0, 0.0
    tell({"ask": loaded.step, "notes": notes})
    for line in lines:
        began = time.perf_counter()
        try:
            answer = chat.answer(json.loads(line), lambda piece: tell({"piece": piece}))
        except SpecError as error:
            tell({"refused": str(error)})
        else:
            tokens, seconds = tokens + len(answer.ids) + answer.ended, seconds + time.perf_counter() - began
            tell({"ended": answer.ended})
        tell({"ask": loaded.step})
    return {"step": loaded.step, "messages": chat.messages, "tokens": tokens, "seconds": seconds}


def _ids(text: str) -> Prompt:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise SpecError(f"--ids {text!r} are not token ids; write whole numbers, such as '1 2 3'") from None


if __name__ == "__main__":
    sys.exit(main())
