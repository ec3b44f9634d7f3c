"""Texts in many scripts, and tokenizers trained on them: nothing is downloaded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

WORDS = (
    "the quick brown fox jumps over a lazy dog",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "Съешь же ещё этих мягких французских булок",
    "你好世界 今天天气很好 我们去公园",
    "こんにちは世界 カタカナ ひらがな",
    "שלום עולם מה שלומך היום",
    "مرحبا بالعالم كيف حالك اليوم",
    "नमस्ते दुनिया आप कैसे हैं",
    "สวัสดีชาวโลก วันนี้อากาศดี",
    "안녕하세요 세계 오늘 날씨가 좋네요",
    "👍🏽 👩‍👩‍👧‍👦 🇩🇪 ❤️ 🎉",
    "e\u0301 n\u0303 a\u0308 q\u0307\u0323 \u200f\u202bRTL\u202c \u00a0 \t  \r\n",
    "def f(x):\n    return x ** 2  # fn",
)
END, BEGIN = "<|end|>", "<|begin|>"


def make_texts(count: int, seed: int = 0, longest: int = 40) -> list[str]:
    """Texts of 1 to `longest` words of several scripts, lengths log-uniform."""
    draw = random.Random(seed)
    words = [word for line in WORDS for word in line.split(" ")]
    return [" ".join(draw.choices(words, k=round(longest ** draw.random()))) for _ in range(count)]


def train_bpe() -> Tokenizer:
    """Byte-level, as GPT-2's and Llama 3's are; a text begins with BEGIN."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[END, BEGIN], initial_alphabet=alphabet, show_progress=False
    )
    built.train_from_iterator(make_texts(200), trainer)
    built.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, 1)]
    )
    return built


def train_unigram() -> Tokenizer:
    """As SentencePiece's, with its ▁ for spaces."""
    built = Tokenizer(models.Unigram())
    built.normalizer = normalizers.NFKC()
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", END], unk_token="<unk>", show_progress=False
    )
    built.train_from_iterator(make_texts(200), trainer)
    return built


def train_wordpiece() -> Tokenizer:
    """As BERT's."""
    built = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    built.normalizer = normalizers.BertNormalizer()
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece()
    built.train_from_iterator(
        make_texts(200),
        trainers.WordPieceTrainer(
            vocab_size=400, special_tokens=["[UNK]", END], show_progress=False
        ),
    )
    return built


KINDS = {"bpe": train_bpe, "unigram": train_unigram, "wordpiece": train_wordpiece}


def save_tokenizer(folder: Path, kind: str = "bpe", **config: Any) -> str:
    """A folder as transformers' save_pretrained writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END} | config))
    return str(folder)


def write_lines(path: Path, documents: list[str], field: str = "text") -> str:
    """A file of JSON lines."""
    path.write_text(
        "".join(json.dumps({"id": at, field: text}) + "\n" for at, text in enumerate(documents))
    )
    return str(path)
