"""`launcher model check`: compare an architecture of transformers with PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import click

from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import trainer_process


@click.command("model")
@click.argument("action", type=click.Choice(["check"]), metavar="check")
@click.argument("folder", type=click.Path())
@options.output_option("text", "json", "yaml")
def model_command(action: str, folder: str, output_format: str) -> None:
    """Compare the architecture of FOLDER with PyTorch.

    FOLDER has a config.json of transformers; its weights are not read. A tiny random model of the
    same architecture computes logits and gradients with PyTorch, and as a JAX function on a mesh of
    8 CPU devices. The result is kept in the cache of this user: a job with `train.model.kind:
    transformers` starts only if its architecture was compared and agrees. It needs the extra
    [transformers].
    """
    trainer_process.require_trainer("launcher model")
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise UserError(
            f"{folder} has no config.json.",
            "give a folder that transformers' save_pretrained wrote, or one of a model hub.",
        )
    result = trainer_process.run_program(
        "jaxlaunch.trainer.check_model", os.path.abspath(folder), environ=environ
    )
    output.show_result(result, output_format, _describe_comparison(result))
    if not result["is_equal"]:
        raise UserError(
            f"{result['architecture']} computes other numbers than PyTorch.",
            "set train.model.unchecked: true in a job to train it nevertheless.",
        )


def _describe_comparison(result: Mapping[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    yield f"{result['architecture']} (model_type {result['model_type']}) with {versions}"
    rows = [("DIFFERENCE FROM PYTORCH", "SHARE OF THE LARGEST VALUE")]
    rows.append(("logits", f"{result['logits']:.1e}"))
    rows.append((f"gradients, most {result['parameter']}", f"{result['gradient']:.1e}"))
    rows.append(("logits of packed rows", f"{result['packed']:.1e}"))
    yield from output.format_columns(rows)
    if result["is_equal"]:
        packing = "" if result["packs_rows"] else ", but only without packed rows"
        yield f"It can be trained{packing}."
