"""Samples from a trained model: `python -m jaxlaunch.trainer.generate FOLDER --prompt TEXT`.

This is a separate process, because the launcher never imports jax. FOLDER holds checkpoints, or a
Hugging Face model. It prints JSON lines: `{"piece": …}` for every few characters of a single
sample, then one object with all samples. With `--chat` each line of stdin is a message of the user,
as a JSON string; `{"ask": …}` asks for the next one. It exits with a code of the contract.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from jaxlaunch import programs
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.decoding import SamplingOptions
from jaxlaunch.trainer.generate.generator import Ids, Sample
from jaxlaunch.trainer.generate.text_model import Prompt, TextModel, add_end_tokens, load_text_model
from jaxlaunch.trainer.start.process import print_result
from jaxlaunch.trainer.text.chats import ASSISTANT, ChatTemplates
from jaxlaunch.trainer.text.documents import UnfitRowError
from jaxlaunch.trainer.text.turn_ends import turn_end_tokens

# Default length of an answer in tokens.
CHAT_MAX_TOKENS = 512
# The decoded text has this character where the last bytes of a character are still missing.
INCOMPLETE = "\ufffd"


def main() -> int:
    """Sample as the arguments say and print JSON; return the exit code."""
    options = programs.read_options(programs.Sample, "jaxlaunch.trainer.generate", __doc__)
    answers = sys.stdout

    def print_event(event: Mapping[str, Any]) -> None:
        """Print an event to the original stdout. What libraries print goes to stderr."""
        print(json.dumps(event), file=answers, flush=True)

    if options.chat:
        return print_result(lambda: run_chat(options, sys.stdin, print_event))
    return print_result(lambda: generate_samples(options, print_event))


def generate_samples(
    options: programs.Sample, emit: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Return the requested samples as JSON. A single sample is also emitted in pieces."""
    model, notes = _load_model(options)
    rows = model.rows([*options.prompt, *map(_parse_ids, options.ids)])
    sampling = options.sampling_options()
    started_at = time.perf_counter()
    if len(rows) == 1 and sampling.get("n", 1) == 1 and sampling.get("beams", 1) == 1:
        groups = [[_stream_sample(model, rows[0], cast(SamplingOptions, sampling), emit)]]
    else:
        groups = model.generate(rows, **sampling)
    seconds = time.perf_counter() - started_at
    return {
        "step": model.step,
        "samples": [[_to_json(model, sample) for sample in group] for group in groups],
        "tokens": sum(len(sample.ids) + sample.ended for group in groups for sample in group),
        "seconds": seconds,
        "notes": notes,
    }


def run_chat(
    options: programs.Sample, lines: Iterable[str], emit: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Answer each line, a message of the user as JSON, and emit the answer in pieces.

    Returns the conversation, and the number of tokens and seconds of the answers.
    """
    model, notes = _load_model(options)
    chat = Chat(model, cast(SamplingOptions, options.sampling_options()), options.system)
    tokens, seconds = 0, 0.0
    emit({"ask": model.step, "notes": notes})
    for line in lines:
        started_at = time.perf_counter()
        try:
            answer = chat.answer_message(json.loads(line), emit)
        except SpecError as error:
            emit({"refused": str(error)})
        else:
            tokens = tokens + len(answer.ids) + answer.ended
            seconds = seconds + time.perf_counter() - started_at
            emit({"ended": answer.ended})
        emit({"ask": model.step})
    return {"step": model.step, "messages": chat.messages, "tokens": tokens, "seconds": seconds}


class Chat:
    """A conversation in the model's chat template, which may begin with a system message.

    Raises SpecError if the model has no chat template.
    """

    def __init__(self, model: TextModel, options: SamplingOptions, system: str | None) -> None:
        if model.tokenizer is None:
            raise SpecError(
                "--chat needs a model with a tokenizer, whose chat template says how turns "
                "are written"
            )
        self._model, self._tokenizer = model, model.tokenizer
        try:
            self._chats = ChatTemplates(model.tokenizer)
        except SpecError as error:
            needed = "the chat template of the model's tokenizer"
            raise SpecError(f"--chat needs {needed}: {error}") from None
        self._options: SamplingOptions = {"max_tokens": CHAT_MAX_TOKENS, **options}
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        add_end_tokens(model, turn_end_tokens(self._chats, model.tokenizer))

    def answer_message(self, text: str, emit: Callable[[Mapping[str, Any]], None]) -> Sample:
        """Return the model's answer to a message of the user, and emit it in pieces.

        Raises SpecError if the template does not accept the messages, or if they exceed the
        positions of the model. The conversation is then unchanged.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            (prompt,) = self._tokenizer.encode_batch([self._chats.render_prompt(messages)])
        except UnfitRowError as error:
            raise SpecError(str(error)) from None
        sample = _stream_sample(self._model, prompt, self._options, emit)
        answer = {"role": ASSISTANT, "content": self._tokenizer.decode(sample.ids)}
        self.messages = [*messages, answer]
        return sample


def _load_model(options: programs.Sample) -> tuple[TextModel, list[str]]:
    notes: list[str] = []
    step, ema, precision = options.step, options.ema, options.precision
    model = load_text_model(
        options.folder, step=step, ema=ema, precision=precision, note=notes.append
    )
    return model, notes


def _parse_ids(text: str) -> Prompt:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        hint = "write whole numbers, such as '1 2 3'"
        raise SpecError(f"--ids {text!r} are not token ids; {hint}") from None


def _stream_sample(
    model: TextModel,
    prompt: Ids,
    options: SamplingOptions,
    emit: Callable[[Mapping[str, Any]], None],
) -> Sample:
    """Return the sample of a prompt, and emit its text, or without a tokenizer its ids, in pieces.

    The end of the text is held back while its last character is incomplete.
    """
    emitted, text, sample = "", "", Sample([], 0.0, False)
    for sample in model.stream(prompt, **options):
        decoded = model.text(sample)
        text = "".join(f"{token} " for token in sample.ids) if decoded is None else decoded
        complete = text.rstrip(INCOMPLETE)
        if len(complete) > len(emitted):
            emit({"piece": complete[len(emitted) :]})
            emitted = complete
    if remaining_text := text[len(emitted) :]:
        emit({"piece": remaining_text})
    return sample


def _to_json(model: TextModel, sample: Sample) -> dict[str, Any]:
    text = model.text(sample)
    fields = {"ids": sample.ids, "score": sample.score, "ended": sample.ended}
    return fields if text is None else {"text": text, **fields}


if __name__ == "__main__":
    sys.exit(main())
