"""What a program of yours may import of jaxlaunch: `load`. Imports nothing else until it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from trainer.generate.loaded import Loaded

__all__ = ["load"]


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
