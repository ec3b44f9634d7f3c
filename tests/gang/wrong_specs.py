"""Give wrong train blocks to the trainer in one process: python wrong_specs.py RUN_DIR SPEC.

SPEC is the train block of the run that finished in RUN_DIR. Prints a line of JSON for each block:
its name, its exit code, the message, and `traceback` if that was no sentence.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxlaunch import contract
from jaxlaunch.trainer.errors import TrainerError
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.spec import LM
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.start.process import exit_code, read_spec
from jaxlaunch.trainer.train import build_loop

MODULE = "wrong_specs"  # this module, as a job names it


class MissingShare:
    def __init__(self) -> None:
        raise KeyError("no such share")


class Dataset:
    """64 items whose shape depends on the subclass."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return np.zeros((8, 8), np.float32), index % 4


class RaggedDataset(Dataset):
    def __getitem__(self, index: int) -> Any:
        return np.zeros((8 + index % 2, 8), np.float32), 0


VIT = {"kind": "vit", "layers": 1, "width": 8, "heads": 2, "patch": 4, "channels": 1}
IMAGES = {"source": "synthetic", "examples": 512, "eval_examples": 64, "shape": [8, 8]}
GPT2 = {"kind": "gpt2", "layers": 1, "width": 8, "heads": 2, "vocab": 256, "length": 8}


def torch_data(name: str, **keys: Any) -> dict[str, Any]:
    return {"data": {"source": "torch", "dataset": f"{MODULE}:{name}", **keys}}


def text_job(path: str, **model: Any) -> dict[str, Any]:
    return {"task": LM, "model": GPT2 | model, "data": {"source": "text", "path": path}}


def weights_job(folder: str) -> dict[str, Any]:
    return {"task": LM, "model": GPT2 | {"init_from": folder}, "data": {"source": "synthetic"}}


def epoch_job(**keys: Any) -> dict[str, Any]:
    return {"steps": None, "epochs": 1, **keys}


def optimizer_groups(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"groups": list(entries)}}


# Another job in the folder of the finished run.
RESUMED: dict[str, dict[str, Any]] = {
    "another width": {"model": {"kind": "mlp", "layers": 1, "width": 9}},
    "more layers": {"model": {"kind": "mlp", "layers": 2, "width": 32}},
    "another kind of model": {"model": VIT | {"image": [8, 8]}},
    "another optimizer": {"optimizer": {"name": "sgd"}},
    "another group frozen": optimizer_groups({"match": "head.*", "freeze": True}),
    "an average": {"optimizer": {"lr": 1e-2, "ema": 0.9, "schedule": {"name": "constant"}}},
    "half precision": {"precision": "fp16"},
    "another batch": {"batch": 32},
    "another seed": {"seed": 1},
    "no shuffling": {"data": IMAGES | {"shuffle": False}},
    "fewer steps": {"steps": 3},
    "other data": {"data": IMAGES | {"examples": 513}},
}
# In folders of their own.
FRESH: dict[str, dict[str, Any]] = {
    "adapters of nothing": {
        "task": LM,
        "model": GPT2,
        "data": {"source": "synthetic"},
        "lora": {"targets": ["wq"]},
    },
    "adapters for images": {"lora": {}},
    "a task of no module": {"task": "nowhere:Task"},
    "a task that the module lacks": {"task": "jaxlaunch.trainer.tasks.classify:Clasify"},
    "a dataset of no module": {"data": {"source": "torch", "dataset": "no.where:Data"}},
    "a dataset that raises": torch_data("MissingShare"),
    "a dataset with arguments it does not take": torch_data("Dataset", args={"path": "/x"}),
    "items of two shapes": torch_data("RaggedDataset"),
    "text that no file matches": text_job("nowhere/*.txt"),
    "text files that are empty": text_job("empty.txt"),
    "text with too small a vocabulary": text_job("text.txt", vocab=100),
    "text for images": {"data": {"source": "text", "path": "text.txt"}},
    "a csv as array_record": {"data": {"source": "array_record", "path": "data.csv"}},
    "a mistyped dataset": {"data": {"source": "tfds", "name": "digts"}},
    "a model of no module": {"model": {"kind": "nowhere:Net"}},
    "a model for other images": {
        "model": {"kind": "vit", "layers": 1, "width": 8, "heads": 2, "image": [16, 16], "patch": 4}
    },
    "a language model for images": {"model": GPT2},
    "weights that are not there": weights_job("nowhere"),
    "weights with half a config": weights_job("half"),
    "checkpoints in a file": {"checkpoint": {"path": "data.csv"}},
    "checkpoints below a file": {"checkpoint": {"path": "data.csv/checkpoints"}},
    "a cache that is a file": {"compile_cache": "data.csv"},
    "a decay longer than the epochs": epoch_job(
        optimizer={"schedule": {"name": "wsd", "decay": 1000}}
    ),
    "a profile behind the end": epoch_job(profile={"at": 1000}),
    "a mesh of other devices": {"mesh": {"dp": 3}},
    "an optimizer that cannot be made": {"optimizer": {"name": "optax:adamw", "args": {"b9": 1}}},
    "a best of no evaluation": {"checkpoint": {"best": {}}, "data": IMAGES | {"eval_examples": 0}},
    "an end without evaluations": {"stop_early": {"patience": 2}},
}


def write_files() -> None:
    """Write what the specs name into the working folder."""
    for name, content in {
        "empty.txt": "",
        "text.txt": "some text\n" * 99,
        "data.csv": "1,2\n",
    }.items():
        Path(name).write_text(content)
    Path("half").mkdir()
    (Path("half") / "config.json").write_text("{")


def try_training(spec: dict[str, Any], folder: str, stop: Stop) -> dict[str, Any]:
    """Train once and return how it ends."""
    run = None
    try:
        keys = {
            key: value for key, value in spec.items() if value is not None or key == "compile_cache"
        }
        read, task = read_spec({contract.TRAIN_SPEC: json.dumps(keys)})
        run = build_loop(read, task, RunContext(run_dir=folder), stop, Progress(None))
        run.run()
        return {"code": 0, "says": "it trained", "traceback": False}
    except BaseException as error:
        code = exit_code(error, has_stepped=run is not None and run.has_stepped)
        return {"code": code, "says": str(error), "traceback": not isinstance(error, TrainerError)}
    finally:
        if run is not None:
            run.store.close()


def main() -> None:
    run_dir, base = sys.argv[1], json.loads(sys.argv[2])
    stop = Stop()
    with tempfile.TemporaryDirectory() as here:
        os.chdir(here)
        write_files()
        for name, changed in (RESUMED | FRESH).items():
            folder = run_dir if name in RESUMED else os.path.join(here, "run")
            print(
                json.dumps({"name": name, **try_training(base | changed, folder, stop)}), flush=True
            )


if __name__ == "__main__":
    main()
