from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.report import headline, page, run_files
from jaxlaunch.launcher.report.run import RunReader
from jaxlaunch.records.summary import AttemptProgress, RankMemory, StartRecord, Summary
from jaxlaunch.records.verdict import verdict_for_code
from jaxlaunch.runs import layout
from tests.launcher.invoke import launcher
from tests.launcher.report import made_runs

NASTY = (
    "<script>alert(1)</script>\u202e../../etc/passwd\n\u2028</script>&\x00\x1b]52;c;aGk=\x07\ud800"
)


def page_data(text: str) -> dict:
    record = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(record[1])


def test_report_is_one_self_contained_file(tmp_path: Path, capsys, monkeypatch) -> None:
    made_runs.run(tmp_path / "runs" / "digits")
    monkeypatch.chdir(tmp_path)

    result = launcher(capsys, monkeypatch, "report", "digits", "-o", "page.html")

    assert result.code == 0
    text = (tmp_path / "page.html").read_text()
    assert "default-src 'none'" in text and len(text) < 500_000
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", text)
    data = page_data(text)
    # Of 2 attempts, the first lost 3 s of steps. The second began 2 s later and took 11.5 s to its
    # first step: rendezvous, start, restore and compilation.
    loss = data["curves"]["eval/loss"][2][-1]
    assert (
        data["sentence"]["text"]
        == f"Run digits is done in 75 s: eval/loss {loss:.4g}; 1 kill costs 16 s."
    )
    assert data["cards"] == [["eval/loss", f"{loss:.4g}"]]
    assert "data_s" not in data["drawn"] and {"loss", "eval/loss"} <= set(data["drawn"])
    assert "not-to-be-shown" not in text  # of the job's environment


def test_report_of_a_sweep_is_its_page(tmp_path: Path, capsys, monkeypatch) -> None:
    made_runs.sweep(tmp_path / "runs" / "lr-sweep")
    monkeypatch.chdir(tmp_path)

    result = launcher(capsys, monkeypatch, "report", "lr-sweep")

    assert result.code == 0
    data = page_data((tmp_path / "lr-sweep.html").read_text())
    assert data["kind"] == "sweep" and [run["state"] for run in data["runs"]] == [
        *("done", "failed", "done", "done", "waiting")
    ]
    refused = launcher(capsys, monkeypatch, "report", "lr-sweep", "--pictures", "drawn")
    assert refused.code == 2 and "--pictures is for one run" in refused.err


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (
            "running",
            "has been running for 25 s at step 40 of 1000: eval/accuracy 98.6 %, loss 0.5.",
        ),
        ("killed", "was killed after 25 s at step 40: eval/accuracy 98.6 %, loss 0.5."),
        ("failed", "failed after 25 s at step 40: boom"),
        ("stopped", "was stopped after 25 s at step 40: stopped"),
        ("done", "is done in 25 s: eval/accuracy 98.6 %, loss 0.5."),
    ],
)
def test_first_sentence_has_the_result(tmp_path: Path, state: str, sentence: str) -> None:
    codes = {"failed": (contract.CRASH, "boom"), "stopped": (contract.PREEMPTED, "stopped")}
    codes["done"] = (contract.DONE, "every process finished")
    verdict = verdict_for_code(*codes[state]) if state in codes else None
    began = made_runs.BEGAN
    progress = AttemptProgress("uid", 0, 1, began, began + 25, seconds={"step": 20.0, "init": 5.0})
    end = None if verdict is None else verdict.code
    start = StartRecord(1, "uid", began, None if end is None else began + 25, end, 1, 40)
    summary = Summary(verdict, step=40, of=progress, starts=[start], restarts={})
    folder = tmp_path / "run"
    folder.mkdir()
    made_runs.write(folder, summary, [])
    (folder / "metrics.jsonl").write_text(
        f'{{"step": 40, "loss": 0.5, "tokens_per_s": 12345.0, "time": {began + 20}}}\n'
    )
    (folder / "eval.jsonl").write_text(
        f'{{"step": 40, "accuracy": 0.9856, "time": {began + 21}}}\n'
    )
    is_held = state == "running"
    with layout.hold_lock(folder) if is_held else contextlib.nullcontext():
        data = RunReader(folder).read_report().to_json()
    assert data["sentence"]["text"] == f"Run run {sentence}"
    cards = [["eval/accuracy", "98.6 %"], ["loss", "0.5"], ["Speed", "12.3k tokens/s"]]
    assert [list(card) for card in data["cards"]] == cards


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.516, "0.52 s"),
        (9.96, "10 s"),
        (119.4, "119 s"),
        (258, "4 min 18 s"),
        (3599.7, "1 h 0 min"),
        (12_000, "3 h 20 min"),
        (187_300, "2 d 4 h"),
    ],
)
def test_spans_are_written_for_people(seconds: float, text: str) -> None:
    assert headline.format_span(seconds) == text


def test_pictures_are_svg_and_png(tmp_path: Path, capsys, monkeypatch) -> None:
    made_runs.run(tmp_path / "runs" / "digits")
    monkeypatch.chdir(tmp_path)

    result = launcher(capsys, monkeypatch, "report", "digits", "--pictures", "drawn")

    files = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert result.code == 0 and {"time.svg", "time.png", "loss.svg", "loss.png"} <= files
    assert all(f"drawn/{name}" in result.out for name in files)
    assert "polyline" in (tmp_path / "drawn" / "loss.svg").read_text()
    assert (tmp_path / "drawn" / "loss.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").write_text("")
    refused = launcher(capsys, monkeypatch, "report", "digits", "--pictures", "file/below")
    assert refused.code == 2 and "file/below cannot be written" in refused.err


@pytest.mark.parametrize(
    ("best", "steps"),
    [
        ("{metric: eval/loss}", [30]),
        ("{metric: eval/loss, mode: min}", [30]),
        ("{metric: eval/accuracy, mode: max}", [20]),
        ("{metric: eval/f1, mode: max}", []),
        ("", []),
    ],
)
def test_best_checkpoint_is_that_of_the_metric(tmp_path: Path, best: str, steps: list[int]) -> None:
    """The best of the steps that are kept, of which one has no manifest yet."""
    job = made_runs.JOB.replace(
        "{best: {metric: eval/loss}}", f"{{best: {best}}}" if best else "{}"
    )
    made_runs.run(tmp_path / "digits", points=1, job=job)
    evaluated = [(10, 0.1, 0.9), (20, 0.4, 0.8), (30, 0.2, 0.7), (40, math.nan, math.nan)]
    with open(tmp_path / "digits" / "eval.jsonl", "w") as file:
        for step, loss, accuracy in evaluated:
            row = {"step": step, "time": made_runs.BEGAN + step, "loss": loss, "accuracy": accuracy}
            file.write(json.dumps(row) + "\n")
    for step in (20, 30, 40):
        folder = tmp_path / "digits" / "checkpoints" / str(step)
        folder.mkdir(parents=True)
        manifest = {"manifest": {"files": {"a": [step, ""], "b": [5, ""]}}}
        if step != 40:
            (folder / contract.MANIFEST).write_text(json.dumps(manifest))
    rows = RunReader(tmp_path / "digits").read_report().to_json()["checkpoints"]
    assert [(row["step"], row["bytes"], row["verified"]) for row in rows] == [
        (40, None, False),
        (30, 35, True),
        (20, 25, True),
    ]
    assert [row["step"] for row in rows if row["best"]] == steps


def test_untrusted_text_is_never_html(tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    made_runs.failed(folder, verdict_for_code(83, NASTY, rank=0))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 2000, NASTY[:60]: 1.0, "loss": 1.0}) + "\n")
    (folder / "reported").mkdir()
    (folder / "reported" / "7.json").write_text(
        json.dumps({"step": 7, "samples": [{"name": NASTY, "text": NASTY}]})
    )
    (folder / "reported" / "8.json").write_text("{" * 9)
    (folder / "samples.jsonl").write_text(
        json.dumps({"step": 1, "samples": [{"prompt": NASTY, "text": NASTY}]}) + "\n"
    )

    text = page.render_page("run", folder.name, RunReader(folder).read_report().to_json())

    assert text.count("<script") == 2 and text.count("</script>") == 2
    assert "<img" not in text
    assert not re.search("[\x00-\x08\x1b\u202e\u2028]", text)
    assert "alert(1)" in page_data(text)["sentence"]["text"]
    assert [row["step"] for row in page_data(text)["samples"]] == [1, 7]


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 5, "loss": NaN, "x": Infinity, "y": 1e308, "z": -1e999}',
        '{"step": 5, "loss": "' + "x" * 10_000_000 + '"}',
        '{"step": 5, "' + "n" * 1_000_000 + '": 1.0}',
        '{"step": -1, "loss": 1}',
        '{"step": true, "loss": 1}',
        '{"step": 1' + "0" * 5000 + "}",
        '{"step": 5, "loss": true, "time": "soon"}',
        '{"step": 5, "loss": 1, "time": 1e300, "wall_s": 1e300}',
        "[" * 100_000,
        "null",
        '"step"',
        "\x00\xff",
        '{"step": 5, "loss": 1',
    ],
    ids=lambda line: line[:24],
)
@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "eval.jsonl", "attempts.jsonl", "summary.json", "samples.jsonl", "job.yaml"],
)
def test_invalid_lines_are_skipped(tmp_path: Path, name: str, line: str) -> None:
    made_runs.run(tmp_path / "run", codes=(0,), points=5)
    with open(
        tmp_path / "run" / name, "a" if name.endswith("jsonl") else "w", encoding="latin-1"
    ) as file:
        file.write(line + "\n")

    text = page.render_page("run", "run", RunReader(tmp_path / "run").read_report().to_json())

    assert len(text) < 1_000_000


def test_memory_of_each_host_and_of_the_killed_rank_is_on_page(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made_runs.run(run, codes=(137, 0), points=5)
    full, other = RankMemory(3, 1, 7.0, 7.9, 8.0), RankMemory(0, 0, 0.5)
    path = run / "summary.json"
    summary = Summary.from_json(json.loads(path.read_text()))
    summary = dataclasses.replace(summary, memory=[full, other])
    path.write_text(json.dumps(summary.to_json()))
    first, last = (run / "attempts.jsonl").read_text().splitlines()
    record = json.loads(first) | {"memory": dataclasses.asdict(full)}
    (run / "attempts.jsonl").write_text(f"{json.dumps(record)}\n{last}\n")

    data = RunReader(run).read_report().to_json()

    assert data["memory"] == [
        {"rank": 3, "host": 1, "process": "7 GiB", "used": "7.9 of 8 GiB (99 %)"},
        {"rank": 0, "host": 0, "process": "0.5 GiB", "used": ""},
    ]
    text = "process 7 GiB, host 1: 7.9 of 8 GiB (99 %)"
    assert [row["memory"] for row in data["attempts"]] == [text, ""]
    assert ("fullest host", text) in data["facts"]


@pytest.mark.parametrize("count", [3, 50, 1000])
def test_classification_is_on_page(tmp_path: Path, count: int) -> None:
    made_runs.run(tmp_path / "run", codes=(0,), points=5)
    content = made_runs.classification(tmp_path / "run", [NASTY[:100], *map(str, range(1, count))])

    text = page.render_page("run", "run", RunReader(tmp_path / "run").read_report().to_json())

    classes = page_data(text)["classes"]
    assert text.count("<script") == 2 and len(text) < 1_000_000
    assert classes["per_class"][1] == {
        "label": "1",
        "examples": 9,
        "precision": 0.8889,
        "recall": 0.8889,
        "f1": 0.8889,
    }
    assert classes["confusion"] == content.get("confusion")
    assert [row["predicted"] for row in classes["confused"]] == ([] if count <= 50 else ["1"])
    # The other example has no name.
    assert [row["loss"] for row in classes["worst"]] == [3.5]
    assert classes["worst"][0]["where"].startswith("images/")


def changed_record(record: Any) -> Iterator[Any]:
    """Yield the record with each of its values in turn removed or replaced by other kinds."""
    for key in (
        record
        if isinstance(record, dict)
        else range(len(record))
        if isinstance(record, list)
        else ()
    ):
        for other in (None, -1, 1e999, math.nan, "x", [[]], {"a": 1}, True):
            yield with_value(record, key, other)
        for inner in changed_record(record[key]):
            yield with_value(record, key, inner)


def with_value(record: Any, key: Any, value: Any) -> Any:
    content = copy.copy(record)
    content[key] = value
    return content


def test_invalid_classification_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / contract.CLASSIFICATION
    record = made_runs.classification(tmp_path / "run", ["a", "b"])
    unchanged = 0
    for spoiled in [
        *changed_record(record),
        {**record, "per_class": record["per_class"] * 2000},
        [record],
        None,
    ]:
        path.write_text(json.dumps(spoiled))
        classes = run_files.read_classification(tmp_path / "run")
        page.to_json(classes)
        unchanged += classes is not None
    assert unchanged < 80  # what may be absent, and what the page does not read
    whole = json.dumps(record)
    for text in (
        "[" * 100_000,
        whole[:-1],
        whole.replace("1000", "9" * 5000, 1),
        whole + " " * (4 << 20),
    ):
        path.write_text(text)
        assert run_files.read_classification(tmp_path / "run") is None, text[:60]
    path.unlink()
    os.mkfifo(path)
    assert run_files.read_classification(tmp_path / "run") is None


def test_growing_and_replaced_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    curves = run_files.CurveFile(path)
    curves.read_new_rows()
    with open(path, "a") as file:
        file.write('ss": 3.0}\n')
    curves.read_new_rows()
    assert [point[2] for point in curves.curves["loss"].points] == [1.0, 2.0, 3.0]

    (tmp_path / "new").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 9.0}\n')
    (tmp_path / "new").replace(path)
    assert curves.read_new_rows()
    assert [point[2] for point in curves.curves["loss"].points] == [1.0, 9.0]
