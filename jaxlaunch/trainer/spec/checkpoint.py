"""The checkpoint block: what is saved, where, how often, and what is kept."""

from __future__ import annotations

from pydantic import Field

from jaxlaunch.trainer.spec.block import Block, Place, Positive
from jaxlaunch.trainer.spec.evaluation import Watched


class Best(Watched):
    """Steps that are kept because they evaluated best, in addition to the newest.

    ```yaml
    train:
      task: classify
      eval: {every: 100}
      checkpoint: {best: {metric: eval/accuracy, mode: max, keep: 2}}  # besides the newest
    ```
    """

    keep: Positive = Field(1, description="number of best steps that are kept")


class Checkpoint(Block):
    """What is saved, where and how often. A run resumes from its newest verified step.

    ```yaml
    train:
      task: lm
      checkpoint: {path: gs://team-runs/lm, every: 500, keep: 3}  # without path: the run folder, or the claim
    ```
    """

    path: Place | None = Field(
        None, description="a folder or gs://, s3:// URL; default the run folder, or the volume of the cluster defaults"
    )
    every: Positive | None = Field(500, description="steps between saves; null: only at the end")
    keep: Positive = Field(3, description="number of newest verified steps that are kept")
    best: Best | None = Field(None, description="the best steps by a metric, which are also saved and kept; null: none")

    def kept(self) -> int:
        """The most steps that are kept at a time."""
        return self.keep + (self.best.keep if self.best is not None else 0)
