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
from jaxlaunch.trainer.huggingface.load import TensorFiles
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
    said: dict[str, np.ndarray]
    state: TrainState
    checkpoints: str


@pytest.fixture(scope="module", params=CASES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    case, at = request.param, tmp_path_factory.mktemp(request.param)
    train = folders.train_spec(case, at)
    step = folders.step(case, at)
    _, first = folders.run(step, case, 1)
    said, state = folders.run(step, case)
    folder = str(at / "checkpoints")
    save(step, train, state, folder)
    return Trained(case, at, train, step, first, said, state, folder)


def save(step: Step, train: TrainSpec, state: TrainState, folder: str) -> None:
    store = Store(folder, keep=1, uid="mine")
    store.claim()
    store.save(20, step.builder.to_tree(state), folders.meta(step, train))
    store.close()


def theirs(of: Trained, params: dict[str, Any], to: Path) -> dict[str, np.ndarray]:
    """Arrays in the places of adapters, by peft's names."""
    assert of.spec.lora is not None
    peft.write_adapters(str(to), of.spec.model, of.spec.lora, params)  # type: ignore[arg-type]
    return load_file(to / "adapter_model.safetensors")


def test_the_curve_and_the_final_adapters_equal_peft_s(trained: Trained, tmp_path: Path) -> None:
    curve = references.tensors(trained.case, "curve")
    np.testing.assert_allclose(trained.said["loss"], curve["loss"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(trained.said["grad_norm"], curve["grad_norm"], rtol=2e-5)
    export(trained.checkpoints, str(tmp_path / "out"))
    final = load_file(tmp_path / "out" / "adapter_model.safetensors")
    wanted = references.tensors(trained.case, "final")
    assert final.keys() == wanted.keys()
    for name, array in wanted.items():
        assert_close(final[name], array, is_rounding(trained.case, name), name)


def assert_close(
    found: np.ndarray, wanted: np.ndarray, rounding: np.ndarray | bool, name: str
) -> None:
    """To 1e-5, and to a tenth of the rate where `rounding` decides."""
    assert np.all(np.abs(found - wanted) <= np.where(rounding, 1e-3, 1e-5)), name


def is_rounding(case: str, name: str) -> np.ndarray:
    """Where an adapter's first gradient is below what it may differ by: there Adam's first update, the rate times the
    gradient's sign, is one of rounding, and all that follows depends on the processor."""
    grad = np.abs(references.tensors(case, "grads")[name])
    found: np.ndarray = grad <= GRADIENT * grad.max() + 1e-7
    assert found.mean() < 0.01, name
    return found


def test_every_gradient_of_the_first_step_equals_peft_s(trained: Trained, tmp_path: Path) -> None:
    """Adam's first moment after one step is a tenth of the clipped gradient."""
    norm, clip = trained.said["grad_norm"][0], folders.config(trained.case)["clip"]
    factor = 0.1 * min(1.0, (clip or np.inf) / norm)
    opt = trained.step.builder.to_tree(trained.first)["opt"]
    moments = {
        name.partition(".mu.")[2]: np.asarray(leaf) / factor
        for name, leaf in opt.items()
        if ".mu." in name
    }
    found = theirs(
        trained,
        {name: leaf.astype(np.float32) for name, leaf in moments.items()},
        tmp_path / "grads",
    )
    wanted = references.tensors(trained.case, "grads")
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        np.testing.assert_allclose(
            found[name], grad, rtol=0, atol=GRADIENT * np.abs(grad).max() + 1e-7, err_msg=name
        )


def test_merged_weights_equal_peft_s_and_start_a_run(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[TensorFiles] = []
    monkeypatch.setattr(
        frozen_base, "TensorFiles", lambda folder: files.append(TensorFiles(folder)) or files[-1]
    )
    exported = export(trained.checkpoints, str(tmp_path / "merged"), merged=True)
    assert not files[0]._open  # what is open stays mapped, up to the whole base
    assert exported["architecture"] in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    original = {
        k: v for at in (trained.at / "hf").glob("*.safetensors") for k, v in load_file(at).items()
    }
    wanted = references.tensors(trained.case, "merged")
    assert found.keys() == original.keys()
    for name, array in found.items():
        if name in wanted:
            rounding: np.ndarray | bool = False  # of a bias
            if name.endswith(".weight"):
                of = f"base_model.model.{name.removesuffix('.weight')}"
                columns = is_rounding(trained.case, f"{of}.lora_A.weight").any(
                    axis=0, keepdims=True
                )
                rounding = columns | is_rounding(trained.case, f"{of}.lora_B.weight").any(
                    axis=1, keepdims=True
                )
            assert_close(array, wanted[name], rounding, name)
        else:
            assert np.array_equal(array, original[name]), name
    start = references.step(folders.BASES[trained.case], tmp_path / "merged").init_state().params
    loaded = load_text_model(str(trained.checkpoints), mesh=one_device()).params
    assert loaded.keys() == start.keys()
    assert all(np.array_equal(loaded[name], start[name]) for name in start)


def test_adapters_alone_are_trained_and_saved(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    state, tree = trained.state, trained.step.builder.to_tree(trained.state)
    before = trained.step.init_state().params
    changed = {
        name for name, leaf in state.params.items() if not np.array_equal(leaf, before[name])
    }
    assert changed == set(tree["params"]) == set(trained.step.builder.trained_params(state.params))
    assert all(name.endswith((".lora_a", ".lora_b")) for name in changed)
    count = {True: 0, False: 0}
    for name, leaf in state.params.items():
        count[name in changed] += leaf.size
    share = count[True] / (count[True] + count[False])
    assert share <= 0.05
    assert memory.total_bytes(state.opt) == 8 * count[True] + 8  # two moments, and counts of steps
    assert memory.total_bytes(tree) == 12 * count[True] + 12
    note = trained.step.notes[-1]
    print(note)
    assert (
        f"{count[True]:,} of {sum(count.values()):,} parameters are trained ({share:.2%})" in note
    )


def test_a_checkpoint_and_its_base_are_the_state_again(trained: Trained) -> None:
    store = Store(trained.checkpoints, keep=1, uid="mine")
    store.claim()
    found = store.restore(trained.step.builder.to_tree(trained.step.abstract))
    store.close()
    assert found is not None
    again = trained.step.builder.from_tree(found[1])
    assert jax.tree.structure(again) == jax.tree.structure(trained.state)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(trained.state)))


def test_a_folder_of_peft_is_written_as_it_was_read(trained: Trained, tmp_path: Path) -> None:
    save(trained.step, trained.spec, trained.step.init_state(), str(tmp_path / "in"))
    export(str(tmp_path / "in"), str(tmp_path / "out"))
    found, wanted = (
        load_file(at / "adapter_model.safetensors")
        for at in (tmp_path / "out", trained.at / "peft")
    )
    assert found.keys() == wanted.keys()
    assert all(
        found[name].dtype == wanted[name].dtype and np.array_equal(found[name], wanted[name])
        for name in wanted
    )
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    given = folders.config(trained.case)["adapter_config"]
    assert config.keys() - given.keys() == {"base_model_name_or_path"}
    differing = {key for key in config.keys() & given.keys() if config[key] != given[key]}
    assert differing == {"inference_mode"}  # peft, too, writes true
    assert config["base_model_name_or_path"] == str(trained.at / "hf")


def test_adapters_are_not_merged_into_another_model(trained: Trained, tmp_path: Path) -> None:
    other, file = tmp_path / "other", "model.safetensors.index.json"
    other.mkdir()
    for path in (trained.at / "hf").iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".safetensors":
            data[-3] ^= 1  # one bit of one number
        (other / path.name).write_bytes(data)
    assert (other / file).exists()
    train = trained.spec.model_copy(
        update={"model": trained.spec.model.model_copy(update={"init_from": str(other)})}
    )
    store = Store(str(tmp_path / "in"), keep=1, uid="mine")
    store.claim()
    store.save(20, trained.step.builder.to_tree(trained.state), folders.meta(trained.step, train))
    store.close()
    with pytest.raises(
        CheckpointError,
        match=r"step 20 of .*/in holds adapters of the weights of .*/hf with digest",
    ):
        export(str(tmp_path / "in"), str(tmp_path / "out"), merged=True)
    for path in other.iterdir():
        path.unlink()
    other.rmdir()
    with pytest.raises(
        SpecError, match=r"weights of .*/hf, and .*/other is not a folder here: .* as --base"
    ):
        export(str(tmp_path / "in"), str(tmp_path / "out"), merged=True)
    assert not (tmp_path / "out").exists()
    assert export(
        str(tmp_path / "in"), str(tmp_path / "out"), merged=True, base=str(trained.at / "hf")
    )["files"]
    with pytest.raises(SpecError, match=r"--base x is of --merged"):
        export(str(tmp_path / "in"), str(tmp_path / "adapters"), base="x")


def test_a_whole_model_has_nothing_to_merge(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "in"), keep=1, uid="mine")
    store.claim()
    store.save(
        1, {"params": {"head": np.ones(3, np.float32)}}, {"model": {"kind": "gpt2"}, "lora": None}
    )
    store.close()
    with pytest.raises(SpecError, match="step 1 holds a whole model, no adapters to be merged"):
        export(str(tmp_path / "in"), str(tmp_path / "out"), merged=True)
