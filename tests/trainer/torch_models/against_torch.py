"""Compares trainings of tiny models of transformers with torch: python against_torch.py FOLDER.

It runs with the packages of the environment torchax. Each case prints a JSON line of its name and
its largest differences, as shares of the largest value.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import peft
import safetensors.torch
import torch
import torchax
import transformers
from safetensors.numpy import load_file
from torchax import interop
from transformers import masking_utils

from benchmarks import weights_memory
from jaxlaunch.trainer.adapters.peft import resolve_lora
from jaxlaunch.trainer.generate.text_model import load_text_model
from jaxlaunch.trainer.huggingface.folder import resolve_spec
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.tasks import losses
from jaxlaunch.trainer.tasks.dpo import Preference
from jaxlaunch.trainer.tasks.lm import NextToken
from jaxlaunch.trainer.torch_models import adapters, attention, build, export, modules
from tests.trainer.torch_models.scenarios import save_tiny_model

ROWS, LENGTH = 4, 24
# The momentum of this optimizer after one step is the gradient.
SGD = {"name": "sgd", "lr": 1.0, "momentum": 0.9, "clip": None, "schedule": "constant"}
MESH = {"dp": 2, "fsdp": 2, "mp": 2}


def build_step(task: Any, folder: Path, model: Any = None, **keys: Any) -> Step:
    block = {"transformers": str(folder), "length": LENGTH, **(model or {})}
    keys = {"mesh": MESH, "optimizer": SGD, "batch": ROWS, **keys}
    spec = TrainSpec.model_validate({"task": "tests:Task", "model": block, **keys})
    spec = resolve_lora(resolve_spec(spec))
    devices = jax.devices()[: math.prod(keys["mesh"].values())]
    return Step(task, spec, meshes.build_mesh(spec.mesh, devices), 20)


def train_once(step: Step, batch: Mapping[str, np.ndarray]) -> tuple[Any, Any, dict[str, Any]]:
    """Return the state after a step, its metrics, and the gradients by parameter."""
    step.compile_train(batch)
    state, metrics = step.train(step.init_state(), step.put_batch(batch))
    tree = step.builder.to_tree(state)
    gradients = {
        name: np.asarray(tree["opt"][next(key for key in tree["opt"] if key.endswith(f".{name}"))])
        for name in tree["params"]
    }
    return state, metrics, gradients


def difference(result: Any, expected: Any) -> float:
    result, expected = np.asarray(result), np.asarray(expected)
    return float(np.abs(result - expected).max() / max(np.abs(expected).max(), 1e-6))


def largest_difference(results: Mapping[str, Any], module: Any) -> float:
    """Return the largest difference of the gradients of a torch module's parameters."""
    expected = {
        name: parameter.grad.numpy()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    assert results.keys() == expected.keys(), results.keys() ^ expected.keys()
    return max(difference(results[name], gradient) for name, gradient in expected.items())


def load_torch(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def sum_logprobs(module: Any, tokens_RT: Any, mask_RL: Any) -> Any:
    logits_RLV = module(input_ids=tokens_RT[:, :-1], use_cache=False).logits
    logprobs_RLV = torch.log_softmax(logits_RLV, -1)
    return (logprobs_RLV.gather(-1, tokens_RT[:, 1:, None])[..., 0] * mask_RL).sum(-1)


def draw_pairs() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "tokens": draw.integers(1, 120, (ROWS, 2, LENGTH + 1), np.int32),
        "length": np.full((ROWS, 2), LENGTH + 1, np.int32),
        "mask": (draw.random((ROWS, 2, LENGTH)) < 0.6).astype(np.float32),
        "weight": np.ones(ROWS, np.float32),
    }


def compare_dpo(folder: Path) -> dict[str, float]:
    """A model whose weights have buffers, which its reference has, too."""
    model, pairs = folder / "model", draw_pairs()
    save_tiny_model("deepseek_v3", model)
    step = build_step(Preference(), model)
    _, first, gradients = train_once(step, pairs)
    policy, reference = load_torch(model), load_torch(model)
    tokens, mask = torch.tensor(pairs["tokens"]).long(), torch.tensor(pairs["mask"])
    rewards = [
        sum_logprobs(module, tokens.flatten(0, 1), mask.flatten(0, 1)).view(-1, 2)
        for module in (policy, reference)
    ]
    margins = 0.1 * (rewards[0] - rewards[1].detach()).diff(dim=1)[:, 0]
    loss = -torch.nn.functional.logsigmoid(-margins).mean()
    loss.backward()
    return {
        "loss": difference(first["loss"], loss.detach()),
        "gradient": largest_difference(gradients, policy),
    }


ADAPTERS: dict[str, Any] = {
    "rank": 4,
    "alpha": 8.0,
    "targets": ["q", "up", "down_proj"],
    "rank_pattern": {"down_proj": 2},
    "alpha_pattern": {"down_proj": 3.0},
    "modules_to_save": ["lm_head"],
}


def draw_tokens() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "tokens": draw.integers(1, 120, (ROWS, LENGTH + 1), np.int32),
        "mask": np.ones((ROWS, LENGTH), np.float32),
        "weight": np.ones(ROWS, np.float32),
    }


def mean_loss(module: Any, batch: Mapping[str, np.ndarray]) -> Any:
    tokens, mask = torch.tensor(batch["tokens"]).long(), torch.tensor(batch["mask"])
    return -sum_logprobs(module, tokens, mask).sum() / mask.sum()


def compare_adapters(folder: Path, model_type: str = "llama", **keys: Any) -> dict[str, float]:
    """Two steps of adapters, and the folder that is exported after them, against peft."""
    model, batch, lora = folder / "model", draw_tokens(), {**ADAPTERS, **keys}
    save_tiny_model(model_type, model)
    step = build_step(NextToken(), model, lora=lora)
    step.compile_train(batch)
    state = step.init_state()
    first = folder / "first"
    save_adapters(step, state, first)
    wrapper = peft.PeftModel.from_pretrained(load_torch(model), first, is_trainable=True).eval()
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=SGD["lr"], momentum=SGD["momentum"])
    with torch.no_grad(), wrapper.disable_adapter():
        base_loss = mean_loss(wrapper, batch)
    # At the start the adapters change nothing.
    losses = [difference(base_loss, mean_loss(wrapper, batch).detach())]
    for _ in range(2):
        state, metrics = step.train(state, step.put_batch(batch))
        loss = mean_loss(wrapper, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(difference(metrics["loss"], loss.detach()))
    save_adapters(step, state, folder / "second")
    tensors = load_file(folder / "second" / "adapter_model.safetensors")
    # Without the embedding itself, which peft writes next to an adapter of it.
    wrapper.save_pretrained(folder / "peft", save_embedding_layers=False)
    expected = load_file(folder / "peft" / "adapter_model.safetensors")
    assert tensors.keys() == expected.keys(), tensors.keys() ^ expected.keys()
    configs = [read_adapter_config(folder / name) for name in ("second", "peft")]
    again = build_step(NextToken(), model, lora={"init_from": str(folder / "second")})
    read = again.builder.saved_params(again.init_state().params)
    saved = step.builder.saved_params(state.params)
    return {
        "loss": max(losses),
        "trained": max(difference(tensors[name], expected[name]) for name in expected),
        "moved": max(
            difference(tensors[name], before)
            for name, before in load_file(first / "adapter_model.safetensors").items()
        ),
        "keys": sorted(key for key in configs[1] if configs[0].get(key) != configs[1][key]),
        "read": max(difference(read[name], array) for name, array in saved.items()),
        "merged": compare_merged(step, state, wrapper, folder),
    }


def compare_merged(step: Step, state: Any, wrapper: Any, folder: Path) -> float:
    """Return the difference of the logits of the merged folder from those with the adapters."""
    spec, params = step.builder._spec, {**state.params, **state.buffers}
    module = build.empty_module(spec.model)
    merged = adapters.merge_adapters(module, spec.lora, params)
    export.save_model(str(folder / "merged"), spec.model, None, merged, {})
    tokens = torch.tensor(draw_tokens()["tokens"]).long()
    with torch.no_grad():
        logits = [
            model(input_ids=tokens, use_cache=False).logits
            for model in (load_torch(folder / "merged"), wrapper)
        ]
    return difference(*logits)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the keys of adapter_config.json; the order of the targets has no meaning."""
    keys = json.loads((folder / "adapter_config.json").read_text())
    return {**keys, "target_modules": sorted(keys["target_modules"])}


def save_adapters(step: Step, state: Any, target: Path) -> None:
    spec = step.builder._spec
    params = step.builder.saved_params(state.params)
    export.save_model(str(target), spec.model, spec.lora, params, {})


def draw_randomly(folder: Path) -> dict[str, float]:
    """The same seed draws the same weights, and another one others."""
    save_tiny_model("llama", folder / "model")
    weights = [
        build_step(NextToken(), folder / "model", seed=seed, model={"weights": "random"})
        .init_state()
        .params["model.layers.0.self_attn.q_proj.weight"]
        for seed in (7, 7, 8)
    ]
    return {
        "equal": difference(weights[1], weights[0]),
        "other": difference(weights[2], weights[0]),
    }


def compare_chunks(folder: Path, model_type: str) -> dict[str, float]:
    """A loss whose logits are computed in chunks."""
    save_tiny_model(model_type, folder / "model")
    config = folder / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dropout": 0.0}))
    batch, module = draw_tokens(), load_torch(folder / "model")
    step = build_step(NextToken(), folder / "model", loss={"chunks": 4})
    with mock.patch.object(losses, "sum_in_chunks", wraps=losses.sum_in_chunks) as sums:
        _, metrics, gradients = train_once(step, batch)
    loss = mean_loss(module, batch)
    loss.backward()
    return {
        "chunks": sums.call_args.args[5],
        "loss": difference(metrics["loss"], loss.detach()),
        "gradient": largest_difference(gradients, module),
    }


def measure_memory(folder: Path) -> dict[str, float]:
    """Memory while the weights of 200 MiB are read for the devices of this process."""
    weights_memory.write_weights(folder, 200)
    return weights_memory.measure_reading(str(folder), 8)


def find_spans(folder: Path) -> dict[str, Any]:
    """Spans of masks: causal, a window, all keys, and one that depends on the batch."""
    modules.import_libraries()
    segments_BL = interop.torch_view(jax.numpy.zeros((1, LENGTH), int))
    masks: list[tuple[Any, int | None]] = [
        (masking_utils.causal_mask_function, None),
        (masking_utils.sliding_window_causal_mask_function(8), 8),
        (masking_utils.bidirectional_mask_function, None),
        (lambda row, head, query, key: segments_BL[row, query] == segments_BL[row, key], None),
    ]
    with torchax.default_env():
        return {"spans": [attention.find_span(mask, LENGTH, window) for mask, window in masks]}


PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 11]]


def generate_torch(module: Any, prompt: list[int], count: int) -> list[int]:
    ids = [*prompt]
    with torch.no_grad():
        for _ in range(count):
            logits_V = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits_V.argmax()))
    return ids[len(prompt) :]


def compare_generation(folder: Path, model_type: str) -> dict[str, Any]:
    """Likeliest tokens after prompts of two lengths, and the log-probabilities of a row."""
    save_tiny_model(model_type, folder / "model")
    notes: list[str] = []
    model = load_text_model(str(folder / "model"), note=notes.append)
    module = load_torch(folder / "model")
    groups = model.generate(PROMPTS, max_tokens=8)
    beams = model.generate(PROMPTS[:1], max_tokens=4, beams=2, n=2)
    (logprobs,) = model.logprobs([PROMPTS[1]])
    row = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        expected = torch.log_softmax(module(input_ids=row, use_cache=False).logits[0, :-1], -1)
    return {
        "ids": [sample.ids for (sample,) in groups],
        "expected": [generate_torch(module, prompt, 8) for prompt in PROMPTS],
        "logprobs": difference(logprobs, expected.gather(-1, row[0, 1:, None])[:, 0]),
        "beams": len({tuple(sample.ids) for sample in beams[0]}),
        "notes": notes,
    }


def quantize_fp8(tensors: dict[str, Any]) -> dict[str, Any]:
    """Quantize the matrices of the layers in blocks of 32 × 32."""
    quantized = {}
    for name, tensor in tensors.items():
        is_linear = "proj" in name and tensor.ndim == 2 and ".layers." in name
        if not is_linear or any(size % 32 for size in tensor.shape):
            quantized[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = tensor.view(rows // 32, 32, columns // 32, 32)
        factors = blocks.abs().amax((1, 3)) / 448
        values = (blocks / factors[:, None, :, None]).view(rows, columns)
        quantized[name] = values.to(torch.float8_e4m3fn)
        quantized[f"{name}_scale_inv"] = factors
    return quantized


def quantize_mxfp4(tensors: dict[str, Any]) -> dict[str, Any]:
    """Replace the matrices of the experts by random ones in MXFP4."""
    quantized, draw = {}, np.random.default_rng(0)
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            quantized[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = experts, outputs, inputs // 32
        quantized[f"{name}_blocks"] = torch.tensor(draw.integers(0, 256, (*shape, 16), np.uint8))
        quantized[f"{name}_scales"] = torch.tensor(draw.integers(119, 123, shape, np.uint8))
    return quantized


def compare_quantized(
    folder: Path, model_type: str, quantize: Any, method: dict[str, Any]
) -> dict[str, float]:
    """Log-probabilities of a row by a quantized folder."""
    save_tiny_model(model_type, folder / "model")
    model = folder / "quantized"
    model.mkdir()
    tensors = {}
    for path in (folder / "model").glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(path)
    quantized = quantize(tensors)
    safetensors.torch.save_file(quantized, model / "model.safetensors")
    config = json.loads((folder / "model" / "config.json").read_text())
    config["quantization_config"] = method
    (model / "config.json").write_text(json.dumps(config))
    row = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        logits = load_torch(model)(input_ids=row, use_cache=False).logits[0, :-1]
        plain = load_torch(folder / "model")(input_ids=row, use_cache=False).logits[0, :-1]
    (logprobs,) = load_text_model(str(model), note=lambda text: None).logprobs([PROMPTS[1]])
    expected = torch.log_softmax(logits, -1).gather(-1, row[0, 1:, None])[:, 0]
    return {
        "quantized": len(quantized) - len(tensors),
        "logprobs": difference(logprobs, expected),
        "plain": difference(plain, logits),
    }


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "dpo": compare_dpo,
    "lora": compare_adapters,
    # With a cap of the logits and a tied matrix.
    "chunks": functools.partial(compare_chunks, model_type="gemma2"),
    # It calls a part of its base model.
    "chunks_of_part": functools.partial(compare_chunks, model_type="opt"),
    "memory": measure_memory,
    "spans": find_spans,
    "random": draw_randomly,
    "opt": functools.partial(compare_generation, model_type="opt"),
    "mamba": functools.partial(compare_generation, model_type="mamba"),
    # The router's bias is a buffer, and the module to save has layers.
    "buffers": functools.partial(
        compare_adapters,
        model_type="deepseek_v3",
        targets=["o"],
        rank_pattern={},
        alpha_pattern={},
        modules_to_save=["shared_experts"],
    ),
    "dora": functools.partial(compare_adapters, dora=True, rslora=True),
    "embedding": functools.partial(
        compare_adapters,
        targets=["q", "down_proj", "embed_tokens"],
        exclude_modules=["layers.1.self_attn.q_proj"],
    ),
    "fp8": functools.partial(
        compare_quantized,
        model_type="deepseek_v3",
        quantize=quantize_fp8,
        method={"quant_method": "fp8", "weight_block_size": [32, 32], "fmt": "e4m3"},
    ),
    "mxfp4": functools.partial(
        compare_quantized,
        model_type="gpt_oss",
        quantize=quantize_mxfp4,
        method={"quant_method": "mxfp4"},
    ),
    "layers": functools.partial(compare_adapters, layers_to_transform=[1, 3]),
}


def main(folder: Path, names: list[str]) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for name in names or CASES:
        place = folder / name
        place.mkdir()
        print(json.dumps({"case": name, **CASES[name](place)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
