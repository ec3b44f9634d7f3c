"""Chats in training: only the tokens of the assistant are targets."""

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.data.pipeline import Evaluation
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.prepare import text as prepare
from jaxlaunch.trainer.sources import text
from jaxlaunch.trainer.spec import LM, Text, TrainSpec
from jaxlaunch.trainer.tasks.lm import NextToken
from jaxlaunch.trainer.text import build, recipe
from tests.trainer.text import chat_corpora

LENGTH = 64
CHATS = chat_corpora.make_chats(40, seed=2)


def read_rows(folder: Path, conversations: list[Any], **keys: Any) -> list[dict[str, Any]]:
    """The rows of training of these chats."""
    folder.mkdir()
    made_by = chat_corpora.save_chat_tokenizer(folder / "tokenizer", chat_corpora.CHATML)
    path = chat_corpora.write_lines(folder / "a.jsonl", conversations)
    options = {"path": path, "tokenizer": made_by, "data_dir": f"{folder}/out", "eval_split": 0.0}
    data = Text(source="text", format="chat", **(options | keys))
    built = recipe.make_recipe(data, LENGTH)
    build.build_rows(built, Path(recipe.prepared_root(data)) / built.address)
    source = text.open_rows(data, LENGTH, "train")
    assert source is not None
    return [source[index] for index in range(len(source))]


def decode_targets(examples: list[dict[str, Any]]) -> list[int]:
    """The tokens that are predicted, sorted."""
    return sorted(np.concatenate([row["tokens"][1:][row["mask"] > 0] for row in examples]).tolist())


@pytest.mark.parametrize("packing", ["concat", "first-fit", "none"])
def test_only_assistant_tokens_are_targets_once(tmp_path: Path, packing: str) -> None:
    result = read_rows(tmp_path / "a", CHATS, packing=packing)
    pairs = chat_corpora.encode_chat(f"{tmp_path}/a/tokenizer", CHATS)
    actual = decode_targets(result)
    assert actual == sorted(np.concatenate([ids[mask] for ids, mask in pairs]).tolist())
    turns = itertools.chain.from_iterable(CHATS)
    words = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    counted = sum(float(row["text_bytes"]) for row in result)
    assert counted == pytest.approx(sum(len(answer.encode()) for answer in words), rel=1e-5)
    (index,) = (tmp_path / "a" / "out").glob("*/index.json")
    assert build.read_index(index.parent)["targets"] == len(decode_targets(result))
    assert all(row["mask"].any() for row in result)  # a row of questions alone is left out


def test_what_rows_leave_out_is_said_at_every_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = chat_corpora.save_chat_tokenizer(tmp_path / "tokenizer", chat_corpora.CHATML)
    ask, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    chats = [
        [ask, answer | {"weight": 0}, ask, answer | {"reasoning_content": "Well, I think"}],
        [ask, answer | {"name": "Bo"}],
        # Nothing of this chat is trained.
        [ask, answer | {"weight": 0}],
    ]
    path = chat_corpora.write_lines(tmp_path / "a.jsonl", chats)
    train = {
        "task": "lm",
        "model": {"kind": "gpt2", "layers": 1, "width": 32, "heads": 4, "vocab": 512, "length": 64},
        "data": {"source": "text", "format": "chat", "path": path, "tokenizer": tokenizer}
        | {"data_dir": f"{tmp_path}/out", "eval_split": 0.0, "packing": "none"},
    }
    (report,) = prepare.prepare_text(TrainSpec.model_validate(train))
    sentences = [
        "the chat template leaves out 3 words of the assistant in 'reasoning_content', in 1 "
        "message: they are not targets",
        "the field 'id' is not read, in 3 rows",
        "2 messages of the assistant left out of the targets by 'weight'",
        "the key 'name' has no effect on text or targets, in 1 message",
    ]
    assert report["notes"] == sentences and report["rows"] == {"train": 2, "eval": 0}
    assert capfd.readouterr().err.splitlines()[-4:] == [f"chats: {text}" for text in sentences]
    text._print_notes.cache_clear()
    assert text.open_rows(TrainSpec.model_validate(train).data.texts()[""], 64, "train")
    assert capfd.readouterr().err.splitlines() == [f"chats: {sentence}" for sentence in sentences]


def test_user_tokens_do_not_affect_the_update(tmp_path: Path) -> None:
    second = [
        [
            turn | {"content": turn["content"][::-1]} if turn["role"] == "user" else turn
            for turn in chat
        ]
        for chat in CHATS
    ]
    actual = decode_targets(read_rows(tmp_path / "a", CHATS))
    assert actual == decode_targets(read_rows(tmp_path / "b", second))
    same = [
        [{"role": "user", "content": answer}, {"role": "assistant", "content": "b"}]
        for answer in ("a", "z")
    ]
    (first,), (two,) = read_rows(tmp_path / "c", same[:1]), read_rows(tmp_path / "d", same[1:])
    assert (first["tokens"] != two["tokens"]).sum() == 1
    assert (first["mask"] == two["mask"]).all() and first[
        "mask"
    ].sum() == 2  # the answer and its end


def test_small_model_learns_the_answers(tmp_path: Path) -> None:
    built = read_rows(tmp_path / "a", CHATS, packing="first-fit")
    task = NextToken()
    config = specs.GPT2(kind="gpt2", layers=1, width=32, heads=4, vocab=512, length=LENGTH)
    data = Text(source="text", format="chat", path="x", tokenizer="x")
    graph, params = nnx.split(task.model(TrainSpec(task=LM, model=config, data=data), nnx.Rngs(0)))
    (batch,) = Evaluation(
        _Rows(built), task.example, batch=len(built), rows=range(len(built)), threads=1
    )

    @jax.jit
    def step(params: Any) -> Any:
        def mean(params: Any) -> Any:
            total = task.loss(nnx.merge(graph, params), batch, jax.random.key(0))
            return total.sum / total.weight, total.weight

        (loss, weight), grads = jax.value_and_grad(mean, has_aux=True)(params)
        return jax.tree.map(lambda param, grad: param - 0.3 * grad, params, grads), loss, weight

    losses = []
    for _ in range(12):
        params, loss, weight = step(params)
        losses.append(float(loss))
    assert float(weight) == len(decode_targets(built))
    assert losses[-1] < 0.9 * losses[0]


class _Rows(list[dict[str, Any]]):
    """Rows as a source."""

    name = "rows"

    def fingerprint(self) -> str:
        return "rows"


def test_chats_without_targets_are_refused(tmp_path: Path) -> None:
    template = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    data_of = chat_corpora.save_chat_tokenizer(tmp_path / "tokenizer", template)
    path = chat_corpora.write_lines(tmp_path / "a.jsonl", [[{"role": "assistant", "content": "a"}]])
    data = Text(source="text", format="chat", path=path, tokenizer=data_of, eval_split=0.0)
    words = "a.jsonl and what else matches hold chats without a token to predict"
    with pytest.raises(DataError, match=words):
        build.build_rows(recipe.make_recipe(data, LENGTH), tmp_path / "out")
