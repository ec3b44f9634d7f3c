"""Our side of benchmarks.sample. With sizes as an argument it writes the inputs of both sides."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import pydantic

from benchmarks.side import serve_steps
from jaxlaunch.trainer import spec
from jaxlaunch.trainer.generate.network import Network
from jaxlaunch.trainer.generate.text_model import load_text_model
from jaxlaunch.trainer.huggingface import save
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.spec import Model

# Names in the folder that both sides read.
WEIGHTS, REQUEST = "weights", "request.json"


def write_inputs(folder: pathlib.Path, sizes: dict[str, Any]) -> None:
    """Write random weights as a Hugging Face folder, and random prompts."""
    model: Any = pydantic.TypeAdapter(Model).validate_python(sizes["model"])
    network = Network(model, mesh.build_mesh(spec.Mesh(), jax.devices()[:1]))
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(0.0, 0.05, target.shape).astype(np.float32)
        + ("norm" in name and "scale" in name)
        for name, target in network.abstract.items()
    }
    save.save_model(
        str(folder / WEIGHTS),
        model,
        {name: array.astype(np.float32) for name, array in params.items()},
    )
    prompts = rng.integers(0, model.vocab, (sizes["rows"], sizes["prompt"])).tolist()
    (folder / REQUEST).write_text(json.dumps({"prompts": prompts, "tokens": sizes["tokens"]}))


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    if len(sys.argv) > 2:
        write_inputs(folder, json.loads(sys.argv[2]))
        return
    request = json.loads((folder / REQUEST).read_text())
    model = load_text_model(str(folder / WEIGHTS))

    def run_step() -> float:
        """Return a checksum of the tokens."""
        groups = model.generate(request["prompts"], max_tokens=request["tokens"])
        return float(
            sum(
                number * token
                for (sample,) in groups
                for number, token in enumerate(sample.ids, start=1)
            )
        )

    serve_steps(f"jax {jax.__version__}", run_step)


if __name__ == "__main__":
    main()
