"""Generates with transformers, in an environment that holds it. Nothing of ours is imported.

Argument: a JSON file with a list of calls: {folder, prompts, tokens, end, beams}. Prints the new
tokens of each call.
"""

import json
import sys

import torch
import transformers


def generate(call):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        call["folder"], attn_implementation="eager"
    ).eval()
    longest = max(map(len, call["prompts"]))
    rows = [[0] * (longest - len(ids)) + ids for ids in call["prompts"]]
    seen = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in call["prompts"]]
    model.generation_config.eos_token_id = call["end"]
    beams = {"num_beams": call["beams"], "early_stopping": "never"} if call["beams"] > 1 else {}
    with torch.no_grad():
        beams |= {"max_new_tokens": call["tokens"], "do_sample": False, "pad_token_id": 0}
        outputs = model.generate(torch.tensor(rows), attention_mask=torch.tensor(seen), **beams)
    return outputs[:, longest:].tolist()


torch.set_num_threads(1)
with open(sys.argv[1]) as calls:
    for call in json.load(calls):
        print(json.dumps(generate(call)))
