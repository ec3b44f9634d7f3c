"""Our side of benchmarks.sample; with sizes it writes what both sides read."""

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

WEIGHTS, ASKED = "weights", "asked.json"  # in the folder that the sides share


def write_inputs(folder: pathlib.Path, sizes: dict[str, Any]) -> None:
    """Write random weights as a Hugging Face folder, and prompts."""
    model: Any = pydantic.TypeAdapter(Model).validate_python(sizes["model"])
    network = Network(model, mesh.build_mesh(spec.Mesh(), jax.devices()[:1]))
    draw = np.random.default_rng(0)
    params = {
        name: draw.normal(0.0, 0.05, like.shape).astype(np.float32)
        + ("norm" in name and "scale" in name)
        for name, like in network.abstract.items()
    }
    save.save_model(
        str(folder / WEIGHTS),
        model,
        {name: array.astype(np.float32) for name, array in params.items()},
    )
    prompts = draw.integers(0, model.vocab, (sizes["rows"], sizes["prompt"])).tolist()
    (folder / ASKED).write_text(json.dumps({"prompts": prompts, "tokens": sizes["tokens"]}))


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    if len(sys.argv) > 2:
        write_inputs(folder, json.loads(sys.argv[2]))
        return
    options, loaded = (
        json.loads((folder / ASKED).read_text()),
        load_text_model(str(folder / WEIGHTS)),
    )

    def run_step() -> float:
        generated = loaded.generate(options["prompts"], max_tokens=options["tokens"])
        return float(
            sum((at + 1) * token for (sample,) in generated for at, token in enumerate(sample.ids))
        )

    serve_steps(f"jax {jax.__version__}", run_step)


if __name__ == "__main__":
    main()
