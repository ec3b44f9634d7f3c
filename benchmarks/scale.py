"""The cost of the launcher's commands for a thousand hosts over a hundred, on fake nodes.

It has the requirements of tests/cluster, whose programs must be built. If one of them is missing,
it says so and measures nothing.
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
    """Return a row for each command, with both sizes measured in turn."""
    with (
        fleet.make_fleet_namespace(access, FEW) as few,
        fleet.make_fleet_namespace(access, MANY) as many,
    ):
        sizes = {FEW: Fleet(few, FEW, folder), MANY: Fleet(many, MANY, folder)}
        # Commands that create no pods are measured with even more hosts.
        dry_sizes = {FEW: sizes[FEW], MOST: Fleet(many, MOST, folder)}
        rows = [
            compare_sizes(
                "render",
                repeat_measurement(
                    dry_sizes,
                    lambda fleet_of_hosts: fleet_of_hosts.measure("render", fleet_of_hosts.file),
                ),
            ),
            compare_sizes(
                "submit --dry-run=server",
                repeat_measurement(
                    dry_sizes,
                    lambda fleet_of_hosts: fleet_of_hosts.measure(
                        "submit", fleet_of_hosts.file, DRY_RUN
                    ),
                ),
            ),
            compare_sizes(
                "submit",
                {
                    hosts: [fleet_of_hosts.measure("submit", fleet_of_hosts.file)]
                    for hosts, fleet_of_hosts in sizes.items()
                },
            ),
        ]
        for fleet_of_hosts in sizes.values():
            fleet_of_hosts.wait_for_pods("ready", WAIT_S)
        rows.append(
            compare_sizes(
                "status",
                repeat_measurement(
                    sizes, lambda fleet_of_hosts: fleet_of_hosts.measure_command("status")
                ),
            )
        )
        return [
            *rows,
            compare_sizes(
                "explain",
                repeat_measurement(
                    sizes, lambda fleet_of_hosts: fleet_of_hosts.measure_command("explain")
                ),
            ),
        ]


def repeat_measurement(
    sizes: Mapping[int, Fleet], measure: Callable[[Fleet], Cost]
) -> dict[int, list[Cost]]:
    """Return the costs of `measure` for each size, measured ROUNDS times in turn."""
    rounds = [
        {hosts: measure(fleet_of_hosts) for hosts, fleet_of_hosts in sizes.items()}
        for _ in range(ROUNDS)
    ]
    return {hosts: [costs[hosts] for costs in rounds] for hosts in sizes}


def compare_sizes(command: str, costs: Mapping[int, list[Cost]]) -> Row:
    """Return the cost of the larger size over that of the smaller one."""
    (few, few_costs), (many, many_costs) = costs.items()
    seconds = {
        hosts: median([cost.seconds for cost in size_costs]) for hosts, size_costs in costs.items()
    }
    label = f"launcher {command}, {many:,} hosts over {few}"
    many_cost = many_costs[0]
    times = f"{seconds[many]:.2f} s over {seconds[few]:.2f} s"
    size = (
        f"{len(many_cost.calls)} calls, {len(many_cost.writes)} writes, "
        f"{many_cost.peak_mib:.0f} MiB over {few_costs[0].peak_mib:.0f} MiB"
    )
    rounds = f"medians of {len(many_costs)}" if len(many_costs) > 1 else "one run"
    return Row(label, seconds[many] / seconds[few], None, f"{times}, {rounds}; {size}")


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
