"""What `validate` says of data that is here."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.local import job_notes, trainer_process

JOB = """
name: t
accelerator: {{type: cpu}}
volumes: [{{claim: data, path: /data}}]
train: {{task: lm, model: {{kind: decoder, length: 16}}, data: {{source: text, {}}}}}
"""


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            "path: mine.txt",
            "train.data.path: 1 file here, 100 B; its end is held out, by eval_split = 0.05.",
        ),
        (
            "path: mine.txt, packing: concat, eval_split: 0.0",
            "train.data.path: 1 file here, 100 B.",
        ),
        ("path: rows.jsonl, packing: concat", "train.data.path: 1 file here, 20 B."),
        ("path: [mine.txt, 'ro*']", "train.data.path: 2 files here, 120 B."),
        ("path: empty.txt", "train.data.path: 1 file here, 0 B: every file that matches is empty."),
        (
            "path: 'corpus/*.txt'",
            "train.data.path: corpus/*.txt matches no file here, in FOLDER: "
            "launcher run refuses it.",
        ),
        ("path: '/data/*.txt'", ""),
        ("path: 'stdlib://*.py'", ""),
        ("path: gs://team-data/x", ""),
        (
            "path: /data/x, tokenizer: tok",
            "train.data.tokenizer = tok does not exist here, in FOLDER: launcher run refuses it.",
        ),
    ],
)
def test_local_files_are_counted_and_missing_ones_reported(
    tmp_path: Path, data: str, sentence: str
) -> None:
    for name, size in (("mine.txt", 100), ("rows.jsonl", 20), ("empty.txt", 0)):
        (tmp_path / name).write_bytes(b"x" * size)
    sentences = list(job_notes.describe_data(jobs.parse_job(JOB.format(data)), tmp_path))
    assert [note.replace(str(tmp_path), "FOLDER") for note in sentences] == (
        [sentence] if sentence else []
    )


def test_mixture_parts_are_described_with_shares(tmp_path: Path) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    for number in range(3):
        (tmp_path / "photos" / "cat" / f"{number}.png").write_bytes(b"x" * 10)
    parts = """
    parts:
      photos: {source: images, weight: 3, path: photos}
      bucket: {source: images, weight: 1, path: "gs://team-data/x"}
      digits: {source: tfds, weight: 4, name: digits}
      held: {source: array_record, weight: 0, path: "gone/*"}
"""
    job = JOB.replace("{{source: text, {}}}", "").replace(
        "task: lm, model: {{kind: decoder, length: 16}}, data: ", ""
    )
    job = job.format().replace(
        "train: {}\n", f"train:\n  task: classify\n  data:\n    source: mixture{parts}"
    )
    assert [
        note.replace(str(tmp_path), "FOLDER")
        for note in job_notes.describe_data(jobs.parse_job(job), tmp_path)
    ] == [
        "train.data.parts.photos.path: 3 files here, 30 B; 37.5 % of the examples.",
        "train.data.parts.bucket.path: gs://team-data/x; 12.5 % of the examples.",
        "train.data.parts.digits: tfds, 50 % of the examples.",
        "train.data.parts.held.path: gone/* matches no file here, in FOLDER: "
        "launcher run refuses it.",
    ]


TABLE = """
name: t
accelerator: {type: cpu}
volumes: [{claim: data, path: /data}]
train: {task: classify, model: {kind: mlp, classes: 2}, data: {source: table, path: a.csv}}
"""


def test_refusals_of_data_and_weights_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,weight,diagnosis\n1,2,x\n3,4,y\n")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "mamba"}')

    def find_refusals(text: str) -> list[str]:
        return list(job_notes.find_refusals(jobs.parse_job(text), tmp_path))

    (refusal,) = find_refusals(TABLE.replace("path: a.csv", "path: a.csv, label: diagnosys"))
    assert "has no column 'diagnosys' (did you mean 'diagnosis'?); it has" in refusal
    assert refusal.startswith("launcher run refuses it: ")
    lm = JOB.format("path: a.csv").replace("kind: decoder", "kind: decoder, init_from: hf")
    (refusal,) = find_refusals(lm)
    assert "config.json: model_type is mamba, and only" in refusal


@pytest.mark.parametrize(
    "text",
    [
        "name: t\naccelerator: {type: cpu}\ncommand: [x]\n",
        TABLE,
        TABLE.replace("a.csv", "/data/a.csv"),
        TABLE.replace("a.csv", "gs://team-data/a.csv"),
        JOB.format("path: mine.txt, packing: concat"),
        JOB.format("path: mine.txt").replace("kind: decoder", "kind: decoder, init_from: /data/hf"),
    ],
)
def test_no_program_is_started_without_files_to_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "mine.txt").write_text("x")
    monkeypatch.setattr(trainer_process, "run_program", None)
    assert list(job_notes.find_refusals(jobs.parse_job(text), tmp_path)) == []
