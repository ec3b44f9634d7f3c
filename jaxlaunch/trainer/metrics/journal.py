"""Where the trainer writes its metrics in a run's folder, and whether as TensorBoard events, too."""

from __future__ import annotations

import importlib.util

from jaxlaunch.runs.journal import Journal, TensorBoard

__all__ = ["Journal", "TensorBoard", "tensorboard_installed"]


def tensorboard_installed() -> bool:
    """Whether the extra `tensorboard` is installed: if it is, events are written."""
    return importlib.util.find_spec("tensorboardX") is not None
