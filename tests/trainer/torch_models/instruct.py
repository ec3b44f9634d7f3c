"""Writes a tiny random model with a tokenizer for chats: python instruct.py FOLDER FAMILY TEXT.

It runs with the packages of the environment torchax. The tokens are pieces of the text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.trainer.text.chat_corpora import CHATML
from tests.trainer.text.corpora import BEGIN, END
from tests.trainer.torch_models.scenarios import save_tiny_model


def save_tokenizer(folder: Path, text: str) -> None:
    built = Tokenizer(models.BPE(unk_token="<unk>"))
    built.pre_tokenizer, built.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", END, BEGIN]
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    built.train_from_iterator([text, "user assistant\n"], trainer)
    built.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "unk_token": "<unk>", "chat_template": CHATML}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    save_tiny_model(sys.argv[2], target, layers=2)
    save_tokenizer(target, sys.argv[3])
