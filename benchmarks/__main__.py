"""`make bench`: every benchmark in a process of its own, one table. Exits 1 when a ratio is over its bound.

`--record` also writes RESULTS.md beside this file, up to its sections: those are of benchmarks that
run by themselves.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import subprocess
import sys

from benchmarks import table

# Others fetch gigabytes first.
BENCHMARKS = ("cli", "loop", "loop --shared", "remat", "restart", "scale")
RESULTS = pathlib.Path(__file__).with_name("RESULTS.md")
PREFACE = """# Benchmarks

`make bench` measures these where it runs; every ratio is against a baseline of the same run, interleaved with it.
Recorded on {date}: {machine}.

{table}
"""


def measured(name: str) -> list[table.Row]:
    """The rows of one benchmark."""
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", *f"benchmarks.{name}".split()]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"benchmarks.{name} failed with exit code {done.returncode}")
    return table.read(done.stdout)


def main() -> int:
    rows = [row for name in BENCHMARKS for row in measured(name)]
    text = table.markdown(rows)
    print(text)
    if "--record" in sys.argv[1:]:
        today = datetime.date.today().isoformat()
        _, heading, sections = RESULTS.read_text().partition("\n## ")
        RESULTS.write_text(
            PREFACE.format(date=today, machine=table.machine(), table=text) + heading + sections
        )
    return table.failed(rows)


if __name__ == "__main__":
    sys.exit(main())
