"""A run samples at its evaluations, and `launcher sample` continues a prompt afterwards."""

import json
from pathlib import Path

import pytest

from tests.gang.run_files import read_json_lines
from tests.gang.runs import digits_block, make_job, run_job, run_launcher

pytestmark = pytest.mark.computes

DECODER = {
    "kind": "decoder",
    "layers": 1,
    "width": 32,
    "heads": 2,
    "hidden": 32,
    "vocab": 256,
    "length": 16,
}
LINE = "0123456789\n"


def test_run_samples_what_it_learned(tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text(LINE * 400)
    keys = {
        "data": {"source": "text", "path": str(tmp_path / "numbers.txt")},
        "mesh": {"fsdp": 2},
        "batch": 16,
        "steps": 60,
        "optimizer": {"lr": 3e-2},
        "eval": {"every": 30, "samples": {"prompts": ["012", "78"], "max_tokens": 8}},
    }
    train = digits_block(task="lm", model=DECODER, **keys)
    run = run_job(tmp_path / "run", make_job(train, hosts=2, per_host=1))
    assert run.code == 0, run.stderr[-4000:]
    lines = read_json_lines(run.folder / "samples.jsonl")
    assert [line["step"] for line in lines] == [30, 60]
    learned = [{"prompt": "012", "sample": "3456789\n"}, {"prompt": "78", "sample": "9\n012345"}]
    assert lines[-1]["samples"] == learned
    assert f"step 60/60  sample  {json.dumps(learned[0])}" in run.stdout
    done = run_launcher("sample", run.folder, "--prompt", "012", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3456789\n\n"
    assert "launcher: 8 tokens of step 60 in" in done.stderr
