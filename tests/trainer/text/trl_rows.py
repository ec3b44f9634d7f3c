"""Prints tokens and targets of rows by trl's own preparation, in an environment with trl.

The argument is the folder that `layout_rows.py` wrote. Prints a JSON object with the versions, and
the tokens and the targets of each text of each row.
"""

import json
import os
import sys
import types
import uuid

import datasets
import tokenizers
import transformers
import trl
from trl.trainer import dpo_trainer, kto_trainer, sft_trainer

os.environ["TOKENIZERS_PARALLELISM"] = "false"
datasets.disable_progress_bars()
# Not every function can be pickled for a digest, and nothing here is cached.
datasets.fingerprint.Hasher.hash = classmethod(lambda cls, value: uuid.uuid4().hex[:16])
folder = sys.argv[1]
with open(f"{folder}/rows.json") as file:
    cases = json.load(file)
expected = {}
for name, row_format, template, row in cases:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(f"{folder}/{template}")
    dataset = datasets.Dataset.from_list([row])
    stub = types.SimpleNamespace(
        _tokenizer=tokenizer, _is_vlm=False, chat_template=None, completion_only_loss=True
    )
    args = types.SimpleNamespace(
        dataset_num_proc=None,
        max_length=None,
        dataset_text_field="text",
        assistant_only_loss=template == "marked",
        truncation_mode="keep_start",
        shuffle_dataset=False,
    )
    trainers = {"preference": dpo_trainer.DPOTrainer, "kto": kto_trainer.KTOTrainer}
    if row_format in trainers:
        stub.calculate_KL = False
        prepare = trainers[row_format]._prepare_dataset
        (result,) = prepare(stub, dataset, tokenizer, args, "train")
        sides = (
            ("chosen_ids", "rejected_ids") if row_format == "preference" else ("completion_ids",)
        )
        prompt = result["prompt_ids"]
        texts = [
            [prompt + result[side], [0] * len(prompt) + [1] * len(result[side])] for side in sides
        ]
    else:
        prepare = sft_trainer.SFTTrainer._prepare_dataset
        (result,) = prepare(stub, dataset, tokenizer, args, False, None, "train")
        texts = [[result["input_ids"], [int(label != -100) for label in result["labels"]]]]
    expected[name] = texts
modules = (trl, transformers, tokenizers, datasets)
versions = {module.__name__: module.__version__ for module in modules}
print(json.dumps({"versions": versions, "rows": expected}))
