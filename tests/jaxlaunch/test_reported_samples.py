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
def waits_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the thread may get no turn within the moment that a process waits at its end."""
    monkeypatch.setattr(samples, "EXIT_WAIT_S", 60.0)


def kept(folder: Path, step: int) -> dict[tuple[str, str], Any]:
    """What is kept of a step, pictures as Pillow reads them."""
    row = json.loads((folder / f"{step}.json").read_text())
    assert row["step"] == step
    found = {}
    for each in row["samples"]:
        kind = "image" if "image" in each else "text"
        value = each[kind]
        if kind == "image":
            value = np.asarray(
                Image.open(io.BytesIO(base64.b64decode(value.partition("base64,")[2])))
            )
        found[kind, each["name"]] = value
    return found


@pytest.mark.parametrize(
    ("given", "wanted"),
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
def test_a_picture_is_read_back_as_it_was_given(tmp_path: Path, given: Any, wanted: Any) -> None:
    kept_by = samples.SampleWriter(str(tmp_path / "reported"), print)
    kept_by.add_items(
        5,
        samples.check_items(
            {"it": given() if callable(given) else given}, "<b>ü</b>", is_kept=True
        ),
    )
    kept_by.flush()
    found = kept(tmp_path / "reported", 5)
    assert found["image", "it"].tolist() == np.asarray(wanted).tolist()
    assert found["text", ""] == "<b>ü</b>"


def test_a_picture_is_never_larger_than_its_bound_and_the_newest_steps_are_kept(
    tmp_path: Path,
) -> None:
    large = NOISE.integers(0, 256, (1500, 900, 3), np.uint8)
    kept_by = samples.SampleWriter(str(tmp_path), print)
    kept_by.add_items(1, samples.check_items(large, "x" * 99_999, is_kept=True))
    kept_by.flush()
    assert (tmp_path / "1.json").stat().st_size < 4 * samples.MAX_PNG_BYTES / 3 + 20_000
    assert kept(tmp_path, 1)["image", ""].shape == (
        375,
        225,
        3,
    )  # each 4th of 1,500, of which the 256 KiB are full
    for step in range(2, 121):
        kept_by.add_items(step, [("text", "", "t")])
        kept_by.flush()
    assert samples.list_steps(tmp_path) == list(range(120, 20, -1))


def test_a_run_that_goes_back_makes_its_steps_again_and_none_twice(tmp_path: Path) -> None:
    first = samples.SampleWriter(str(tmp_path), print)
    for step in (10, 20, 30):
        first.add_items(step, [("text", "a", "first")])
        first.flush()
    (tmp_path / "note.txt").write_text("not ours")
    again = samples.SampleWriter(str(tmp_path), print)  # resumed from step 15
    again.add_items(20, [("text", "a", "again")])
    again.flush()
    again.add_items(20, [("text", "b", "too"), ("text", "a", "newer")])
    again.flush()
    assert samples.list_steps(tmp_path) == [20, 10]
    assert kept(tmp_path, 10) == {("text", "a"): "first"}
    assert kept(tmp_path, 20) == {("text", "a"): "newer", ("text", "b"): "too"}
    assert sorted(os.listdir(tmp_path)) == ["10.json", "20.json", "note.txt"]


def test_storage_that_fails_or_stalls_is_said_once_and_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "full").write_text("a file where the folder belongs")
    notes: list[str] = []
    full = samples.SampleWriter(str(tmp_path / "full"), notes.append)
    for step in (1, 2):
        full.add_items(step, [("text", "", "t")])
        full.flush()
    assert notes == [
        f"what the program reported at step 1 is not kept in {tmp_path}/full: file exists"
    ]

    free = threading.Event()
    stalled = samples.SampleWriter(str(tmp_path / "slow"), lambda said: free.wait(60))
    (tmp_path / "slow").write_text("")  # the note about it does not return
    for step in range(1000):
        stalled.add_items(step, [("text", "", "t")])
    assert len(stalled._waiting) == samples.MAX_WAITING
    free.set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"image": np.zeros((2, 2, 2))}, "report(image=…): an array [H, W] or [H, W, C]"),
        ({"image": np.zeros(4)}, "this one is [4]"),
        ({"image": np.zeros((0, 4))}, "this one is [0, 4]"),
        ({"image": {"it": np.zeros((4, 4), np.int32)}}, "report(image={'it': …}): an array"),
        ({"image": "cat.png"}, "this one is []"),
        (
            {"image": {str(at): np.zeros((2, 2)) for at in range(9)}},
            "9 of them, and one step shows at most 8",
        ),
        ({"image": {1: np.zeros((2, 2))}}, "report(image=…): a name is text, not int"),
        ({"text": b"bytes"}, "report(text=…): a text, not bytes"),
    ],
)
def test_what_is_no_picture_is_refused_outside_a_job_too(
    arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        jaxlaunch.report(**arguments)
    assert said in str(caught.value)
