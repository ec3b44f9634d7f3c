import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from safetensors.numpy import save as save_one

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import save
from jaxlaunch.trainer.huggingface.tensor_files import INDEX_FILE, TensorFiles
from tests import bucket_server
from tests.trainer import peaks, references
from tests.trainer.references import folder, step, tensors, train_spec

FAMILY_NAMES = "llama llama3 gpt2 vit qwen2 gemma3 olmo2 mixtral qwen3_moe"
CASES = [f"{name}_tiny" for name in FAMILY_NAMES.split()]


def have_equal_arrays(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and np.array_equal(first[name], second[name])
        for name in first
    )


def read_parameters(path: Path) -> dict[str, np.ndarray]:
    params: dict[str, np.ndarray] = {}
    for file in path.glob("*.safetensors"):
        params |= load_file(file)
    return params


@pytest.mark.parametrize("case", CASES)
def test_weights_round_trip_bit_by_bit(case: str, tmp_path: Path) -> None:
    params = step(case, folder(case, tmp_path / "in")).init_state().params
    save.save_model(str(tmp_path / "out"), train_spec(case, None).model, params)
    assert have_equal_arrays(read_parameters(tmp_path / "out"), tensors(case, "weights"))
    assert have_equal_arrays(step(case, tmp_path / "out").init_state().params, params)


@pytest.mark.parametrize("case", [case for case in CASES if case != "gemma3_tiny"])
def test_devices_read_only_their_parts(case: str, tmp_path: Path) -> None:
    model = {} if case == "vit_tiny" else {"vocab": 96}  # the fixtures' 97 do not split over mp
    params = step(case, None, model=model).init_state().params
    save.save_model(str(tmp_path), train_spec(case, None, model=model).model, params)
    has_experts = getattr(train_spec(case, None).model, "experts", None)
    axes = {"ep" if has_experts else "dp": 2, "fsdp": 2, "mp": 2}
    split = step(case, tmp_path, 8, model=model, mesh=axes, batch=8).init_state().params
    assert have_equal_arrays(split, params)
    for name, leaf in split.items():
        if name.endswith((".qkv", ".query", ".out", ".up", ".down")):
            assert leaf.addressable_shards[0].data.size * 4 <= leaf.size, name


@pytest.mark.parametrize("case", ["llama_tiny", "vit_tiny"])
def test_bfloat16_files_round_trip(case: str, tmp_path: Path) -> None:
    rounded = {name: array.astype(jnp.bfloat16) for name, array in tensors(case, "weights").items()}
    source = _copy_fixture(case, tmp_path / "in", rounded)
    precision = {"params": "bfloat16", "compute": "bfloat16"}
    params = step(case, source, precision=precision).init_state().params
    save.save_model(str(tmp_path / "out"), train_spec(case, None).model, params)
    assert have_equal_arrays(read_parameters(tmp_path / "out"), rounded)
    wide = {name: param.astype(jnp.float32) for name, param in params.items()}
    assert have_equal_arrays(step(case, source).init_state().params, wide)


STEP = """
import json
import jax
from jaxlaunch.trainer import spec
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.tasks.lm import NextToken
model = spec.GPT2(**json.loads(sys.argv[1]) | {"init_from": sys.argv[2]})
train = spec.TrainSpec(task="tests:Tiny", model=model, optimizer={"name": "sgd"})  # without a state
step = Step(NextToken(), train, mesh.build_mesh(train.mesh, jax.devices()), 1)
"""


def test_loading_never_holds_two_copies(tmp_path: Path) -> None:
    params = peaks.large()
    save.save_model(str(tmp_path / "hf"), peaks.LARGE, params)
    arguments = peaks.LARGE.model_dump_json(), str(tmp_path / "hf")
    peak = peaks.growth(STEP, "state = step.init_state()", *arguments)
    # The measured peak, with the state, was 1.7 times the size.
    assert peak < 2 * sum(array.nbytes for array in params.values())


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_bucket_weights_are_read_as_ranges(scheme: str, tmp_path: Path) -> None:
    local = folder("qwen2_tiny", tmp_path / "hf")
    with bucket_server.serve_bucket() as bucket:
        for path in local.iterdir():
            bucket.objects[f"weights/qwen/{path.name}"] = path.read_bytes()
        url: Any = f"{scheme}://weights/qwen"
        params = step("qwen2_tiny", url).init_state().params
        assert have_equal_arrays(params, step("qwen2_tiny", local).init_state().params)
        gets = [(path, ranges) for method, path, ranges in bucket.requests if method == "GET"]
        reads = [path for path, ranges in gets if "safetensors" in path and ranges]
        assert len(reads) > len(params)  # the header, and each tensor by itself
        with pytest.raises(SpecError, match=r"config\.json cannot be read"):
            step("qwen2_tiny", url + "-not")


def test_moving_average_starts_from_the_loaded_weights(tmp_path: Path) -> None:
    source = folder("vit_tiny", tmp_path / "hf")
    state = step("vit_tiny", source, optimizer={"ema": 0.9}).init_state()
    assert state.ema is not None and have_equal_arrays(state.ema, state.params)


def test_files_without_a_head_have_no_prefix(tmp_path: Path) -> None:
    weights = tensors("gpt2_tiny", "weights").items()
    short = {name.removeprefix("transformer."): array for name, array in weights}
    # The oldest files hold a causal mask.
    short["h.0.attn.bias"] = np.ones((1, 1, 64, 64), np.float32)
    sources = (
        _copy_fixture("gpt2_tiny", tmp_path / "short", short),
        folder("gpt2_tiny", tmp_path / "long"),
    )
    assert have_equal_arrays(*(step("gpt2_tiny", path).init_state().params for path in sources))


@pytest.mark.parametrize(
    ("case", "model", "message"),
    [
        ("llama_tiny", {"heads": 8}, "num_attention_heads is 4, train.model.heads makes it 8"),
        (
            "llama_tiny",
            {"tied": True},
            "tie_word_embeddings is False, train.model.tied makes it True",
        ),
        (
            "llama_tiny",
            {"norm_eps": 1e-06},
            "rms_norm_eps is 1e-05, train.model.norm_eps makes it 1e-06",
        ),
        (
            "llama_tiny",
            {"rope_theta": 500000.0},
            "rope_theta is 10000.0, train.model.rope_theta makes it 500000.0",
        ),
        ("llama3_tiny", {"rope_scaling": None}, "train.model.rope_scaling makes it None"),
        ("gpt2_tiny", {"hidden": 128}, "n_inner is 256, train.model.hidden makes it 128"),
        ("vit_tiny", {"layers": 3}, "num_hidden_layers is 2, train.model.layers makes it 3"),
        ("vit_tiny", {"classes": 5}, "classifier.weight is [10, 64], train.model makes it [5, 64]"),
        (
            "vit_tiny",
            {"pool": "mean"},
            "train.model.pool = mean: Hugging Face's ViT knows only cls",
        ),
        (
            "qwen2_tiny",
            {"kind": "gpt2"},
            "it holds a model of the kind decoder, train.model.kind is gpt2",
        ),
        ("qwen2_tiny", {"biases": []}, "biases is ['qkv'], train.model.biases makes it []"),
        ("qwen3_tiny", {"head_size": 16}, "head_dim is 24, train.model.head_size makes it 16"),
        ("qwen3_tiny", {"family": "qwen2"}, "model_type is qwen3, train.model.family is qwen2"),
        ("mistral_tiny", {"window": 8}, "sliding_window is 16, train.model.window makes it 8"),
        ("gemma2_tiny", {"norms": "before"}, "norms is both, train.model.norms makes it before"),
        (
            "gemma2_tiny",
            {"score_cap": None},
            "attn_logit_softcapping is 50.0, train.model.score_cap makes it None",
        ),
        (
            "gemma3_tiny",
            {"rope_local_theta": 5.0},
            "rope_local_base_freq is 10000.0, train.model.rope_local_theta",
        ),
        ("mixtral_tiny", {"experts": 8}, "num_local_experts is 4, train.model.experts makes it 8"),
        (
            "mixtral_tiny",
            {"experts_per_token": 1},
            "num_experts_per_tok is 2, train.model.experts_per_token makes it 1",
        ),
        (
            "qwen3_moe_tiny",
            {"dense_layers": [1]},
            "mlp_only_layers is [], train.model.dense_layers makes it [1]",
        ),
        (
            "olmo2_tiny",
            {"preset": "olmo2-1b"},
            "hidden_size is 64, train.model.width makes it 2048",
        ),
    ],
)
def test_model_that_differs_from_the_folder_is_rejected(
    case: str, model: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as error:
        step(case, folder(case, tmp_path / "hf"), model=model).init_state()
    assert message in str(error.value)


def test_missing_and_unused_tensors_are_named(tmp_path: Path) -> None:
    changed = dict(tensors("llama_tiny", "weights"))
    array = changed.pop("model.layers.1.mlp.up_proj.weight")
    changed["model.layers.0.self_attn.q_proj.bias"] = array
    with pytest.raises(
        SpecError, match="1.mlp.up_proj.weight is missing; .*q_proj.bias is not used"
    ):
        step("llama_tiny", _copy_fixture("llama_tiny", tmp_path / "hf", changed)).init_state()


def test_stored_copy_of_a_tied_head_is_ignored(tmp_path: Path) -> None:
    twice = dict(tensors("llama3_tiny", "weights"))  # as Qwen3-0.6B is published
    twice["lm_head.weight"] = twice["model.embed_tokens.weight"]
    source = _copy_fixture("llama3_tiny", tmp_path / "hf", twice)
    assert "head" not in step("llama3_tiny", source).init_state().params


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            save_one({"a": np.ones((8, 4), np.float32)})[:-1],
            "x.safetensors is cut off or damaged: it has",
        ),
        (
            save_one({"a": np.ones((8, 4), np.float32)})[:20],
            "x.safetensors is not a safetensors file: its 20 bytes",
        ),
        (b"<html>no tensors</html>", "is not a safetensors file"),
        (b"\x02" + bytes(7) + b"[]", "is not a safetensors file"),
        (b"", "is not a safetensors file: its 0 bytes"),
        (save_one({"a": np.ones(8, np.float32)}) + bytes(8), "cut off or damaged: it has"),
        # Two tensors of one name: the bytes of the first belong to none.
        (
            save_one({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}).replace(
                b'"b"', b'"a"'
            ),
            "is not a safetensors file",
        ),
    ],
    ids=[
        "no last byte",
        "half a header",
        "text",
        "a list",
        "empty",
        "more bytes",
        "one name twice",
    ],
)
def test_damaged_file_in_a_bucket_is_reported(content: bytes, message: str) -> None:
    with bucket_server.serve_bucket() as bucket:
        bucket.objects["weights/broken/x.safetensors"] = content
        bucket.objects[f"weights/broken/{INDEX_FILE}"] = b'{"weight_map": {"a": "x.safetensors"}}'
        with pytest.raises(SpecError, match=message):
            TensorFiles("gs://weights/broken")


def test_missing_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="config.json cannot be read"):
        step("llama_tiny", tmp_path / "nowhere").init_state()
    (tmp_path / "config.json").write_text(json.dumps(references.config("llama_tiny")))
    with pytest.raises(SpecError, match="is not a folder of weights"):
        step("llama_tiny", tmp_path).init_state()
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(SpecError, match="cannot be read"):
        step("llama_tiny", tmp_path).init_state()


def _copy_fixture(case: str, target: Path, content: dict[str, np.ndarray]) -> Path:
    """The case's folder with these tensors in it, in one file without an index."""
    target.mkdir()
    (target / "config.json").write_text(json.dumps(references.config(case)))
    save_file(content, target / "model.safetensors")
    return target
