"""Writes what is made from the code: `python -m tests.generated`, or `make generated`. Read the diff afterwards.

Pages and tables of docs/, the chart's README and schema, and the golden manifests. Tests say where one is not current.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def metrics(page: str) -> str:
    """docs/metrics.md with the table that the contract's rows make."""
    from jaxlaunch.contract import PROMETHEUS

    rows = ""
    for row in PROMETHEUS:
        key = f"`{row.key}`" if row.key else ""
        rows += (
            f"| `{row.name}` | {row.type} | {row.unit} | {', '.join(row.labels)} | {row.by} | {key} | {row.help} |\n"
        )
    return re.sub(r"(?:\| `jaxlaunch_.*\n)+", lambda _: rows, page, count=1)


def installs(page: str) -> str:
    """A page whose commands install the package from where it is: the index that has it, or a clone."""
    from jaxlaunch.installation import NAME, ON_INDEX

    command = re.compile(r"pip install (\"?)(?:\.|jaxlaunch)(?=[\[\"\s`])")
    return command.sub(lambda found: f"pip install {found[1]}{NAME if ON_INDEX else '.'}", page)


def _files() -> Mapping[str, Callable[[str], str]]:
    """Path → the file's text from its text so far, which pages around a table keep."""
    from jaxlaunch.launcher.cli import job_reference
    from jaxlaunch.launcher.cli import reference as commands
    from jaxlaunch.launcher.explain import situations
    from jaxlaunch.launcher.manifests.platforms import reference as platforms
    from tests import api
    from tests.helm import readme, schema

    return {
        "README.md": installs,
        "docs/install.md": installs,
        "docs/api.md": lambda _: api.markdown(),
        "docs/job-yaml.md": lambda _: job_reference.markdown(),
        "docs/cli.md": lambda _: commands.markdown(),
        "docs/platforms.md": lambda _: platforms.markdown(),
        "docs/explain.md": situations.page,
        "docs/metrics.md": metrics,
        "helm/launcher/values.schema.json": schema.made,
        "helm/launcher/README.md": lambda _: readme.text(),
    }


def _golden() -> None:
    os.environ["GOLDEN"] = "write"  # read when tests.golden is imported
    from tests.launcher.manifests import test_jobset as golden

    for path in golden.WHOLES:
        golden.test_the_plainest_job_renders_to_its_golden_manifests(path)
    for path in golden.FILES:
        golden.test_a_job_differs_from_the_plainest_as_its_golden_file_says(path)
    for combination in golden.COMBINATIONS:
        golden.test_a_combination_differs_from_the_plainest_as_its_golden_file_says(combination)


if __name__ == "__main__":
    for name, made in _files().items():
        path = ROOT / name
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")
    _golden()
