"""Write what is generated from the code: `python -m tests.generated`, or `make generated`.

Read the diff afterwards. It writes pages and tables of docs/, the chart's README and schema, and
the golden manifests. `make check` reports a page that is not current.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def metrics(page: str) -> str:
    """Return docs/metrics.md with the table of the contract's rows."""
    from jaxlaunch.contract import PROMETHEUS

    rows = ""
    for row in PROMETHEUS:
        key = f"`{row.key}`" if row.key else ""
        rows += (
            f"| `{row.name}` | {row.type} | {row.unit} | {', '.join(row.labels)} | "
            f"{row.exporter} | {key} "
            f"| {row.help} |\n"
        )
    return re.sub(r"(?:\| `jaxlaunch_.*\n)+", lambda _: rows, page, count=1)


def exit_codes(page: str) -> str:
    """Return docs/exit-codes.md with the table of the contract's rows."""
    from jaxlaunch.contract import DONE, OUTCOMES, Action

    actions = {
        Action.COMPLETE: "the job is complete",
        Action.FAIL: "the job fails",
        Action.RESTART: "restarts with new pods; counts",
        Action.RESTART_UNCHARGED: "restarts with new pods; does not count toward `restarts.crash`",
    }
    rows = ""
    for row in OUTCOMES.values():
        in_place = "yes" if row.in_place else "" if row.code == DONE else "no"
        cells = str(row.code), f"`{row.cause}`", row.meaning, in_place, actions[row.action]
        rows += f"| {' | '.join(cells)} |\n".replace("|  |", "| |")
    return re.sub(r"(?:\| \d+ \|.*\n)+", lambda _: rows, page, count=1)


def architectures(page: str) -> str:
    """Return docs/weights.md with the lists of compared architectures of transformers."""
    from jaxlaunch.trainer.torch_models.checked import read_table

    table = sorted(read_table().items())
    lists = {
        "Equal": [name for name, row in table if row.is_equal and row.packs_rows],
        "Equal, without packed rows": [
            name for name, row in table if row.is_equal and not row.packs_rows
        ],
        "Different, refused": [name for name, row in table if not row.is_equal],
    }
    rows = "".join(
        f"| {verdict} | {', '.join(f'`{name}`' for name in names)} |\n"
        for verdict, names in lists.items()
    )
    head = "| | `model_type` |\n|---|---|\n"
    pattern = r"\| \| `model_type` \|\n(?:\|.*\n)*"
    return re.sub(pattern, lambda _: head + rows, page, count=1)


def installs(page: str) -> str:
    """Return a page whose commands install the package from where it is: an index or a clone."""
    from jaxlaunch.installation import NAME, ON_INDEX

    command = re.compile(r"pip install (\"?)(?:\.|jaxlaunch)(?=[\[\"\s`])")
    return command.sub(lambda match: f"pip install {match[1]}{NAME if ON_INDEX else '.'}", page)


def output_schema(command: str, _: str) -> str:
    """Return the schema of what a command prints with -o json."""
    from jaxlaunch.launcher.cli.output_schemas import output_schema

    return json.dumps(output_schema(command), indent=2) + "\n"


def badge(name: str, value: str) -> str:
    """Return a picture of two words for README, as wide as they are."""
    left, right = (16 + round(6.6 * len(text)) for text in (name, value))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{name}: {value}"><title>{name}: {value}</title><rect width="{left + right}" '
        'height="20" rx="4" '
        f'fill="#0d1117"/><path d="M{left} 0h{right - 4}q4 0 4 4v12q0 4 -4 4h-{right - 4}z" '
        'fill="#1a7f37"/>'
        '<g fill="#fff" font-size="11" text-anchor="middle" font-family="Verdana,DejaVu '
        'Sans,sans-serif">'
        f'<text x="{left / 2:g}" y="14">{name}</text><text x="{left + right / 2:g}" '
        f'y="14">{value}</text></g></svg>\n'
    )


def badges() -> Mapping[str, str]:
    """Return the badges of pyproject.toml's facts by path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = [
        classifier.rpartition(" ")[2]
        for classifier in project["classifiers"]
        if re.search(r":: Python :: 3\.\d+$", classifier)
    ]
    facts = {"license": project["license"], "Python": " | ".join(pythons)}
    return {
        f"docs/pictures/{name.lower()}.svg": badge(name, value) for name, value in facts.items()
    }


def files() -> Mapping[str, Callable[[str], str]]:
    """Return, by path, the function that makes a file from its current text."""
    from jaxlaunch.launcher.cli import output_schemas, schema
    from jaxlaunch.launcher.diagnose.explain import situations
    from tests import api, cli_page, platforms_page
    from tests.helm import install_policy, readme
    from tests.helm import schema as chart_schema

    schemas = {
        f"docs/schemas/v{output_schemas.VERSION}/{command}.json": functools.partial(
            output_schema, command
        )
        for command in output_schemas.TYPES
    }
    return {
        **schemas,
        "README.md": installs,
        "docs/quickstart.md": installs,
        "docs/api.md": lambda _: api.make_page(),
        "docs/job-yaml.md": lambda _: schema.job_page(),
        "docs/cli.md": lambda _: cli_page.make_page(),
        "docs/platforms.md": lambda _: platforms_page.make_page(),
        "docs/troubleshooting.md": situations.render_page,
        "docs/metrics.md": metrics,
        "docs/exit-codes.md": exit_codes,
        "docs/weights.md": architectures,
        "helm/launcher/values.schema.json": chart_schema.update_schema,
        "helm/launcher/README.md": lambda _: readme.make_readme(),
        "k8s/install.yaml": install_policy.update_policy,
    }


def _golden() -> None:
    os.environ["GOLDEN"] = "write"  # read when tests.golden is imported
    from tests.launcher.manifests import test_jobset as golden

    for path in golden.PLAIN_MANIFESTS:
        golden.test_plain_job_matches_golden_manifests(path)
    for path in golden.FILES:
        golden.test_job_matches_golden_difference(path)
    for combination in golden.COMBINATIONS:
        golden.test_combination_matches_golden_difference(combination)


if __name__ == "__main__":
    for name, made in files().items():
        path = ROOT / name
        # A new output of a command has no file yet.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name, picture in badges().items():
        (ROOT / name).write_text(picture, encoding="utf-8")
    _golden()
