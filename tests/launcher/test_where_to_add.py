"""Follow the table "Where to add" of CONTRIBUTING.md to the letter.

Six things are added to one copy of the tree, by a patch each of the files that its row names and
of no others. Whatever would say that something was forgotten passes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = {
    "an accelerator": "accelerator",
    "a platform": "platform",
    "a data source": "data_source",
    "an optimizer": "optimizer",
    "a metric": "metric",
    "a situation of `explain`": "cause",
}
TOP = ("docs", "examples", "helm", "jaxlaunch", "k8s", "tests", "pyproject.toml", "README.md")
CHECKS = (
    "tests/launcher/test_found.py::test_every_entry_is_produced_by_a_test",
    "tests/launcher/diagnose/explain/test_explanation.py::test_headline_names_the_situation",
    "tests/launcher/diagnose/explain/test_explanation.py::test_every_situation_has_a_meaning_and_is_documented",
    "tests/launcher/manifests/test_jobset.py::test_combinations_cover_accelerators_and_options",
    "tests/launcher/manifests/test_jobset.py::test_accelerators_are_requested_or_refused",
    "tests/launcher/manifests/test_jobset.py::test_every_golden_file_has_a_job",
    "tests/launcher/agent/http/test_metrics.py",
    "tests/trainer/metrics/test_recorder.py::test_scrape_before_first_step_has_every_name",
    "tests/helm/test_chart.py::test_the_values_of_the_defaults_are_the_keys_of_the_defaults",
    "tests/trainer/optim/test_simulations.py::test_every_optimizer_has_formula",
    "tests/trainer/optim/test_by_name.py::test_planned_optimizer_bytes_are_of_trained_parameters[amsgrad]",
    "tests/trainer/test_spec.py",
)

LINT = """
from tests.lint import code, documents, schema
from tests.lint.__main__ import find_problems
problems = [*find_problems(code), *find_problems(schema), *documents.find_gaps_of_troubleshooting()]
assert not problems, problems
"""


def patch_path(name: str) -> Path:
    return ROOT / "tests" / "where_to_add" / f"{name}.patch"


def read_rows() -> dict[str, list[str]]:
    """Return the files that each row names, links last."""
    files = {}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Where to add")[2].partition("\n## ")[0]
    for line in [line for line in table.splitlines() if line.startswith("| ")][1:]:
        pages = re.findall(r"\]\(([\w./-]+)\)", line)
        files[line.split("|")[1].strip()] = [*re.findall(r"`((?:\w+/)+[\w.]*)`", line), *pages]
    return files


@pytest.mark.parametrize("name", read_rows())
def test_files_of_every_row_exist(name: str) -> None:
    named = read_rows()[name]
    patterns = [re.sub("NAME|BLOCK|SUBJECT", "*", path) for path in named]
    assert named and [path for path in patterns if not any(ROOT.glob(path))] == []


@pytest.mark.parametrize("name", PATCHES)
def test_row_names_every_file_of_its_patch(name: str) -> None:
    # A row names files by their short paths, a patch by their real ones.
    paths = [
        (ROOT / path).resolve().relative_to(ROOT.resolve()).as_posix() for path in read_rows()[name]
    ]
    forms = [re.escape(path).replace("NAME", r"\w+") for path in paths]
    touched = re.findall(
        r"^\+\+\+ b/(.+)$", patch_path(PATCHES[name]).read_text(encoding="utf-8"), re.MULTILINE
    )
    assert touched
    assert [path for path in touched if not any(re.fullmatch(form, path) for form in forms)] == []


@pytest.mark.extended
def test_additions_by_the_rows_are_complete(tmp_path: Path) -> None:
    for name in TOP:
        copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        options = (
            {"symlinks": True, "ignore": shutil.ignore_patterns("__pycache__")}
            if (ROOT / name).is_dir()
            else {}
        )
        copied(ROOT / name, tmp_path / name, **options)
    for name in PATCHES.values():
        run_command(tmp_path, "git", "apply", "-C1", str(patch_path(name)))
    golden = tmp_path / "tests" / "launcher" / "manifests" / "golden"
    previous = {path: path.read_bytes() for path in golden.rglob("*.*")}
    run_command(tmp_path, sys.executable, "-m", "tests.generated")
    assert {path: path.read_bytes() for path in previous} == previous
    assert {path.name.partition("-")[0] for path in set(golden.rglob("*.*")) - previous.keys()} == {
        "aks"
    }
    run_command(tmp_path, sys.executable, "-c", LINT)
    run_command(tmp_path, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHECKS)


def run_command(folder: Path, *command: str) -> None:
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
