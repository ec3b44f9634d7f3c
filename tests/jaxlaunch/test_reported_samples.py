"""Pictures and texts that a program reports: what is refused, and what is in the run folder."""

from __future__ import annotations

import base64
import io
import json
import os
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import jaxlaunch
from jaxlaunch import samples

NOISE = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def wait_for_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer at the end of a process: the thread may get no turn on a busy machine."""
    monkeypatch.setattr(samples, "EXIT_WAIT_S", 60.0)


def read_samples(folder: Path, step: int) -> dict[tuple[str, str], Any]:
    """What is kept of a step, pictures as Pillow reads them."""
    row = json.loads((folder / f"{step}.json").read_text())
    assert row["step"] == step
    steps = {}
    for sample in row["samples"]:
        kind = "image" if "image" in sample else "text"
        value = sample[kind]
        if kind == "image":
            value = np.asarray(
                Image.open(io.BytesIO(base64.b64decode(value.partition("base64,")[2])))
            )
        steps[kind, sample["name"]] = value
    return steps


@pytest.mark.parametrize(
    ("picture", "wanted"),
    [
        (np.arange(12, dtype=np.uint8).reshape(3, 4), np.arange(12).reshape(3, 4)),
        ([[0.0, 0.5], [1.0, 2.0]], [[0, 128], [255, 255]]),
        (np.array([[np.nan, np.inf, -np.inf, -1.0]], np.float64), [[0, 255, 0, 0]]),
        (
            lambda: jnp.array([[[0.0], [1.0]]], jnp.bfloat16),
            [[0, 255]],
        ),  # made in the test: it starts JAX
        (np.eye(3, dtype=bool), 255 * np.eye(3)),
        (np.full((2, 3, 3), 7, np.uint8)[:, ::-1], np.full((2, 3, 3), 7)),
        (np.full((1, 1, 4), 0.2, np.float16), np.full((1, 1, 4), 51)),
        (np.zeros((3000, 10), np.uint8), np.zeros((1000, 4))),
        (np.arange(8, dtype=np.uint8).reshape(2, 4).T, np.arange(8).reshape(2, 4).T),
    ],
)
def test_picture_round_trip(tmp_path: Path, picture: Any, wanted: Any) -> None:
    kept_by = samples.SampleWriter(str(tmp_path / "reported"), print)
    kept_by.add_items(
        5,
        samples.check_items(
            {"it": picture() if callable(picture) else picture}, "<b>ü</b>", is_kept=True
        ),
    )
    kept_by.flush()
    steps = read_samples(tmp_path / "reported", 5)
    assert steps["image", "it"].tolist() == np.asarray(wanted).tolist()
    assert steps["text", ""] == "<b>ü</b>"


def test_pictures_are_bounded_and_newest_steps_remain(
    tmp_path: Path,
) -> None:
    large = NOISE.integers(0, 256, (1500, 900, 3), np.uint8)
    kept_by = samples.SampleWriter(str(tmp_path), print)
    kept_by.add_items(1, samples.check_items(large, "x" * 99_999, is_kept=True))
    kept_by.flush()
    assert (tmp_path / "1.json").stat().st_size < 4 * samples.MAX_PNG_BYTES / 3 + 20_000
    assert read_samples(tmp_path, 1)["image", ""].shape == (
        375,
        225,
        3,
    )  # each 4th of 1,500, of which the 256 KiB are full
    for step in range(2, 121):
        kept_by.add_items(step, [("text", "", "t")])
        kept_by.flush()
    assert samples.list_steps(tmp_path) == list(range(120, 20, -1))


def test_resumed_run_replaces_later_samples(tmp_path: Path) -> None:
    first = samples.SampleWriter(str(tmp_path), print)
    for step in (10, 20, 30):
        first.add_items(step, [("text", "a", "first")])
        first.flush()
    (tmp_path / "note.txt").write_text("not ours")
    resumed = samples.SampleWriter(str(tmp_path), print)  # resumed from step 15
    resumed.add_items(20, [("text", "a", "again")])
    resumed.flush()
    resumed.add_items(20, [("text", "b", "too"), ("text", "a", "newer")])
    resumed.flush()
    assert samples.list_steps(tmp_path) == [20, 10]
    assert read_samples(tmp_path, 10) == {("text", "a"): "first"}
    assert read_samples(tmp_path, 20) == {("text", "a"): "newer", ("text", "b"): "too"}
    assert sorted(os.listdir(tmp_path)) == ["10.json", "20.json", "note.txt"]


def test_faulty_storage_is_noted_once_without_delay(tmp_path: Path) -> None:
    (tmp_path / "full").write_text("a file where the folder belongs")
    notes: list[str] = []
    full = samples.SampleWriter(str(tmp_path / "full"), notes.append)
    for step in (1, 2):
        full.add_items(step, [("text", "", "t")])
        full.flush()
    assert notes == [
        f"the pictures and texts of step 1 could not be written to {tmp_path}/full: file exists"
    ]

    free = threading.Event()
    stalled = samples.SampleWriter(str(tmp_path / "slow"), lambda note: free.wait(60))
    (tmp_path / "slow").write_text("")  # the note about it does not return
    for step in range(1000):
        stalled.add_items(step, [("text", "", "t")])
    assert len(stalled._waiting) == samples.MAX_WAITING
    free.set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image": np.zeros((2, 2, 2))}, "report(image=…): an array [H, W] or [H, W, C]"),
        ({"image": np.zeros(4)}, "this one is [4]"),
        ({"image": np.zeros((0, 4))}, "this one is [0, 4]"),
        ({"image": {"it": np.zeros((4, 4), np.int32)}}, "report(image={'it': …}): an array"),
        ({"image": "cat.png"}, "this one is []"),
        (
            {"image": {str(at): np.zeros((2, 2)) for at in range(9)}},
            "there are 9 items, and one step may have at most 8",
        ),
        ({"image": {1: np.zeros((2, 2))}}, "report(image=…): names must be text, not int"),
        ({"text": b"bytes"}, "report(text=…): a text, not bytes"),
    ],
)
def test_invalid_samples_are_refused_outside_jobs(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        jaxlaunch.report(**arguments)
    assert message in str(caught.value)
