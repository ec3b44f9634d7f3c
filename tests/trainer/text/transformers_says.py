"""Prints what transformers makes of a text, in its environment, without our code.

Arguments: the text, and folders of a model with its tokenizer. Prints the ids and the
log-probabilities of all but the first for each folder.
"""

import json
import sys

import torch
import transformers

torch.set_num_threads(1)
for folder in sys.argv[2:]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(sys.argv[1], add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        shares = model(ids).logits.log_softmax(-1)[0, :-1]
    logprobs = shares.gather(-1, ids[0, 1:, None])[:, 0]
    print(
        json.dumps(
            {
                "ids": ids[0].tolist(),
                "logprobs": logprobs.tolist(),
                "chat": bool(tokenizer.chat_template),
            }
        )
    )
