"""Evaluate each checkpoint of the role `trainer`, until that of the step in the argument.

The training does not wait for its evaluation, and a failure here does not end it. The numbers are
those of this role: `launcher status follow/evaluator` shows them. See follow.yaml.
"""

import os
import sys
import time
from pathlib import Path

import jaxlaunch

run = os.environ["JAXLAUNCH_ROLE_TRAINER_RUN_DIR"]
last_step, step = int(sys.argv[1]), 0
while step < last_step:
    # The manifest is written last, so a step that has one is complete.
    manifests = Path(run, "checkpoints").glob("*/jaxlaunch.manifest.json")
    newest_step = max((int(manifest.parent.name) for manifest in manifests), default=0)
    if newest_step == step:
        time.sleep(0.5)
        continue
    step = newest_step
    model = jaxlaunch.load(run, step=step, note=lambda remark: None)
    assert isinstance(model, jaxlaunch.TaskModel)
    metrics = model.evaluate()
    # The wait for the next checkpoint may take as long as timeouts.data.
    jaxlaunch.report(step=step, phase="data", **metrics)
    print(f"step {step}: accuracy {metrics['accuracy']:.3f}", flush=True)
