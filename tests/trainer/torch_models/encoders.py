"""Compares encoders of transformers with torch: python encoders.py FOLDER FAMILY.

It runs with the packages of the environment torchax and prints a JSON line. A training here is a
loop around the model, without a task.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from flax import nnx

from jaxlaunch.trainer.attention.implementations import Visible
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel.sharding import state_sharding
from jaxlaunch.trainer.spec import Mesh
from jaxlaunch.trainer.torch_models import attention, compare, modules, operators
from jaxlaunch.trainer.torch_models.network import TorchModel
from tests.trainer.torch_models.against_torch import difference
from tests.trainer.torch_models.families import ADAMW, B1, B2, MESHES, STEPS

CLASSES = {"modernbert": "AutoModelForMaskedLM", "dinov2": "AutoModelForImageClassification"}
LAYER_NAMES = ("stage_names", "out_features", "out_indices")
ROWS, LENGTH = 4, 24


def build_reference(family: str) -> Any:
    keys = compare.shrink_config(transformers.AutoConfig.for_model(family).to_dict())
    sizes = {"image_size": 28, "patch_size": 7} if family == "dinov2" else {}
    # The names of the layers follow from their number.
    keys = {name: value for name, value in keys.items() if name not in LAYER_NAMES}
    config = transformers.AutoConfig.for_model(**{**keys, **sizes})
    torch.manual_seed(0)
    module = getattr(transformers, CLASSES[family]).from_config(
        config, attn_implementation=modules.EAGER, dtype=torch.float32
    )
    compare._disturb(module)
    return module.eval()


def draw_batch(module: Any) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """Return the arguments of a module and the labels of its outputs."""
    draw = np.random.default_rng(0)
    if module.main_input_name == "pixel_values":
        images = draw.normal(size=(ROWS, 3, 28, 28)).astype(np.float32)
        return {"pixel_values": images}, draw.integers(0, module.config.num_labels, ROWS)
    tokens = draw.integers(1, 120, (ROWS, LENGTH))
    return {"input_ids": tokens}, draw.integers(1, 120, (ROWS, LENGTH))


def train_torch(module: Any, arguments: Any, labels: Any) -> tuple[Any, Any, Any]:
    """Return the logits, the first gradients and the final parameters."""
    tensors = {name: torch.tensor(value) for name, value in arguments.items()}
    optimizer = torch.optim.AdamW(module.parameters(), betas=(B1, B2), **ADAMW)
    first: Any = None
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = module(**tensors).logits
        targets = torch.tensor(labels).flatten()
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets)
        loss.backward()
        trained = {name: p for name, p in module.named_parameters() if p.grad is not None}
        gradients = {name: p.grad.numpy().copy() for name, p in trained.items()}
        first = first or (logits.detach().numpy(), gradients)
        optimizer.step()
    return *first, {name: param.detach().numpy() for name, param in trained.items()}


def train_jax(reference: Any, mesh_keys: Any, arguments: Any, labels: Any) -> tuple[Any, Any, Any]:
    """Return the same of the module as a JAX function on a mesh."""
    mesh_spec = Mesh(**mesh_keys)
    count = int(np.prod([*mesh_keys.values()]))
    mesh = meshes.build_mesh(mesh_spec, jax.devices()[:count])
    auto_class = CLASSES[reference.config.model_type]
    module = modules.build_module(reference.config, attention.NAME, auto_class)
    weights = reference.state_dict()
    with jax.set_mesh(mesh):
        model = TorchModel(module, nnx.Rngs(0), ModelOptions())
        model.deterministic = True
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        flat = dict(nnx.to_flat_state(params))
        arrays = {}
        for path, variable in flat.items():
            name, axes = ".".join(map(str, path)), variable.get_metadata().get("axes")
            sharding = state_sharding(name, variable.shape, axes, mesh)
            arrays[path] = jax.device_put(jnp.asarray(weights[name].numpy()), sharding)

        def compute_loss(arrays: Any, batch: Any) -> tuple[Any, Any]:
            values = [(path, flat[path].replace(array)) for path, array in arrays.items()]
            merged = nnx.merge(graph, nnx.from_flat_state(values), rest, copy=True)
            logits = merged.call(Visible(), {**batch[0], "return_dict": False})[0]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
            return losses.mean(), logits

        rates = {"eps": ADAMW["eps"], "weight_decay": ADAMW["weight_decay"]}
        optimizer = optax.adamw(ADAMW["lr"], b1=B1, b2=B2, **rates)

        @jax.jit
        def train_step(arrays: Any, state: Any, batch: Any) -> Any:
            evaluate = jax.value_and_grad(compute_loss, has_aux=True)
            (_, logits), gradients = evaluate(arrays, batch)
            updates, state = optimizer.update(gradients, state, arrays)
            return optax.apply_updates(arrays, updates), state, logits, gradients

        batch = jax.device_put((arguments, labels), meshes.batch_sharding(mesh))
        state, first = optimizer.init(arrays), None
        for _ in range(STEPS):
            arrays, state, logits, gradients = train_step(arrays, state, batch)
            first = first or (np.asarray(logits), _name(gradients))
    return *first, _name(arrays)


def _name(tree: Any) -> dict[str, Any]:
    return {".".join(map(str, path)): np.asarray(value) for path, value in tree.items()}


def main(family: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", compare.MESH_DEVICES)
    modules.import_libraries()
    operators.register_operators()
    attention.register_names()
    reference = build_reference(family)
    arguments, labels = draw_batch(reference)
    meshes_of_family = {name: MESHES[name] for name in ("one", "sharded")}
    results = {
        name: train_jax(reference, mesh, arguments, labels)
        for name, mesh in meshes_of_family.items()
    }
    expected = train_torch(reference, arguments, labels)
    least = compare.TINY_GRADIENT * max(np.abs(value).max() for value in expected[1].values())
    rows = {}
    for mesh, (logits, gradients, final) in results.items():
        rows[mesh] = {
            "logits": difference(logits, expected[0]),
            "gradient": max(
                compare._relative_difference(gradients[name], value, least)
                for name, value in expected[1].items()
            ),
            "trained": max(difference(final[name], value) for name, value in expected[2].items()),
        }
    print(json.dumps({"model_type": family, "meshes": rows, "parameters": len(expected[1])}))


if __name__ == "__main__":
    main(sys.argv[2])
