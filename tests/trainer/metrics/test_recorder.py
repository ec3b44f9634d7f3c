import json
import math
import os
import pathlib
import re
import resource
import shutil
import socket
from collections.abc import Iterator

import jax
import pytest

from jaxlaunch import contract
from jaxlaunch.trainer import counts
from jaxlaunch.trainer.metrics.counters import METRIC_ROWS, Workload
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.recorder import (
    Metrics,
    format_interval,
    format_short,
)


class Loop:
    """The metrics of a training loop, over real files, a real pipe and a real socket."""

    def __init__(self, folder: pathlib.Path, *, rank: int = 0) -> None:
        self.folder = folder
        end, self.fd = os.pipe()
        os.set_blocking(self.fd, False)
        self.pipe = open(end)  # noqa: SIM115 (open as long as the object)
        self.progress = Progress(self.fd)
        self.metrics = Metrics(
            Workload(60, 8, dataset_examples=100),
            rank=rank,
            run_dir=str(folder / "run"),
            socket=str(folder / "socket"),
            progress=self.progress,
        )

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            with self.metrics.timer.get_part("data"):
                pass
            self.metrics.timer.end_step()
            if step % 10 == 0:
                means = {"accuracy": 0.5, "finite": True, "grad_norm": 1.234, "learning_rate": 3e-4}
                self.metrics.record_interval(step, means | {"loss": 1 / step})

    def scrape(self) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(self.folder / "socket"))
            return b"".join(iter(lambda: client.recv(65536), b"")).decode()

    def lines(self, name: str = "metrics") -> list[dict[str, float]]:
        path = self.folder / "run" / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def reports(self) -> list[dict[str, object]]:
        """End the loop and return all that the agent read."""
        self.close()
        with self.pipe:
            return [json.loads(line) for line in self.pipe]

    def notes(self) -> list[str]:
        """End the loop and return its notes."""
        return [str(line["note"]) for line in self.reports() if "note" in line]

    def close(self) -> None:
        if self.fd >= 0:
            self.metrics.close()
            self.progress.close()
            os.close(self.fd)
            self.fd = -1


@pytest.fixture
def loop(tmp_path: pathlib.Path) -> Iterator[Loop]:
    # Counters are of the process.
    counts.take_totals()
    loop = Loop(tmp_path)
    yield loop
    loop.close()
    loop.pipe.close()


def test_scrape_before_first_step_has_every_name(loop: Loop) -> None:
    lines = loop.scrape().splitlines()
    for row in METRIC_ROWS:
        assert any(line.startswith((f"{row.name}{{", f"{row.name}_bucket{{")) for line in lines)


def test_step_is_exported_between_intervals(loop: Loop) -> None:
    loop.metrics.start(20)
    loop.steps(21, 27)
    text = loop.scrape()
    for sample in ("step", "steps_total", "examples_total", "epoch"):
        value = {"step": 27.0, "steps_total": 7.0, "examples_total": 56.0, "epoch": 2.16}[sample]
        assert f'jaxlaunch_{sample}{{rank="0"}} {value}' in text


def test_interval_reaches_scrape_folder_pipe_and_output(
    loop: Loop, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.metrics.start(0, flops_per_step=1e6, peak_flops=1e12)
    loop.steps(1, 20)
    text = loop.scrape()
    for sample in (
        'loss{rank="0"} 0.05',
        'grad_norm{rank="0"} 1.234',
        'learning_rate{rank="0"} 0.0003',
    ):
        assert f"jaxlaunch_{sample}" in text
    assert 'jaxlaunch_task_metric{metric="accuracy",rank="0",split="train"} 0.5' in text
    first, second = loop.lines()
    assert (first["step"], second["step"]) == (10, 20)
    assert (second["loss"], second["accuracy"]) == (0.05, 0.5)
    assert first["examples_per_s"] > 0 and first["mfu"] > 0
    assert first["tokens_per_s"] is None and "finite" not in first
    parts = sum(second[f"{part}_s"] for part in ("data", "host", "device", "save", "eval"))
    assert parts == pytest.approx(second["wall_s"])
    # A loss scale is of float16 alone, and bytes of buckets are of data that are in one.
    keys = {row.key for row in METRIC_ROWS if row.key} - {
        contract.Key.PART_S,
        contract.Key.LOSS_SCALE,
        "bucket_read_bytes",
    }
    assert keys <= first.keys()
    reports = loop.reports()[-1]["metrics"]
    assert (reports["step"], reports["loss"], reports["epoch"]) == (20, 0.05, 1.6)
    line = "step 20/60  loss 0.0500  grad 1.23  lr 3.0e-04  accuracy 0.5  "
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flops_per_step", "peak_flops"), [(1e6, 1e12), (1e6, None), (None, 1e12), (None, None)]
)
def test_utilization_is_the_share_of_the_peak_if_both_are_known(
    loop: Loop, flops_per_step: float | None, peak_flops: float | None
) -> None:
    loop.metrics.start(0, flops_per_step=flops_per_step, peak_flops=peak_flops)
    loop.steps(1, 20)
    for line in loop.lines():
        steps_per_s = line["examples_per_s"] / 8
        is_known = flops_per_step is not None and peak_flops is not None
        share = pytest.approx(1e6 * steps_per_s / 1e12) if is_known else None
        assert line["mfu"] == share


def test_evaluation_has_own_file_and_stays_in_report(
    loop: Loop, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.metrics.start(0)
    loop.steps(1, 10)
    loop.metrics.record_evaluated(10, {"accuracy": 0.975, "examples": 360.0, "loss": 0.25})
    loop.steps(11, 20)
    (line,) = loop.lines("eval")
    assert (line["step"], line["loss"], line["examples"]) == (10, 0.25, 360.0)
    assert [line["step"] for line in loop.lines()] == [10, 20]
    assert 'jaxlaunch_task_metric{metric="loss",rank="0",split="eval"} 0.25' in loop.scrape()
    loop.metrics.record_evaluated(20, {"accuracy": 0.975, "examples": 360.0, "loss": 0.25})
    loop.metrics.record_best(20)
    last = loop.reports()[-1]["metrics"]
    assert last["examples_per_s"] > 0
    assert (last["step"], last["loss"], last["eval_accuracy"]) == (20, 0.05, 0.975)
    assert (last["best_step"], last["eval_loss"]) == (20, 0.25)
    assert "best_step" not in loop.lines("eval")[-1]
    line = "step 10/60  eval  loss 0.2500  accuracy 0.975  examples 360\n"
    assert line in capsys.readouterr().out


def test_saves_and_commits_are_counted(loop: Loop) -> None:
    loop.metrics.start(0)
    assert 'jaxlaunch_checkpoint_step{rank="0"} NaN' in loop.scrape()
    loop.metrics.record_saved(10, 0.25)
    loop.metrics.record_saved(20, 0.5)
    loop.metrics.record_committed(10)
    text = loop.scrape()
    assert 'jaxlaunch_checkpoint_saves_total{rank="0"} 2.0' in text
    assert 'jaxlaunch_checkpoint_blocking_seconds_total{rank="0"} 0.75' in text
    assert 'jaxlaunch_checkpoint_step{rank="0"} 10.0' in text


def test_other_ranks_only_export(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(tmp_path, rank=2)
    loop.metrics.start(0)
    loop.steps(1, 10)
    assert 'jaxlaunch_loss{rank="2"} 0.1' in loop.scrape()
    assert loop.reports() == [] and not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""

    @pytest.mark.parametrize(
        ("name", "note"),
        [("run", "no metrics in the run folder: "), ("socket", "no metrics for Prometheus: ")],
    )
    def test_unusable_run_folder_or_socket_is_noted(
        tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], name: str, note: str
    ) -> None:
        if name == "run":
            (tmp_path / "run").write_text("a file where the folder should be")
        else:
            (tmp_path / "socket").mkdir()
        loop = Loop(tmp_path)
        loop.metrics.start(0)
        loop.steps(1, 10)
        assert name == "run" or len(loop.lines()) == 1
        notes = loop.notes()
        assert len(notes) == 1 and notes[0].startswith(note)
        assert note in capsys.readouterr().err


def test_full_disk_is_noted_once(loop: Loop, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboardX")
    loop.metrics.start(0)
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, previous[1]))  # no file may grow any more
    try:
        loop.steps(1, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
    notes = [note.partition(":")[0] for note in loop.notes()]
    assert notes == ["no more metrics.jsonl", "no more TensorBoard events"]
    assert "step 20/60" in capsys.readouterr().out


def test_resumed_files_hold_each_step_once(tmp_path: pathlib.Path) -> None:
    for first, last in ((0, 50), (30, 60)):
        loop = Loop(tmp_path)
        loop.metrics.start(first)
        loop.steps(first + 1, last)
        loop.reports()
    assert [line["step"] for line in loop.lines()] == [10, 20, 30, 40, 50, 60]


def test_line_shows_tokens_and_targets(loop: Loop, capsys: pytest.CaptureFixture[str]) -> None:
    loop.metrics.start(0)
    for step in range(1, 21):
        loop.metrics.record_trained(step, 32.0 if step <= 10 else 64.0, 512.0)
        loop.steps(step, step)
    for line, share in zip(loop.lines(), (32, 64), strict=True):
        assert line["tokens_per_s"] == pytest.approx(line["examples_per_s"] * 64)
        assert line["targets_per_s"] == pytest.approx(line["tokens_per_s"] * share / 512)
        assert "weight" not in line
    text = loop.scrape()
    assert 'jaxlaunch_targets_total{rank="0"} 960.0' in text
    assert 'jaxlaunch_tokens_total{rank="0"} 10240.0' in text
    assert re.search(r" tokens/s  [\d.]+[kM]? targets/s  data ", capsys.readouterr().out)
    loop.reports()


def test_step_without_target_is_counted_and_printed(
    loop: Loop, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.metrics.start(0)
    for step, weight in ((1, 8.0), (2, 0.0), (3, 8.0)):
        loop.metrics.record_trained(step, weight)
    loop.metrics.record_interval(3, {"loss": math.nan, "weight": 8.0})
    assert 'jaxlaunch_empty_steps_total{rank="0"} 1.0' in loop.scrape()
    line = "step 2/60  empty: its batch has no target, nothing is changed\n"
    assert line in capsys.readouterr().out and loop.lines()[-1]["loss"] is None


def test_compile_cache_events_are_counted_once(loop: Loop, tmp_path: pathlib.Path) -> None:
    (tmp_path / "other").mkdir()
    other = Loop(tmp_path / "other")
    for event in ("hits", "misses", "hits"):
        jax.monitoring.record_event(f"/jax/compilation_cache/cache_{event}")
    text = loop.scrape()
    assert 'cache_hits_total{rank="0"} 2.0' in text and 'cache_misses_total{rank="0"} 1.0' in text
    other.reports()


def test_bytes_of_buckets_are_exported_and_written_by_interval(loop: Loop) -> None:
    read = counts.Counter("jaxlaunch_bucket_read_bytes_total")
    read.add(1000)  # before the first step, such as an index
    loop.metrics.start(0)
    for step, size in ((10, 70), (20, 0), (30, 5)):
        read.add(size)
        loop.steps(step - 9, step)
    assert [line["bucket_read_bytes"] for line in loop.lines()] == [70.0, 0.0, 5.0]
    assert 'jaxlaunch_bucket_read_bytes_total{rank="0"} 1075.0' in loop.scrape()


def test_line_omits_unknown_values() -> None:
    assert format_interval(3, 9, {"loss": 2.0}, {}, {}) == "step 3/9  loss 2.0000"
    speeds = {"examples_per_s": 12_345.0, "tokens_per_s": None, "mfu": 0.0421}
    busy = {"data": 0.013, "save": 0.0}
    assert format_interval(3, 9, {"loss": 2.0}, speeds, busy) == (
        "step 3/9  loss 2.0000  12.3k examples/s  mfu 4.2 %  data 1 %  save 0 %"
    )


@pytest.mark.parametrize(
    ("number", "text"), [(0.5, "0.5"), (999.0, "999"), (1049.0, "1.05k"), (2.5e6, "2.5M")]
)
def test_numbers_have_short_format(number: float, text: str) -> None:
    assert format_short(number) == text


def test_metrics_close_after_folder_is_deleted(loop: Loop, tmp_path: pathlib.Path) -> None:
    loop.metrics.start(0)
    loop.steps(1, 10)
    (tmp_path / "socket").unlink()
    shutil.rmtree(tmp_path / "run")
    assert not loop.notes()


def test_metrics_close_with_note_after_failures(loop: Loop) -> None:
    loop.metrics.start(0)
    loop.steps(1, 10)
    journal = loop.metrics._files._journals["metrics"]
    journal.close()
    journal._file = open("/dev/full", "a")  # noqa: SIM115 (the journal closes it)
    journal._file.write("waits in the buffer")
    notes = loop.notes()
    assert all(note.startswith("the metrics could not be closed: ") for note in notes)
    assert any("No space left on device" in note for note in notes)
