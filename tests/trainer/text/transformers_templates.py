"""Prints what transformers 5 makes of chats by trl's templates, in its environment.

Arguments: the folder of a tokenizer, and a JSON file of conversations by name, each [messages,
tools]. Prints a line for each template: its name, its source, and for each conversation its text,
ids and mask, or nothing if it is refused.
"""

import datetime
import importlib.util
import json
import pathlib
import sys

import transformers
from transformers.utils import chat_template_utils


class FixedDatetime(datetime.datetime):
    """A clock that stands at the date of our own renderings."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "FixedDatetime":
        return cls(2024, 7, 26, tzinfo=tz)


chat_template_utils.datetime = FixedDatetime
tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
conversations = json.loads(pathlib.Path(sys.argv[2]).read_text())
(trl,) = importlib.util.find_spec("trl").submodule_search_locations
for path in sorted(pathlib.Path(trl, "chat_templates").glob("*.jinja")):
    source = path.read_text()
    results = {}
    for name, (messages, tools) in conversations.items():
        options = {"tools": tools, "chat_template": source}
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            encoded = tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, **options
            )
        except Exception:
            results[name] = None
        else:
            results[name] = [text, encoded["input_ids"], encoded["assistant_masks"]]
    print(json.dumps([path.stem, source, results]))
