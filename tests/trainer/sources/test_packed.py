"""Prepared rows in the hands of the trainer."""

import itertools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.attention.implementations import Visible
from jaxlaunch.trainer.data.pipeline import Evaluation
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.prepare import text as prepare
from jaxlaunch.trainer.sources import text as sources
from jaxlaunch.trainer.sources.open import open_source, tokenizer_files
from jaxlaunch.trainer.spec import LM, Text, TrainSpec
from jaxlaunch.trainer.tasks.lm import NextToken
from jaxlaunch.trainer.text import build, recipe
from tests.trainer.held_out import held_out_texts
from tests.trainer.text import corpora

LENGTH = 48
TEXTS = list(filter(None, corpora.make_texts(60, seed=4, longest=12)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared in this process: another would take seconds."""
    folder = tmp_path_factory.mktemp("corpus")
    corpora.save_tokenizer(folder / "tokenizer")
    corpora.write_lines(folder / "a.jsonl", TEXTS)
    for packing in ("concat", "first-fit", "none"):
        data = make_text(folder, packing=packing)
        built = recipe.make_recipe(data, LENGTH)
        build.build_rows(built, Path(recipe.prepared_root(data)) / built.address)
    return folder


def make_text(corpus: Path, **keys: Any) -> Text:
    options = {
        "path": f"{corpus}/a.jsonl",
        "tokenizer": f"{corpus}/tokenizer",
        "data_dir": f"{corpus}/out",
    }
    return Text(source="text", **({"eval_split": 0.2} | options | keys))


def make_job(data: Text, vocab: int = 600) -> TrainSpec:
    model = specs.GPT2(kind="gpt2", layers=1, width=32, heads=4, vocab=vocab, length=LENGTH)
    return TrainSpec(task=LM, model=model, data=data)


def read_rows(source: Any, task: NextToken) -> dict[str, Any]:
    held_out = Evaluation(
        source, task.example, batch=len(source), rows=range(len(source)), threads=1
    )
    (batch,) = held_out
    return batch


def test_row_has_segments_and_masks_padding(corpus: Path) -> None:
    source = sources.open_rows(make_text(corpus, packing="first-fit"), LENGTH, "train")
    assert source is not None
    for index in range(len(source)):
        row = source[index]
        assert {key: value.shape for key, value in row.items()} == {
            "tokens": (LENGTH + 1,),
            "segments": (LENGTH + 1,),
            "mask": (LENGTH,),
            "text_bytes": (),
        }
        segments, is_end = (
            row["segments"],
            row["tokens"] == 0,
        )  # 0 is the tokenizer's end of a document
        assert ((segments > 0) | is_end).all()
        assert np.isin(np.diff(segments[segments > 0]), (0, 1)).all()
        assert (row["mask"] == ((segments[1:] == segments[:-1]) & (segments[1:] > 0))).all()


def test_packed_loss_equals_the_loss_of_single_documents(corpus: Path) -> None:
    """The positions are learned, so any attention across documents would change the loss."""
    task = NextToken()
    graph, params = nnx.split(task.model(make_job(make_text(corpus)), nnx.Rngs(0)))

    def mean(params: Any, batch: dict[str, Any]) -> Any:
        examples = task.loss(nnx.merge(graph, params), batch, jax.random.key(0))
        return examples.sum / examples.weight, (
            examples.sum,
            examples.weight,
            examples.metrics["bits_per_byte"],
        )

    loss = jax.jit(jax.value_and_grad(mean, has_aux=True))
    ((_, together), slope), ((_, alone), slope_alone) = (
        loss(
            params,
            read_rows(sources.open_rows(make_text(corpus, packing=packing), LENGTH, "eval"), task),
        )
        for packing in ("first-fit", "none")
    )
    for result, expected in zip(jax.tree.leaves(slope), jax.tree.leaves(slope_alone), strict=True):
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)  # a step trains the same
    for result, expected in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5)
    (nats, bits, counted) = (float(together[0]), *map(float, together[2]))
    assert bits == pytest.approx(nats / math.log(2))
    held_out = itertools.compress(TEXTS, held_out_texts(TEXTS, 0.2))
    # All but first tokens.
    assert 0.8 < counted / sum(map(len, map(str.encode, held_out))) < 1


def test_documents_of_a_row_do_not_attend_to_each_other(corpus: Path) -> None:
    source = sources.open_rows(make_text(corpus, packing="first-fit"), LENGTH, "train")
    assert source is not None
    row = next(
        row for row in (source[at] for at in range(len(source))) if row["segments"].max() >= 3
    )
    graph, params = nnx.split(NextToken().model(make_job(make_text(corpus)), nnx.Rngs(0)))
    segments_L = row["segments"][:-1]
    keys = Visible(None, segments_L[None], None)
    logits = jax.jit(lambda params, tokens_L: nnx.merge(graph, params)(tokens_L[None], keys)[0])
    before_LV = np.asarray(logits(params, row["tokens"][:-1]))
    for number in range(1, segments_L.max() + 1):
        place = int(np.flatnonzero(segments_L == number)[0])
        tokens_L = row["tokens"][:-1].copy()
        tokens_L[place] += 1
        is_other_L = segments_L != number
        is_other_L[:place] = True
        differs_L = (np.asarray(logits(params, tokens_L)) != before_LV).any(-1)
        assert not differs_L[is_other_L].any() and differs_L[~is_other_L].all()


def test_perplexity_follows_from_the_loss() -> None:
    actual = NextToken().derived({"loss": 2.0, "accuracy": 0.5})
    assert actual == {"perplexity": pytest.approx(math.exp(2.0))}
    assert NextToken().derived({"loss": 1e9})["perplexity"] < math.inf


def test_rows_are_prepared_once_and_reused(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = []
    monkeypatch.setattr(
        sources, "_run_build", lambda made, folder, *_: began.append(build.build_rows(made, folder))
    )
    spec = make_job(make_text(corpus, packing="concat", seed=7))
    for _ in range(2):
        train, held_out = open_source(spec, "train"), open_source(spec, "eval")
        assert train is not None and held_out is not None
        assert len(train) > len(held_out) > 0 and train.fingerprint() != held_out.fingerprint()
    assert len(began) == 1
    (report,) = prepare.prepare_text(spec)
    assert report["rows"] == {"train": len(train), "eval": len(held_out)}
    assert report["documents"] == len(TEXTS)
    assert set(tokenizer_files(spec.data)) == {"tokenizer.json", "tokenizer_config.json"}


def test_eval_path_gives_the_evaluation_rows(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sources, "_run_build", lambda made, folder, *_: build.build_rows(made, folder)
    )
    corpora.write_lines(corpus / "held-out.jsonl", TEXTS[:7])
    spec = make_job(make_text(corpus, eval_path=f"{corpus}/held-out.jsonl", packing="none"))
    held_out = open_source(spec, "eval")
    assert held_out is not None and len(held_out) >= 7
    assert [item["documents"] for item in prepare.prepare_text(spec)] == [len(TEXTS), 7]


def test_too_small_vocabulary_is_refused_before_preparation(tmp_path: Path) -> None:
    spec = make_job(
        make_text(tmp_path, tokenizer=corpora.save_tokenizer(tmp_path / "tokenizer")), vocab=400
    )
    for refused in (lambda: open_source(spec, "train"), lambda: prepare.prepare_text(spec)):
        with pytest.raises(
            SpecError,
            match="vocab = 400 is less than the 500 of data.tokenizer = .*/tokenizer; make it",
        ):
            refused()
    assert not (tmp_path / "out").exists()


def test_unprepared_source_is_refused(corpus: Path) -> None:
    with pytest.raises(SpecError, match="train.data.source = text: there is nothing to prepare"):
        prepare.prepare_text(make_job(Text(source="text", path=f"{corpus}/a.jsonl")))


def test_table_is_not_read_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    words = "a.parquet is not plain text; data.packing: concat reads its documents"
    with pytest.raises(DataError, match=words):
        open_source(make_job(Text(source="text", path=f"{tmp_path}/*")), "train")
