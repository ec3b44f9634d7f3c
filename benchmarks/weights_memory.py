"""Memory of processes that read the weights of a model of transformers, each its own share.

python -m benchmarks.weights_memory [MIB] [PROCESSES] writes a random Llama of float32 into a
temporary folder, and prints what each process had at most beyond what it had before it read. It
needs the packages of tests/requirements/torchax.txt.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

MIB = 2**20
WIDTH, HIDDEN, VOCAB = 1024, 4096, 16384
FILE_MIB = 512


def write_weights(folder: Path, size_mib: int) -> None:
    """Write a Llama of about this size, and at least one layer, in files of at most FILE_MIB."""
    from safetensors.numpy import save_file

    shapes = {
        **{f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"},
        "mlp.gate_proj": (HIDDEN, WIDTH),
        "mlp.up_proj": (HIDDEN, WIDTH),
        "mlp.down_proj": (WIDTH, HIDDEN),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    layer_bytes = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    outer_bytes = 4 * (2 * VOCAB + 1) * WIDTH
    layers = max(1, round((size_mib * MIB - outer_bytes) / layer_bytes))
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    all_shapes = {"model.embed_tokens": (VOCAB, WIDTH), "lm_head": (VOCAB, WIDTH)}
    all_shapes |= {"model.norm": (WIDTH,)}
    for layer in range(layers):
        all_shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}
    random = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for index, (name, shape) in enumerate(all_shapes.items()):
        arrays[f"{name}.weight"] = random.random(shape, np.float32)
        is_last = index == len(all_shapes) - 1
        if is_last or sum(array.nbytes for array in arrays.values()) > FILE_MIB * MIB / 2:
            file = f"part-{index}.safetensors"
            save_file(arrays, folder / file)
            weight_map |= dict.fromkeys(arrays, file)
            arrays = {}
    index_text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index_text)


def measure_reading(folder: str, fsdp: int) -> dict[str, float]:
    """Read this process's share of a folder, and return its sizes in MiB and the seconds."""
    from jaxlaunch.trainer.parallel import mesh as meshes
    from jaxlaunch.trainer.parallel.sharding import state_sharding
    from jaxlaunch.trainer.spec import Mesh
    from jaxlaunch.trainer.torch_models import axes, modules, weights
    from jaxlaunch.trainer.torch_models.network import build_torch_module

    modules.import_libraries()
    module = build_torch_module(modules.read_config(folder))
    mesh = meshes.build_mesh(Mesh(fsdp=fsdp))
    axes_by_name = axes.parameter_axes(module)
    targets = {}
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        split = state_sharding(name, shape, axes_by_name[name], mesh)
        targets[name] = jax.ShapeDtypeStruct(shape, np.float32, sharding=split)
    jax.block_until_ready(jax.device_put(np.zeros(8)))
    Path("/proc/self/clear_refs").write_text("5")
    before, start_s = _resident_mib("VmRSS"), time.monotonic()
    arrays = dict(weights.iterate_parameters(module, folder, targets))
    jax.block_until_ready(arrays)
    seconds = time.monotonic() - start_s
    share = sum(
        shard.data.nbytes for array in arrays.values() for shard in array.addressable_shards
    )
    return {
        "grown": _resident_mib("VmHWM") - before,
        "share": share / MIB,
        "largest": max(array.nbytes for array in arrays.values()) / MIB,
        "seconds": round(seconds, 1),
    }


def _resident_mib(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) / 1024


def main() -> int:
    """Start the processes on a new folder, and print a row for each."""
    numbers = [*map(int, sys.argv[1:])]
    size_mib, processes = numbers + [4096, 4][len(numbers) :]
    with tempfile.TemporaryDirectory() as folder:
        write_weights(Path(folder), size_mib)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        program = [sys.executable, "-m", "benchmarks.weights_memory", "rank", folder]
        children = [
            subprocess.Popen([*program, str(rank), str(processes), str(port)])
            for rank in range(processes)
        ]
        return max(child.wait() for child in children)


def run_rank(folder: str, rank: int, processes: int, port: int) -> int:
    """Measure one of the processes, and print its row."""
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    print(json.dumps({"rank": rank, **measure_reading(folder, processes)}), flush=True)
    jax.distributed.shutdown()
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        sys.exit(run_rank(sys.argv[2], *map(int, sys.argv[3:6])))
    sys.exit(main())
