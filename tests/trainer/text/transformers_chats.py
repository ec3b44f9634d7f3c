"""Prints ids and assistant masks of transformers, in its environment, without our code.

Arguments: a JSON file of [messages, tools], and folders of tokenizers. Prints [ids, masks] of all
for each folder.
"""

import json
import sys

import transformers

with open(sys.argv[1]) as file:
    chats = json.load(file)
for folder in sys.argv[2:]:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    results = [
        tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        for messages, tools in chats
    ]
    print(
        json.dumps(
            [[chat["input_ids"] for chat in results], [chat["assistant_masks"] for chat in results]]
        )
    )
