from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from jaxlaunch.trainer.checkpoint import saved_files
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.text import tokenizer
from jaxlaunch.trainer.text.documents import decode_text
from tests.trainer.text import corpora
from tests.trainer.text.corpora import BEGIN, END

TEXTS = corpora.make_texts(2000, seed=1) + [
    "",
    " ",
    END,
    f"a{END}b",
    decode_text(b"caf\xe9 \xff\xfe\xf0\x9f ok").text,
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        kind: corpora.save_tokenizer(tmp_path_factory.mktemp(kind), kind) for kind in corpora.KINDS
    }


@pytest.mark.parametrize("kind", corpora.KINDS)
def test_ids_and_texts_equal_the_library(folders: dict[str, str], kind: str) -> None:
    actual = tokenizer.load_tokenizer(folders[kind])
    reference = Tokenizer.from_file(f"{folders[kind]}/tokenizer.json")
    expected = [
        encoding.ids for encoding in reference.encode_batch(TEXTS, add_special_tokens=False)
    ]
    result = actual.encode_batch(TEXTS)
    assert result == expected
    assert [actual.decode(ids) for ids in result[:100]] == reference.decode_batch(expected[:100])
    assert actual.vocab == reference.get_vocab_size() > max(map(max, filter(None, result)))
    assert actual.eos == reference.token_to_id(END)


def test_byte_level_tokens_have_their_bytes(folders: dict[str, str]) -> None:
    counts = tokenizer.load_tokenizer(folders["bpe"]).byte_counts
    for text, ids in zip(
        TEXTS, tokenizer.load_tokenizer(folders["bpe"]).encode_batch(TEXTS), strict=True
    ):
        assert counts[ids].sum() == len(text.replace(END, "").encode())


def test_character_tokens_have_the_bytes_of_their_piece() -> None:
    cases = [
        ("<0x0A>", "", "", 1),
        ("\u2581you", "", "", 4),
        ("##ing", "##", "", 3),
        ("é</w>", "", "</w>", 3),
    ]
    actual = [tokenizer._count_bytes(token, prefix, suffix) for token, prefix, suffix, _ in cases]
    assert actual == [item[3] for item in cases]


def test_byte_tokenizer_uses_bytes_as_ids() -> None:
    actual = tokenizer.load_tokenizer("bytes")
    (ids,) = actual.encode_batch(["é👍"])
    assert bytes(ids).decode() == actual.decode(ids) == "é👍"
    assert (actual.vocab, actual.eos, actual.bos, dict(actual.files), actual.byte_counts.sum()) == (
        256,
        None,
        None,
        {},
        256,
    )


def test_bos_follows_the_configuration_or_post_processor(tmp_path: Path) -> None:
    def read_bos(name: str, kind: str = "bpe", **config: Any) -> int | None:
        folder = corpora.save_tokenizer(tmp_path / name, kind, **config)
        return tokenizer.load_tokenizer(folder).bos

    named = {"bos_token": {"content": BEGIN}}
    assert read_bos("a") is None
    assert read_bos("b", **named) == 1
    assert read_bos("c", **named, add_bos_token=False) is None
    assert read_bos("d", "unigram", bos_token=END) is None
    assert read_bos("e", "unigram", bos_token=END, add_bos_token=True) == 1


def test_digest_depends_on_what_makes_ids(tmp_path: Path) -> None:
    same = [
        tokenizer.load_tokenizer(corpora.save_tokenizer(tmp_path / name, chat_template=name)).digest
        for name in ("a", "b")
    ]
    assert same[0] == same[1] == tokenizer.load_tokenizer(f"{tmp_path}/a/tokenizer.json").digest
    others = {
        tokenizer.load_tokenizer(corpora.save_tokenizer(tmp_path / kind, kind)).digest
        for kind in ("unigram", "wordpiece")
    }
    others.add(
        tokenizer.load_tokenizer(corpora.save_tokenizer(tmp_path / "c", eos_token=BEGIN)).digest
    )
    assert len(others | set(same)) == 4


def test_too_small_model_vocabulary_is_refused(folders: dict[str, str]) -> None:
    actual = tokenizer.load_tokenizer(folders["bpe"])
    tokenizer.check_vocab(actual, actual.vocab)
    words = f"vocab = 499 is less than the {actual.vocab} of data.tokenizer = .*bpe"
    with pytest.raises(SpecError, match=words):
        tokenizer.check_vocab(actual, 499)


def test_checkpoint_contains_the_tokenizer_files(tmp_path: Path, folders: dict[str, str]) -> None:
    files = tokenizer.load_tokenizer(folders["bpe"]).files
    assert saved_files.read_saved_tokenizer(str(tmp_path)) == {}
    for _ in range(2):
        (tmp_path / "tokenizer").mkdir(exist_ok=True)
        (tmp_path / "tokenizer" / "chat_template.jinja").write_text("of the tokenizer before")
        saved_files.save_tokenizer(str(tmp_path), files)
        assert saved_files.read_saved_tokenizer(str(tmp_path)) == files
        assert {path.name for path in (tmp_path / "tokenizer").iterdir()} == set(
            files
        )  # no draft is left
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
