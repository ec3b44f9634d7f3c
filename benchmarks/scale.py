"""The cost of the commands for a thousand hosts over a hundred, on fake nodes.

It needs what tests/cluster needs, and its programs built; elsewhere it prints that and measures
nothing.
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable, Mapping

from benchmarks.table import Row, emit_rows, log_progress, median
from tests.cluster import fleet
from tests.cluster.access import Access
from tests.cluster.fleet import Cost, Fleet
from tests.cluster.harness import build, cluster, machine, places

FEW, MANY, MOST = 100, 1_000, 10_000
ROUNDS = 5
WAIT_S = 600.0
DRY_RUN = "--dry-run=server"


def measure_rows(access: Access, folder: pathlib.Path) -> list[Row]:
    """Return the rows of every command on both sizes, interleaved."""
    with (
        fleet.make_fleet_namespace(access, FEW) as few,
        fleet.make_fleet_namespace(access, MANY) as many,
    ):
        sizes = {FEW: Fleet(few, FEW, folder), MANY: Fleet(many, MANY, folder)}
        texts = {FEW: sizes[FEW], MOST: Fleet(many, MOST, folder)}
        rows = [
            compare_sizes(
                "render",
                repeat_measurement(
                    texts, lambda fleet_of_size: fleet_of_size.measure("render", fleet_of_size.file)
                ),
            ),
            compare_sizes(
                "submit --dry-run=server",
                repeat_measurement(
                    texts,
                    lambda fleet_of_size: fleet_of_size.measure(
                        "submit", fleet_of_size.file, DRY_RUN
                    ),
                ),
            ),
            compare_sizes(
                "submit",
                {
                    hosts: [fleet_of_size.measure("submit", fleet_of_size.file)]
                    for hosts, fleet_of_size in sizes.items()
                },
            ),
        ]
        for fleet_of_size in sizes.values():
            fleet_of_size.wait_for_pods("ready", WAIT_S)
        rows.append(
            compare_sizes(
                "status",
                repeat_measurement(
                    sizes, lambda fleet_of_size: fleet_of_size.measure_command("status")
                ),
            )
        )
        return [
            *rows,
            compare_sizes(
                "explain",
                repeat_measurement(
                    sizes, lambda fleet_of_size: fleet_of_size.measure_command("explain")
                ),
            ),
        ]


def repeat_measurement(
    sizes: Mapping[int, Fleet], once: Callable[[Fleet], Cost]
) -> dict[int, list[Cost]]:
    """Return the costs of `once` on each size, ROUNDS times, interleaved."""
    rounds = [
        {hosts: once(fleet_of_size) for hosts, fleet_of_size in sizes.items()}
        for _ in range(ROUNDS)
    ]
    return {hosts: [costs[hosts] for costs in rounds] for hosts in sizes}


def compare_sizes(command: str, costs: Mapping[int, list[Cost]]) -> Row:
    """Return the larger size's cost over the smaller's."""
    (few, of_few), (many, of_many) = costs.items()
    seconds = {
        hosts: median([cost.seconds for cost in costs_of_size])
        for hosts, costs_of_size in costs.items()
    }
    label = f"launcher {command}, {many:,} hosts over {few}"
    cost_of_many = of_many[0]
    took = f"{seconds[many]:.2f} s over {seconds[few]:.2f} s"
    size = (
        f"{len(cost_of_many.calls)} calls, {len(cost_of_many.writes)} writes, "
        f"{cost_of_many.peak_mib:.0f} MiB over {of_few[0].peak_mib:.0f} MiB"
    )
    rounds = f"medians of {len(of_many)}" if len(of_many) > 1 else "one run"
    return Row(label, seconds[many] / seconds[few], None, f"{took}, {rounds}; {size}")


def main() -> None:
    if machine.find_missing() or not build.is_built():
        log_progress(
            "scale: left out: "
            f"{'; '.join(machine.find_missing()) or 'the programs of tests/cluster are not built'}"
        )
        emit_rows([])
        return
    log_progress("scale: a hundred and a thousand hosts")
    with cluster.use_cluster(), tempfile.TemporaryDirectory() as folder:
        access = Access(places.ADMIN, build.programs_folder() / "kubectl", is_ours=True)
        emit_rows(measure_rows(access, pathlib.Path(folder)))


if __name__ == "__main__":
    main()
