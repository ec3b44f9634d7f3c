"""A ConvNeXt against transformers', from its safetensors through `init_from` and back."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxlaunch.trainer.huggingface import save
from tests.trainer.models.resnets import batch, folder, step, tensors

pytestmark = pytest.mark.extended

CASE = "convnext_tiny"


def test_logits_gradients_and_export_equal_transformers(tmp_path: Path) -> None:
    trained = step(CASE, folder(CASE, tmp_path / "hf"), model={"kind": "convnext"})
    inputs = tensors(CASE, "io")
    state, rows = trained.init_state(), batch(CASE)

    def loss(params: Any) -> Any:
        model: Any = trained.loss.evaluation_model(params, state.buffers)
        logits_BV = model(rows["image"])
        return -jax.nn.log_softmax(logits_BV)[np.arange(8), rows["label"]].mean(), logits_BV

    with trained.builder.trace_context():
        (actual, logits_BV), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(state.params)
    np.testing.assert_allclose(logits_BV, inputs["eval_logits"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(actual, inputs["loss"][0], rtol=0, atol=5e-6)
    grad_case = ("grads", grads, tensors(CASE, "grads"))
    for name, arrays, expected in (grad_case, ("same", state.params, None)):
        save.save_model(str(tmp_path / name), trained._spec.model, arrays)  # type: ignore[arg-type]
        written = load_file(tmp_path / name / "model.safetensors")
        expected = expected or tensors(CASE, "weights")
        assert written.keys() == expected.keys()
        for item, array in expected.items():
            limit = 1e-5 * np.abs(array).max() + 1e-7 if name == "grads" else 0.0
            np.testing.assert_allclose(written[item], array, rtol=0, atol=limit, err_msg=item)
