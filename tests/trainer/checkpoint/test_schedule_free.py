"""What schedule-free evaluates, and the step that evaluated best, read from storage."""

from pathlib import Path

import numpy as np
import pytest

from jaxlaunch.trainer.checkpoint import reader
from jaxlaunch.trainer.checkpoint.reader import average_parameters
from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.errors import CheckpointError
from tests.trainer.tiny import Digits, compiled_step


def test_average_and_best_step_are_read(tmp_path: Path) -> None:
    task, groups = Digits(), [{"match": "head.*", "lr": 0.5}, {"match": ".*bias", "freeze": True}]
    step = compiled_step(task, optimizer={"name": "schedule-free", "groups": groups})
    state, store = step.init_state(), Store(str(tmp_path), keep=1, uid="a")
    store.claim()
    expected, values = {}, []
    for number, value in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)):
        state, _ = step.train(state, step.put_batch(task.batch(number)))
        values.append((number, value))
        best = [list(pair) for pair in sorted(values, key=lambda pair: pair[1])][:2]
        store.save(
            number,
            step.builder.to_tree(state),
            {"best": {"steps": best}},
            [pair[0] for pair in best],
        )
        store.wait()
        expected[number] = {name: np.array(leaf) for name, leaf in state.evaluated_params().items()}
    store.close()
    assert reader.manifest.committed_steps(store._folder.path) == [2, 3, 4]  # type: ignore[attr-defined]
    for named, number in ((None, 4), ("best", 2)):
        result = reader.find_step(str(tmp_path), named)
        assert result.step == number
        read = average_parameters(result.part_arrays("params"), result.part_arrays("opt"))
        for name, leaf in expected[number].items():
            np.testing.assert_allclose(read[name][...], leaf, rtol=1e-6, atol=1e-7, err_msg=name)
        assert not np.array_equal(
            read["layers.0.kernel"][...], result.part_arrays("params")["layers.0.kernel"][...]
        )
        np.testing.assert_array_equal(
            read["layers.0.bias"][...], result.part_arrays("params")["layers.0.bias"][...]
        )


def test_training_without_watched_metric_has_no_best_step(tmp_path: Path) -> None:
    store = Store(str(tmp_path), keep=1, uid="a")
    store.claim()
    store.save(1, {"params": {"w": np.ones(2, np.float32)}}, {})
    store.close()
    with pytest.raises(
        CheckpointError, match="records no best step: its training had no train.checkpoint.best"
    ):
        reader.find_step(str(tmp_path), "best")


def test_deleted_best_step_is_reported(tmp_path: Path) -> None:
    store = Store(str(tmp_path), keep=1, uid="a")
    store.claim()
    store.save(3, {"params": {"w": np.ones(2, np.float32)}}, {"best": {"steps": [[2, 1.0]]}})
    store.close()
    with pytest.raises(
        CheckpointError, match="records 2 as best, but holds no such step; name one: it holds 3"
    ):
        reader.find_step(str(tmp_path), "best")
