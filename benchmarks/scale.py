"""What a thousand hosts cost the commands over a hundred, on a cluster whose nodes exist in name only.

Needs what tests/cluster needs, and its programs built; elsewhere it prints that and measures
nothing.
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable, Mapping

from benchmarks.table import Row, emit, log, median
from tests.cluster import fleet
from tests.cluster.access import Access
from tests.cluster.fleet import Cost, Fleet
from tests.cluster.harness import build, cluster, machine, places

FEW, MANY, MOST = 100, 1_000, 10_000
ROUNDS = 5
WAIT_S = 600.0
DRY = "--dry-run=server"


def rows_of(access: Access, folder: pathlib.Path) -> list[Row]:
    """Every command on both sizes, interleaved."""
    with (
        fleet.make_fleet_namespace(access, FEW) as few,
        fleet.make_fleet_namespace(access, MANY) as many,
    ):
        sizes = {FEW: Fleet(few, FEW, folder), MANY: Fleet(many, MANY, folder)}
        texts = {FEW: sizes[FEW], MOST: Fleet(many, MOST, folder)}
        rows = [
            compared("render", repeated(texts, lambda one: one.measure("render", one.file))),
            compared(
                "submit --dry-run=server",
                repeated(texts, lambda one: one.measure("submit", one.file, DRY)),
            ),
            compared(
                "submit", {hosts: [one.measure("submit", one.file)] for hosts, one in sizes.items()}
            ),
        ]
        for one in sizes.values():
            one.wait_for_pods("ready", WAIT_S)
        rows.append(compared("status", repeated(sizes, lambda one: one.measure_command("status"))))
        return [
            *rows,
            compared("explain", repeated(sizes, lambda one: one.measure_command("explain"))),
        ]


def repeated(sizes: Mapping[int, Fleet], once: Callable[[Fleet], Cost]) -> dict[int, list[Cost]]:
    """The costs of `once` on each size, ROUNDS times, interleaved."""
    rounds = [{hosts: once(one) for hosts, one in sizes.items()} for _ in range(ROUNDS)]
    return {hosts: [each[hosts] for each in rounds] for hosts in sizes}


def compared(command: str, costs: Mapping[int, list[Cost]]) -> Row:
    """The larger size over the smaller."""
    (few, of_few), (many, of_many) = costs.items()
    seconds = {hosts: median([cost.seconds for cost in found]) for hosts, found in costs.items()}
    what = f"launcher {command}, {many:,} hosts over {few}"
    one = of_many[0]
    took = f"{seconds[many]:.2f} s over {seconds[few]:.2f} s"
    size = (
        f"{len(one.calls)} calls, {len(one.writes)} writes, {one.peak_mib:.0f} MiB over "
        f"{of_few[0].peak_mib:.0f} MiB"
    )
    rounds = f"medians of {len(of_many)}" if len(of_many) > 1 else "one run"
    return Row(what, seconds[many] / seconds[few], None, f"{took}, {rounds}; {size}")


def main() -> None:
    if machine.find_missing() or not build.is_built():
        log(
            "scale: left out: "
            f"{'; '.join(machine.find_missing()) or 'the programs of tests/cluster are not built'}"
        )
        return emit([])
    log("scale: a hundred and a thousand hosts")
    with cluster.use_cluster(), tempfile.TemporaryDirectory() as folder:
        access = Access(places.ADMIN, build.programs_folder() / "kubectl", is_ours=True)
        emit(rows_of(access, pathlib.Path(folder)))


if __name__ == "__main__":
    main()
