"""Run every benchmark in its own process and print one table (`make bench`).

The exit code is 1 if a ratio exceeds its bound. `--record` also replaces the table at the beginning
of RESULTS.md. The sections below it are results of other benchmarks, which are run by hand.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import subprocess
import sys

from benchmarks import table

# The other benchmarks download gigabytes of packages, or need a cluster or a GPU.
BENCHMARKS = ("cli", "loop", "loop --shared", "remat", "restart", "scale")
RESULTS = pathlib.Path(__file__).with_name("RESULTS.md")
PREFACE = """# Benchmarks

`make bench` measures these where it runs; every ratio is against an interleaved baseline of the
same run.
Recorded on {date}: {machine}.

{table}
"""


def run_benchmark(name: str) -> list[table.Row]:
    """Return the rows of one benchmark."""
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", *f"benchmarks.{name}".split()]
    process = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True)
    if process.returncode != 0:
        raise SystemExit(f"benchmarks.{name} failed with exit code {process.returncode}")
    return table.read_rows(process.stdout)


def main() -> int:
    rows = [row for name in BENCHMARKS for row in run_benchmark(name)]
    text = table.format_table(rows)
    print(text)
    if "--record" in sys.argv[1:]:
        today = datetime.date.today().isoformat()
        _, heading, sections = RESULTS.read_text().partition("\n## ")
        RESULTS.write_text(
            PREFACE.format(date=today, machine=table.describe_machine(), table=text)
            + heading
            + sections
        )
    return table.exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
