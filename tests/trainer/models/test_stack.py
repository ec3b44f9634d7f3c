"""A stack written out is the scan: the same names, shapes, draws and numbers."""

from typing import Any

import numpy as np
import pytest

from tests.trainer.tiny import DECODER, GPT2, VIT, WIDE, Counting, Pictures, build, run

CASES: dict[str, tuple[Any, Any]] = {
    "decoder": (Counting(), DECODER),
    "decoder with turns": (Counting(), WIDE),
    "gpt2 with dropout": (Counting(), GPT2.model_copy(update={"dropout": 0.1})),
    "vit with paths": (Pictures(), VIT.model_copy(update={"drop_path": 0.5})),
}


@pytest.mark.parametrize("name", CASES)
def test_unrolled_layers_train_like_scanned_layers(name: str) -> None:
    task, model = CASES[name]
    losses, state = run(task, 4, model=model)
    flat_losses, flat = run(task, 4, model=model.model_copy(update={"scan": False}))
    np.testing.assert_allclose(flat_losses, losses, rtol=1e-5)
    assert flat.params.keys() == state.params.keys()
    for name, param in flat.params.items():
        assert param.shape == state.params[name].shape


def test_parameters_are_stacked_with_and_without_scan() -> None:
    step = build(Counting(), model=DECODER.model_copy(update={"scan": False}))
    assert step.abstract.params["blocks.mlp.up"].shape[0] == DECODER.layers
