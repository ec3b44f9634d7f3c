"""What a program of yours may import of jaxlaunch: `load`, and `report`. Neither imports more until it is called.

Standard library only, Python >= 3.10: the agent brings this file and `report` into images without our packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from jaxlaunch.reporting import report

if TYPE_CHECKING:
    from trainer.generate.loaded import Loaded

__all__ = ["load", "report"]


def load(run: str, *, step: int | Literal["best"] | None = None, **options: Any) -> Loaded:
    """The trained model of a run: `.model`, `.params`, `.tokenizer`, `.generate(…)`, `.logprobs(…)`.

    `run` is what `launcher sample` takes: the name or folder of a run, a step in its folder of checkpoints, a folder or
    URL of checkpoints, or a Hugging Face folder. `options` are `ema`, `precision`, `mesh` and `note` of
    trainer.generate.loaded.load. Raises launcher.errors.UserError where there is no such run, and a TrainerError where
    its weights cannot be used.
    """
    from launcher.local import run_folders
    from trainer.generate import loaded

    folder, of_folder = run_folders.weights(run)
    return loaded.load(folder, step=of_folder if step is None else step, **options)
