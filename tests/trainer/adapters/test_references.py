"""Our adapters against peft's, from its folder to its folder: tests/fixtures says how close."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxlaunch.trainer.adapters import frozen_base, peft
from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.errors import CheckpointError, SpecError
from jaxlaunch.trainer.export import export
from jaxlaunch.trainer.generate.text_model import load_text_model
from jaxlaunch.trainer.huggingface.tensor_files import TensorFiles
from jaxlaunch.trainer.numerics import memory
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.step.state import TrainState
from jaxlaunch.trainer.step.train_step import Step
from tests.trainer import references
from tests.trainer.adapters import folders
from tests.trainer.generate.generators import one_device

CASES = tuple(folders.BASES)
GRADIENT = 1e-5  # of its greatest element, and 1e-7: how far a gradient may be from peft's


class Trained(NamedTuple):
    """A case after its 20 steps on one device, saved as a checkpoint."""

    case: str
    at: Path
    spec: TrainSpec
    step: Step
    first: TrainState  # after one step
    metrics: dict[str, np.ndarray]
    state: TrainState
    checkpoints: str


@pytest.fixture(scope="module", params=CASES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    case, root = request.param, tmp_path_factory.mktemp(request.param)
    train = folders.train_spec(case, root)
    step = folders.step(case, root)
    _, first = folders.train(step, case, 1)
    model, state = folders.train(step, case)
    folder = str(root / "checkpoints")
    save(step, train, state, folder)
    return Trained(case, root, train, step, first, model, state, folder)


def save(step: Step, train: TrainSpec, state: TrainState, folder: str) -> None:
    store = Store(folder, keep=1, uid="mine")
    store.claim()
    store.save(20, step.builder.to_tree(state), folders.checkpoint_meta(step, train))
    store.close()


def to_peft_names(
    trained_case: Trained, params: dict[str, Any], target: Path
) -> dict[str, np.ndarray]:
    """Arrays in the places of adapters, by peft's names."""
    assert trained_case.spec.lora is not None
    peft.write_adapters(str(target), trained_case.spec.model, trained_case.spec.lora, params)  # type: ignore[arg-type]
    return load_file(target / "adapter_model.safetensors")


def test_curve_and_final_adapters_equal_peft(trained: Trained, tmp_path: Path) -> None:
    curve = references.tensors(trained.case, "curve")
    np.testing.assert_allclose(trained.metrics["loss"], curve["loss"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(trained.metrics["grad_norm"], curve["grad_norm"], rtol=2e-5)
    export(trained.checkpoints, str(tmp_path / "out"))
    final = load_file(tmp_path / "out" / "adapter_model.safetensors")
    expected = references.tensors(trained.case, "final")
    assert final.keys() == expected.keys()
    for name, array in expected.items():
        assert_close(final[name], array, is_rounding(trained.case, name), name)


def assert_close(actual: np.ndarray, expected: np.ndarray, rounding: Any, name: str) -> None:
    """To 1e-5, and to a tenth of the rate where `rounding` decides."""
    assert np.all(np.abs(actual - expected) <= np.where(rounding, 1e-3, 1e-5)), name


def is_rounding(case: str, name: str) -> np.ndarray:
    """Return where an adapter's first gradient is below its tolerance.

    There the sign of Adam's first update is that of a rounding error, and all later values depend
    on the processor.
    """
    grad = np.abs(references.tensors(case, "grads")[name])
    actual: np.ndarray = grad <= GRADIENT * grad.max() + 1e-7
    assert actual.mean() < 0.01, name
    return actual


def test_first_gradients_equal_peft(trained: Trained, tmp_path: Path) -> None:
    """Adam's first moment after one step is a tenth of the clipped gradient."""
    norm, clip = trained.metrics["grad_norm"][0], folders.config(trained.case)["clip"]
    factor = 0.1 * min(1.0, (clip or np.inf) / norm)
    opt = trained.step.builder.to_tree(trained.first)["opt"]
    moments = {
        name.partition(".mu.")[2]: (np.asarray(leaf) / factor).astype(np.float32)
        for name, leaf in opt.items()
        if ".mu." in name
    }
    actual = to_peft_names(trained, moments, tmp_path / "grads")
    expected = references.tensors(trained.case, "grads")
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        atol = GRADIENT * np.abs(grad).max() + 1e-7
        np.testing.assert_allclose(actual[name], grad, rtol=0, atol=atol, err_msg=name)


def test_merged_weights_equal_peft_and_start_a_run(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[TensorFiles] = []
    monkeypatch.setattr(
        frozen_base, "TensorFiles", lambda folder: files.append(TensorFiles(folder)) or files[-1]
    )
    exported = export(trained.checkpoints, str(tmp_path / "merged"), merged=True)
    assert not files[0]._open  # what is open stays mapped, up to the whole base
    assert exported["architecture"] in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
    actual = load_file(tmp_path / "merged" / "model.safetensors")
    original: dict[str, np.ndarray] = {}
    for path in (trained.at / "hf").glob("*.safetensors"):
        original |= load_file(path)
    expected = references.tensors(trained.case, "merged")
    assert actual.keys() == original.keys()
    for name, array in actual.items():
        if name in expected:
            rounding: np.ndarray | bool = False  # of a bias
            if name.endswith(".weight"):
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                columns = is_rounding(trained.case, f"{stem}.lora_A.weight").any(0, keepdims=True)
                rows = is_rounding(trained.case, f"{stem}.lora_B.weight").any(1, keepdims=True)
                rounding = columns | rows
            assert_close(array, expected[name], rounding, name)
        else:
            assert np.array_equal(array, original[name]), name
    start = references.step(folders.BASES[trained.case], tmp_path / "merged").init_state().params
    loaded = load_text_model(str(trained.checkpoints), mesh=one_device()).params
    assert loaded.keys() == start.keys()
    assert all(np.array_equal(loaded[name], start[name]) for name in start)


def test_only_adapters_are_trained_and_saved(trained: Trained) -> None:
    state, tree = trained.state, trained.step.builder.to_tree(trained.state)
    initial = trained.step.init_state().params
    params = state.params
    changed = {name for name in params if not np.array_equal(params[name], initial[name])}
    assert changed == set(tree["params"]) == set(trained.step.builder.trained_params(state.params))
    assert all(name.endswith((".lora_a", ".lora_b")) for name in changed)
    count = {True: 0, False: 0}
    for name, leaf in state.params.items():
        count[name in changed] += leaf.size
    share = count[True] / (count[True] + count[False])
    assert share <= 0.05
    assert memory.total_bytes(state.opt) == 8 * count[True] + 8  # two moments, and counts of steps
    assert memory.total_bytes(tree) == 12 * count[True] + 12
    note = f"{count[True]:,} of {sum(count.values()):,} parameters are trained ({share:.2%})"
    assert note in trained.step.notes[-1]


def test_checkpoint_and_base_restore_the_state(trained: Trained) -> None:
    store = Store(trained.checkpoints, keep=1, uid="mine")
    store.claim()
    actual = store.restore(trained.step.builder.to_tree(trained.step.abstract))
    store.close()
    assert actual is not None
    repeated = trained.step.builder.from_tree(actual[1])
    assert jax.tree.structure(repeated) == jax.tree.structure(trained.state)
    assert all(map(np.array_equal, jax.tree.leaves(repeated), jax.tree.leaves(trained.state)))


def test_peft_folder_round_trips(trained: Trained, tmp_path: Path) -> None:
    save(trained.step, trained.spec, trained.step.init_state(), str(tmp_path / "in"))
    export(str(tmp_path / "in"), str(tmp_path / "out"))
    actual = load_file(tmp_path / "out" / "adapter_model.safetensors")
    expected = load_file(trained.at / "peft" / "adapter_model.safetensors")
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype and np.array_equal(actual[name], array)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    inputs = folders.config(trained.case)["adapter_config"]
    assert config.keys() - inputs.keys() == {"base_model_name_or_path"}
    differing = {key for key in config.keys() & inputs.keys() if config[key] != inputs[key]}
    assert differing == {"inference_mode"}  # peft, too, writes true
    assert config["base_model_name_or_path"] == str(trained.at / "hf")


def test_adapters_are_not_merged_into_another_base(trained: Trained, tmp_path: Path) -> None:
    second, file = tmp_path / "other", "model.safetensors.index.json"
    second.mkdir()
    for path in (trained.at / "hf").iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".safetensors":
            data[-3] ^= 1  # one bit of one number
        (second / path.name).write_bytes(data)
    assert (second / file).exists()
    model = trained.spec.model.model_copy(update={"init_from": str(second)})
    train = trained.spec.model_copy(update={"model": model})
    store = Store(str(tmp_path / "in"), keep=1, uid="mine")
    store.claim()
    tree = trained.step.builder.to_tree(trained.state)
    store.save(20, tree, folders.checkpoint_meta(trained.step, train))
    store.close()
    with pytest.raises(
        CheckpointError, match="step 20 of .*/in holds adapters of the weights of .*/hf with digest"
    ):
        export(str(tmp_path / "in"), str(tmp_path / "out"), merged=True)
    for path in second.iterdir():
        path.unlink()
    second.rmdir()
    with pytest.raises(
        SpecError, match="weights of .*/hf, and .*/other is not a folder here: .* as --base"
    ):
        export(str(tmp_path / "in"), str(tmp_path / "out"), merged=True)
    assert not (tmp_path / "out").exists()
    base = str(trained.at / "hf")
    assert export(str(tmp_path / "in"), str(tmp_path / "out"), merged=True, base=base)["files"]
    with pytest.raises(SpecError, match=r"--base x needs --merged"):
        export(str(tmp_path / "in"), str(tmp_path / "adapters"), base="x")


def test_model_without_adapters_cannot_be_merged(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "in"), keep=1, uid="mine")
    store.claim()
    tree = {"params": {"head": np.ones(3, np.float32)}}
    store.save(1, tree, {"model": {"kind": "gpt2"}, "lora": None})
    store.close()
    with pytest.raises(SpecError, match="step 1 holds a whole model, no adapters to be merged"):
        export(str(tmp_path / "in"), str(tmp_path / "out"), merged=True)
