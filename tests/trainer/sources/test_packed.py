"""Prepared rows in the hands of the trainer."""

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
from tests.trainer.text import corpora

LENGTH = 48
TEXTS = list(filter(None, corpora.texts(60, seed=4, longest=12)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared in this process: another would take seconds."""
    folder = tmp_path_factory.mktemp("corpus")
    corpora.saved(folder / "tokenizer")
    corpora.lines(folder / "a.jsonl", TEXTS)
    for packing in ("concat", "first-fit", "none"):
        data = text(folder, packing=packing)
        made = recipe.make_recipe(data, LENGTH)
        build.build_rows(made, Path(recipe.prepared_root(data)) / made.address)
    return folder


def text(corpus: Path, **keys: Any) -> Text:
    given = {
        "path": f"{corpus}/a.jsonl",
        "tokenizer": f"{corpus}/tokenizer",
        "data_dir": f"{corpus}/out",
    }
    return Text(source="text", **({"eval_split": 0.2} | given | keys))


def job(data: Text, vocab: int = 600) -> TrainSpec:
    model = specs.GPT2(kind="gpt2", layers=1, width=32, heads=4, vocab=vocab, length=LENGTH)
    return TrainSpec(task=LM, model=model, data=data)


def rows(source: Any, task: NextToken) -> dict[str, Any]:
    held = Evaluation(source, task.example, batch=len(source), rows=range(len(source)), threads=1)
    (batch,) = held
    return batch


def test_a_row_has_a_segment_for_each_document_and_nothing_to_predict_where_it_is_filled_up(
    corpus: Path,
) -> None:
    source = sources.open_rows(text(corpus, packing="first-fit"), LENGTH, "train")
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
        assert ((segments > 0) | is_end).all() and np.isin(
            np.diff(segments[segments > 0]), (0, 1)
        ).all()
        assert (row["mask"] == ((segments[1:] == segments[:-1]) & (segments[1:] > 0))).all()


def test_documents_in_rows_cost_what_they_cost_alone(corpus: Path) -> None:
    """Of a model whose positions are learned: were one document to see another, or to begin later, it would differ."""
    task = NextToken()
    graph, params = nnx.split(task.model(job(text(corpus)), nnx.Rngs(0)))

    def mean(params: Any, batch: dict[str, Any]) -> Any:
        found = task.loss(nnx.merge(graph, params), batch, jax.random.key(0))
        return found.sum / found.weight, (found.sum, found.weight, found.metrics["bits_per_byte"])

    loss = jax.jit(jax.value_and_grad(mean, has_aux=True))
    ((_, together), slope), ((_, alone), slope_alone) = (
        loss(params, rows(sources.open_rows(text(corpus, packing=packing), LENGTH, "eval"), task))
        for packing in ("first-fit", "none")
    )
    for found, wanted in zip(jax.tree.leaves(slope), jax.tree.leaves(slope_alone), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)  # a step trains the same
    for found, wanted in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    (nats, bits, counted) = (float(together[0]), *map(float, together[2]))
    assert bits == pytest.approx(nats / math.log(2))
    assert (
        0.8 < counted / sum(len(each.encode()) for each in TEXTS[::5]) < 1
    )  # all but first tokens


def test_a_changed_token_changes_no_logit_of_another_document(corpus: Path) -> None:
    source = sources.open_rows(text(corpus, packing="first-fit"), LENGTH, "train")
    assert source is not None
    row = next(
        row for row in (source[at] for at in range(len(source))) if row["segments"].max() >= 3
    )
    graph, params = nnx.split(NextToken().model(job(text(corpus)), nnx.Rngs(0)))
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


def test_the_perplexity_follows_from_the_loss() -> None:
    assert NextToken().derived({"loss": 2.0, "accuracy": 0.5}) == {
        "perplexity": pytest.approx(math.exp(2.0))
    }
    assert NextToken().derived({"loss": 1e9})["perplexity"] < math.inf


def test_a_job_s_text_is_prepared_at_its_first_start_and_found_at_the_next(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = []
    monkeypatch.setattr(
        sources, "_run_build", lambda made, folder, *_: began.append(build.build_rows(made, folder))
    )
    spec = job(text(corpus, packing="concat", seed=7))
    for _ in range(2):
        train, held_out = open_source(spec, "train"), open_source(spec, "eval")
        assert train is not None and held_out is not None
        assert len(train) > len(held_out) > 0 and train.fingerprint() != held_out.fingerprint()
    assert len(began) == 1
    (report,) = prepare.prepare_text(spec)
    assert report["rows"] == {"train": len(train), "eval": len(held_out)} and report[
        "documents"
    ] == len(TEXTS)
    assert set(tokenizer_files(spec.data)) == {"tokenizer.json", "tokenizer_config.json"}


def test_other_files_may_evaluate(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sources, "_run_build", lambda made, folder, *_: build.build_rows(made, folder)
    )
    corpora.lines(corpus / "held-out.jsonl", TEXTS[:7])
    spec = job(text(corpus, eval_path=f"{corpus}/held-out.jsonl", packing="none"))
    held_out = open_source(spec, "eval")
    assert held_out is not None and len(held_out) >= 7
    assert [each["documents"] for each in prepare.prepare_text(spec)] == [len(TEXTS), 7]


def test_a_tokenizer_that_the_model_does_not_know_is_refused_before_anything_is_prepared(
    tmp_path: Path,
) -> None:
    spec = job(text(tmp_path, tokenizer=corpora.saved(tmp_path / "tokenizer")), vocab=400)
    for refused in (lambda: open_source(spec, "train"), lambda: prepare.prepare_text(spec)):
        with pytest.raises(
            SpecError,
            match="vocab = 400 is less than the 500 of data.tokenizer = .*/tokenizer; make it",
        ):
            refused()
    assert not (tmp_path / "out").exists()


def test_what_is_not_prepared_is_said(corpus: Path) -> None:
    with pytest.raises(SpecError, match="train.data.source = text: there is nothing to prepare"):
        prepare.prepare_text(job(Text(source="text", path=f"{corpus}/a.jsonl")))


def test_a_table_is_not_read_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        DataError, match="a.parquet is not plain text; data.packing: concat reads its documents"
    ):
        open_source(job(Text(source="text", path=f"{tmp_path}/*")), "train")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"apart": True}, "apart applies to one stream of bytes"),
        ({"bigram": True}, "bigram applies to one stream of bytes"),
        ({"tokenizer": "bytes", "eval_path": "x"}, "eval_path applies to documents; set packing"),
        (
            {"tokenizer": "http://a/b"},
            "is http://a/b, which cannot be read: only folders, gs:// and s3:// can",
        ),
        (
            {"data_dir": "gs://team-a/b"},
            "is not a folder, and data can only be prepared in a folder",
        ),
        ({"packing": "best"}, "Input should be 'concat', 'first-fit' or 'none'"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(
    tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        text(tmp_path, **keys)
