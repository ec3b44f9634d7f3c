"""A conversation with a trained model, through the chat template that its tokenizer has."""

from __future__ import annotations

from collections.abc import Callable

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.choose import SamplingOptions
from jaxlaunch.trainer.generate.generator import Sample
from jaxlaunch.trainer.generate.loaded import TextModel, end_also, streamed
from jaxlaunch.trainer.text.chats import ASSISTANT, Chats
from jaxlaunch.trainer.text.documents import Unfit

MAX_TOKENS = 512  # of an answer, where nothing else is asked for


class Chat:
    """The messages so far. Raises SpecError where the model has no tokenizer, or this no chat template."""

    def __init__(self, loaded: TextModel, how: SamplingOptions, system: str | None) -> None:
        if loaded.tokenizer is None:
            raise SpecError("--chat needs a model with a tokenizer, whose chat template says how turns are written")
        self._loaded, self._tokenizer = loaded, loaded.tokenizer
        try:
            self._chats = Chats(loaded.tokenizer)
        except SpecError as error:
            raise SpecError(f"--chat needs the chat template of the model's tokenizer: {error}") from None
        self._how: SamplingOptions = {"max_tokens": MAX_TOKENS, **how}
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        end_also(loaded, self._end_of_turn())

    def answer(self, text: str, say: Callable[[str], None]) -> Sample:
        """The model's answer to what the user says; `say` gets it piece by piece.

        Raises SpecError where the template refuses the messages or the model has no positions left for them. The
        messages are then as before.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            (prompt,) = self._tokenizer.encode_batch([self._chats.asked(asked)])
        except Unfit as error:
            raise SpecError(str(error)) from None
        sample = streamed(self._loaded, prompt, self._how, say)
        self.messages = [*asked, {"role": ASSISTANT, "content": self._tokenizer.decode(sample.ids)}]
        return sample

    def _end_of_turn(self) -> tuple[int, ...]:
        """The special token with which the template ends an assistant's turn; it need not be the one that ends texts.

        A template that writes none, or refuses the turns that are tried, leaves it to the tokens that end a text.
        """
        try:
            rest = self._chats.after_an_answer()
        except Unfit:
            return ()
        first = self._tokenizer.encode_batch([rest.lstrip()])[0][:1]
        return tuple(first) if first and not self._tokenizer.decode(first) else ()
