"""New tokens per second, compared with `generate` of transformers on one core.

Both sides have the same weights and prompts, decode greedily in float32, and take turns. They must
choose the same tokens. The time to load and to compile is not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from benchmarks.side import Side
from benchmarks.table import Row, finish_benchmark, log_progress, median
from jaxlaunch.launcher.agent.host.environment import TRAINER_VARIABLES
from tests import environments

PAIRS = 5
SHAPES: Mapping[str, dict[str, Any]] = {
    "GPT-2 124M, 1 row": {
        "model": {"kind": "gpt2", "preset": "gpt2-124m"},
        "rows": 1,
        "prompt": 32,
        "tokens": 64,
    },
    "Llama 8 × 512, 8 rows": {
        "model": {"kind": "decoder", "layers": 8, "width": 512, "heads": 8, "kv_heads": 4}
        | {"vocab": 8192, "length": 512},
        "rows": 8,
        "prompt": 100,
        "tokens": 64,
    },
}


def measure_sampling(sizes: Mapping[str, Any], pairs: int) -> Row:
    """Return our time over that of transformers. Raises SystemExit if the tokens differ."""
    python, core = str(environments.find_python("torch")), min(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.sample_ours", folder, json.dumps(sizes)], check=True
        )
        ours = Side(
            sys.executable, "benchmarks.sample_ours", [folder], core, TRAINER_VARIABLES["cpu"]
        )
        theirs = Side(python, "benchmarks.sample_torch", [folder], core, environments.LAZY)
        log_progress(f"  {ours.versions}; {theirs.versions}")
        # The first round compiles and is not counted.
        rounds = [(ours.step(), theirs.step()) for _ in range(1 + pairs)][1:]
        ours.close()
        theirs.close()
    if any(cost.loss != other.loss for cost, other in rounds):
        raise SystemExit(
            f"not the same tokens: their checksums are {rounds[0][0].loss} and {rounds[0][1].loss}"
        )
    tokens = sizes["rows"] * sizes["tokens"]
    speeds = [tokens / median([pair[side].seconds for pair in rounds]) for side in (0, 1)]
    ratio = median([cost.seconds / other.seconds for cost, other in rounds])
    cpu = median([cost.cpu_seconds / other.cpu_seconds for cost, other in rounds])
    detail = (
        f"{speeds[0]:.3g} tokens/s over {speeds[1]:.3g}, {1 / ratio:.2f} ×, by processor time "
        f"{1 / cpu:.2f} ×; "
        f"median of {pairs} pairs"
    )
    return Row("", ratio, 1.0, detail)


def main() -> int:
    rows = []
    for name, sizes in SHAPES.items():
        if all(word in name for word in sys.argv[1:]):
            log_progress(f"sample: {name}")
            row = measure_sampling(sizes, PAIRS)
            rows.append(
                Row(
                    f"our time of a token over transformers', {name}",
                    row.ratio,
                    row.bound,
                    row.detail,
                )
            )
    return finish_benchmark(rows)


if __name__ == "__main__":
    sys.exit(main())
