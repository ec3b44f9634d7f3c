"""The accuracy of the recipes for images on generated folders of small images.

`python -m benchmarks.recipes [--seeds 3] [--epochs 12] [--only digits]` uses two datasets. `digits`
are scikit-learn's, enlarged from 8 × 8 to 16 × 16 pixels. `shapes` are circles, squares, triangles
and crosses of random positions, sizes and colours, with noise. On each, a small ResNet is trained
with augmentation on all images, and with and without it on 50 images of each class. Then a small
ViT is trained on the digits 0 to 4 and exported. It is fine-tuned on ten examples of each of the
digits 5 to 9, and compared with training from scratch. Every fifth image is held out. A seed
determines the weights and the order.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from sklearn import datasets

from benchmarks.table import Row, finish_benchmark, log_progress
from jaxlaunch import contract
from jaxlaunch.trainer import export
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.start.process import read_spec
from jaxlaunch.trainer.train import build_loop

SIZE = 16
# The number of training images per class with and without augmentation, and for fine-tuning.
FEW, FEWER = 50, 10
RESNET = {
    "kind": "resnet",
    "block": "basic",
    "stem": "small",
    "stem_width": 16,
    "depths": [1, 1],
    "widths": [16, 32],
}
VIT = {"kind": "vit", "image": [SIZE, SIZE], "patch": 4, "layers": 2, "width": 64, "heads": 4}
AUGMENT = {
    "digits": {"crop": [0.7, 1.0], "ratio": [0.9, 1.1]},
    "shapes": {"crop": [0.7, 1.0], "flip": 0.5},
}
LabelledImages = Iterator[tuple[str, Image.Image]]


def load_digits() -> LabelledImages:
    """Yield 1,797 handwritten digits."""
    dataset = datasets.load_digits()
    for pixels, label in zip(dataset.images, dataset.target, strict=True):
        image = Image.fromarray((pixels * 15.9375).astype(np.uint8)).convert("RGB")
        yield str(label), image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)


def draw_shapes(count: int = 1600) -> LabelledImages:
    """Yield four shapes in turn."""
    rng = np.random.default_rng(0)
    for number in range(count):
        name = ("circle", "cross", "square", "triangle")[number % 4]
        back, front = rng.integers(0, 110, 3), rng.integers(146, 256, 3)
        image = Image.new("RGB", (4 * SIZE, 4 * SIZE), tuple(back.tolist()))
        draw, half = ImageDraw.Draw(image), int(rng.integers(SIZE * 3 // 4, 2 * SIZE - 2))
        x, y = (int(value) for value in rng.integers(half, 4 * SIZE - half, 2))
        box, ink = (x - half, y - half, x + half, y + half), tuple(front.tolist())
        match name:
            case "circle":
                draw.ellipse(box, fill=ink)
            case "square":
                draw.rectangle(box, fill=ink)
            case "triangle":
                draw.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], fill=ink)
            case _:
                third = half // 3
                draw.rectangle((x - third, y - half, x + third, y + half), fill=ink)
                draw.rectangle((x - half, y - third, x + half, y + third), fill=ink)
        small = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BOX), np.float32)
        yield (
            name,
            Image.fromarray(
                np.clip(small + rng.normal(0, 45, small.shape), 0, 255).astype(np.uint8)
            ),
        )


def write_folders(folder: Path, images: LabelledImages, max_images: int | None = None) -> str:
    """Write folders by class below `train` and `val`, and return the path of the folder.

    Every fifth image is in `val`. In `train` a class has at most `max_images` images.
    """
    counts: collections.Counter[str] = collections.Counter()
    for number, (name, image) in enumerate(images):
        split = "train" if number % 5 else "val"
        counts[f"{split}/{name}"] += 1
        if split == "val" or max_images is None or counts[f"{split}/{name}"] <= max_images:
            path = folder / split / name / f"{number:05}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
    return str(folder)


def train_accuracy(
    folder: Path, path: str, model: dict[str, Any], augment: Any, epochs: int, seed: int
) -> float:
    """Train in the run folder `folder`, and return the accuracy on held-out images."""
    train = {
        "task": "classify",
        "model": model,
        "data": {"source": "images", "path": path, "size": SIZE, "augment": augment},
        "batch": 50,
        "epochs": epochs,
        "seed": seed,
        "optimizer": {
            "name": "adamw",
            "lr": 3e-3,
            "weight_decay": 0.05,
            "schedule": {"name": "cosine", "warmup": 20},
        },
        "compile_cache": str(folder.parents[1] / "compiled"),
        "log_every": 10_000,
        "eval": {"every": None},
        "checkpoint": {"every": None},
    }
    accuracy = float(run_training(folder, train)["accuracy"])
    log_progress(f"recipes: {folder.parent.name}, {folder.name}: {accuracy:.4f}")
    return accuracy


def run_training(folder: Path, train: dict[str, Any]) -> dict[str, Any]:
    """Train with the block `train` in a run folder, and return the last evaluation."""
    spec, task = read_spec({contract.TRAIN_SPEC: json.dumps(train)})
    with contextlib.redirect_stdout(io.StringIO()):
        build_loop(spec, task, RunContext(run_dir=str(folder)), Stop(), Progress(None)).run()
    line: dict[str, Any] = json.loads((folder / "eval.jsonl").read_text().splitlines()[-1])
    return line


def augmentation_rows(home: Path, name: str, epochs: int, seeds: int) -> list[Row]:
    """Compare the ResNet on all images, and on a few with augmentation and without."""
    make_images = {"digits": load_digits, "shapes": draw_shapes}[name]
    all_images = write_folders(home / f"{name}-all", make_images())
    few_images = write_folders(home / f"{name}-few", make_images(), FEW)
    model, augment = {**RESNET, "classes": 10 if name == "digits" else 4}, AUGMENT[name]
    # Fewer images need more epochs.
    few_epochs = epochs * 3
    best, augmented, plain = [], [], []
    for seed in range(seeds):
        folder = home / f"{name}, seed {seed}"
        best.append(train_accuracy(folder / "all", all_images, model, augment, epochs, seed))
        augmented.append(
            train_accuracy(folder / "few, augmented", few_images, model, augment, few_epochs, seed)
        )
        plain.append(
            train_accuracy(folder / "few, plain", few_images, model, None, few_epochs, seed)
        )
    errors = f"{name}: errors of a small ResNet with the recipe over 0.02"
    few_label = f"{name}, {FEW} images a class: errors with augmentation over those without"
    return [
        Row(errors, (1 - mean_accuracy(best)) / 0.02, 1.0, f"{format_accuracies(best)} right"),
        compare_errors(few_label, augmented, plain),
    ]


def finetuning_row(home: Path, epochs: int, seeds: int) -> Row:
    """Compare a ViT that was trained on other digits before with one from scratch."""
    early_digits = write_folders(
        home / "first", ((name, image) for name, image in load_digits() if int(name) < 5)
    )
    late_digits = write_folders(
        home / "then", ((name, image) for name, image in load_digits() if int(name) >= 5), FEWER
    )
    augment, tuned, scratch = AUGMENT["digits"], [], []
    for seed in range(seeds):
        folder = home / f"ViT, seed {seed}"
        train_accuracy(
            folder / "0 to 4", early_digits, {**VIT, "classes": 5}, augment, epochs * 2, seed
        )
        export.export(str(folder / "0 to 4" / "checkpoints"), str(folder / "weights"))
        model = {**VIT, "init_from": str(folder / "weights"), "new_head": True, "classes": 5}
        tuned.append(
            train_accuracy(
                folder / "5 to 9, from weights", late_digits, model, augment, epochs * 6, seed
            )
        )
        scratch.append(
            train_accuracy(
                folder / "5 to 9, from scratch",
                late_digits,
                {**VIT, "classes": 5},
                augment,
                epochs * 6,
                seed,
            )
        )
    return compare_errors(
        f"a ViT on {FEWER} images a class: errors from weights over those from scratch",
        tuned,
        scratch,
    )


def compare_errors(label: str, accuracies: list[float], baseline: list[float]) -> Row:
    """Return the mean error over that of a baseline, with an accuracy for each seed."""
    return Row(
        label,
        (1 - mean_accuracy(accuracies)) / max(1 - mean_accuracy(baseline), 1e-9),
        1.0,
        f"{format_accuracies(accuracies)} right over {format_accuracies(baseline)}",
    )


def mean_accuracy(accuracies: list[float]) -> float:
    """Return the mean over all seeds."""
    return float(np.mean(accuracies))


def format_accuracies(accuracies: list[float]) -> str:
    """Return the mean, the standard deviation and the number of seeds as text."""
    return f"{mean_accuracy(accuracies):.4f} ± {np.std(accuracies):.4f} ({len(accuracies)} seeds)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--only", choices=["digits", "shapes", "finetune"])
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for dataset in ("digits", "shapes"):
            if arguments.only in (None, dataset):
                rows += augmentation_rows(Path(name), dataset, arguments.epochs, arguments.seeds)
        if arguments.only in (None, "finetune"):
            rows.append(finetuning_row(Path(name), arguments.epochs, arguments.seeds))
    return finish_benchmark(rows)


if __name__ == "__main__":
    sys.exit(main())
