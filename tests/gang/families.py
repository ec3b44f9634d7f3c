"""Every family of models on every kind of mesh, in one process and in two: `python -m tests.gang.families`.

Prints by how much the losses of 20 steps differ at most from those on one device, relative. Arguments are the cases of
tests/fixtures to train; by default all, half an hour of a core for each of the two processes. The suite trains COVERING
alone (tests/gang/test_families.py): every option that a family has and Llama does not, in two processes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.gang.family_rank import said
from tests.gang.runs import HERE, PATIENCE_S, Running, job, succeed

Row = tuple[str, dict[str, int], str]  # place, mesh, case

SPARSE = ("mixtral_tiny", "mixtral_tiny_aux", "qwen3_moe_tiny")
OLD = ("llama_tiny", "llama3_tiny", "gpt2_tiny")
NEW = ("qwen2_tiny", "qwen3_tiny", "mistral_tiny", "gemma2_tiny", "gemma3_tiny", "olmo2_tiny")
ONE: dict[str, int] = {"dp": 1}
MESHES: list[dict[str, int]] = [{"dp": 8}, {"fsdp": 8}, {"dp": 4, "mp": 2}, {"dp": 2, "fsdp": 2, "mp": 2}]
OF_EXPERTS: list[dict[str, int]] = [
    {"dp": 2, "ep": 4},
    {"fsdp": 2, "ep": 4},
    {"ep": 4, "mp": 2},
    {"fsdp": 2, "ep": 2, "mp": 2},
]
PLACES = ("1-process", "2-processes")
# Biases; windows, caps, norms on both sides; a norm over heads that mp splits; experts: each on the axes that split it.
COVERING: list[Row] = [
    ("2-processes", {"dp": 4, "mp": 2}, "qwen2_tiny"),
    ("2-processes", {"dp": 2, "fsdp": 2, "mp": 2}, "gemma2_tiny"),
    ("2-processes", {"fsdp": 4, "mp": 2}, "olmo2_tiny"),
    ("2-processes", {"fsdp": 2, "ep": 2, "mp": 2}, "qwen3_moe_tiny"),
]


def table() -> list[Row]:
    """Every family on every mesh in both places."""
    cases = [*OLD, *NEW, *SPARSE]
    return [
        (place, axes, case)
        for place in PLACES
        for case in cases
        for axes in [*MESHES, *(OF_EXPERTS if case in SPARSE else [])]
    ]


def trained(asked: Sequence[Row], folder: Path) -> dict[str, list[float]]:
    """The losses of each row, by `place mesh case`, and of each of its cases on one device, in one start of a gang."""
    alone: list[Row] = [("1-process", ONE, case) for case in dict.fromkeys(case for _, _, case in asked)]
    (folder / "asked.json").write_text(json.dumps([*alone, *asked]))
    command = ["python", str(HERE / "family_rank.py"), str(folder / "asked.json"), str(folder)]
    with Running(folder, job(command=command, hosts=2, per_host=8)) as running:
        succeed(running.wait(5 * PATIENCE_S))
    found: dict[str, list[float]] = {}
    for rank in (0, 1):
        found |= json.loads((folder / f"losses-{rank}.json").read_text())
    return found


def distance(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference of a step's loss."""
    assert len(found) == len(wanted)
    return max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True))


def key(row: Row) -> str:
    """The row as `trained` names it."""
    place, axes, case = row
    return f"{place} {said(axes)} {case}"


def main() -> int:
    """Trains the families that the arguments name, or all; 1 where one is further than 1e-5 from one device."""
    rows = [row for row in table() if not sys.argv[1:] or row[2] in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        found = trained(rows, Path(folder))
    worst = {key(row): distance(found[key(row)], found[key(("1-process", ONE, row[2]))]) for row in rows}
    for name, far in worst.items():
        print(f"{name:50} {far:.1e}")
    print(f"{len(worst)} rows, the worst {max(worst.values()):.1e}")
    return int(max(worst.values()) > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
