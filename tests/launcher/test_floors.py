"""Who may import whom, lazy imports included. Read from the source: nothing is imported, jax need not be installed."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Top floor first. A name stands for a module or for a package and all in it; the longest name that fits counts.
# What a module imports of ours lies on a lower floor, or in the same package.
FLOORS = (
    ("jaxlaunch.launcher.entry",),
    ("jaxlaunch", "jaxlaunch.launcher.cli"),
    ("jaxlaunch.launcher.sweep",),
    ("jaxlaunch.launcher.here", "jaxlaunch.launcher.plan"),
    ("jaxlaunch.launcher.local", "jaxlaunch.launcher.profile_requests"),
    (
        "jaxlaunch.launcher.doctor",
        "jaxlaunch.launcher.explain",
        "jaxlaunch.launcher.lifecycle",
        "jaxlaunch.launcher.logs",
        "jaxlaunch.launcher.seen",
    ),
    ("jaxlaunch.launcher.manifests", "jaxlaunch.launcher.status"),
    ("jaxlaunch.launcher.cluster", "jaxlaunch.launcher.job"),
    (
        "jaxlaunch.launcher.agent",
        "jaxlaunch.launcher.kube",
        "jaxlaunch.launcher.manifests.platforms",
        "jaxlaunch.launcher.yaml12",
    ),
    ("jaxlaunch.launcher.troubleshooting", "jaxlaunch.launcher.wording"),
    ("jaxlaunch.launcher.errors",),
    ("jaxlaunch.trainer.__main__", "jaxlaunch.trainer.tune"),
    (
        "jaxlaunch.trainer.evaluation",
        "jaxlaunch.trainer.export",
        "jaxlaunch.trainer.plan",
        "jaxlaunch.trainer.text.prepare",
    ),
    ("jaxlaunch.trainer.ahead", "jaxlaunch.trainer.tasks", "jaxlaunch.trainer.train"),
    (
        "jaxlaunch.trainer.data.look",
        "jaxlaunch.trainer.data.pack",
        "jaxlaunch.trainer.generate",
        "jaxlaunch.trainer.loop",
    ),
    ("jaxlaunch.trainer.start.process", "jaxlaunch.trainer.step"),
    ("jaxlaunch.trainer.adapters",),
    ("jaxlaunch.trainer.models",),
    (
        "jaxlaunch.trainer.attention",
        "jaxlaunch.trainer.data.sources",
        "jaxlaunch.trainer.start.compile_cache",
        "jaxlaunch.trainer.task",
    ),
    ("jaxlaunch.trainer.text",),
    (
        "jaxlaunch.trainer.data.sources.arrow",
        "jaxlaunch.trainer.data.sources.files",
        "jaxlaunch.trainer.data.sources.share",
    ),
    (
        "jaxlaunch.trainer.checkpoint",
        "jaxlaunch.trainer.data",
        "jaxlaunch.trainer.data.sources.cache",
        "jaxlaunch.trainer.huggingface",
        "jaxlaunch.trainer.numerics",
        "jaxlaunch.trainer.optim",
        "jaxlaunch.trainer.parallel",
        "jaxlaunch.trainer.start.preflight",
        "jaxlaunch.trainer.profiling",
    ),
    (
        "jaxlaunch.trainer.start.distributed",
        "jaxlaunch.trainer.metrics",
        "jaxlaunch.trainer.data.arguments",
        "jaxlaunch.trainer.buckets",
    ),
    ("jaxlaunch.trainer.tracking",),
    ("jaxlaunch.trainer.user_code",),
    ("jaxlaunch.trainer.errors", "jaxlaunch.trainer.spec"),
    ("jaxlaunch.records",),
    ("jaxlaunch.isolated", "jaxlaunch.reporting"),
    ("jaxlaunch.contract", "jaxlaunch.regular_files", "jaxlaunch.shown", "jaxlaunch.spelling"),
    (
        "jaxlaunch.accelerators",
        "jaxlaunch.installation",
        "jaxlaunch.programs",
        "jaxlaunch.user_cache",
        "jaxlaunch.user_modules",
    ),
    ("jaxlaunch.old_names",),
)

# What each side may import that is neither ours nor the standard library's. The longest name that fits counts.
# The base install holds only the launcher's; TRAINER is the extra [train].
LAUNCHER = {"click", "cryptography", "kubernetes", "pydantic", "pydantic_core", "urllib3", "websocket", "yaml"}
TRAINER = {
    "absl",
    "array_record",
    "etils",
    "flax",
    "fsspec",
    "grain",
    "jax",
    "jaxlib",
    "jinja2",
    "numpy",
    "optax",
    "orbax",
    "PIL",
    "prometheus_client",
    "pyarrow",
    "pydantic",
    "safetensors",
    "sklearn",
    "tensorboardX",
    "tensorflow_datasets",
    "tensorstore",
    "tokenizers",
}
OUTSIDE: Mapping[str, set[str]] = {
    "jaxlaunch": {"jax"},  # for its types alone
    "jaxlaunch.shown": {"numpy"},  # in the function that is given an array
    "jaxlaunch.reporting": set(),  # travels into users' images, as the face does
    "jaxlaunch.launcher": LAUNCHER,
    "jaxlaunch.launcher.seen.pictures": LAUNCHER | {"PIL"},  # of [train]; without it there is no PNG
    "jaxlaunch.launcher.agent": set(),  # runs in images that hold nothing of ours but its zipapp
    "jaxlaunch.launcher.agent.site.jaxhook": {"jax"},  # in functions that JAX's own import calls
    "jaxlaunch.trainer": TRAINER,
    "jaxlaunch.contract": set(),  # travels in that zipapp, as records do
    "jaxlaunch.isolated": set(),
    "jaxlaunch.regular_files": set(),
    "jaxlaunch.trainer.models.foreign": TRAINER | {"haiku"},  # an extra
    "jaxlaunch.trainer.generate.harness": TRAINER | {"lm_eval"},  # which calls it
    "jaxlaunch.trainer.tracking.trackers": TRAINER | {"mlflow", "trackio", "wandb"},  # what a job names
    "jaxlaunch.trainer.spec": LAUNCHER,  # the launcher validates with it
    "jaxlaunch.trainer.errors": set(),
}
SHARED = {
    "jaxlaunch.trainer": {
        "jaxlaunch.accelerators",
        "jaxlaunch.contract",
        "jaxlaunch.installation",
        "jaxlaunch.isolated",
        "jaxlaunch.programs",
        "jaxlaunch.regular_files",
        "jaxlaunch.reporting",
        "jaxlaunch.shown",
        "jaxlaunch.spelling",
        "jaxlaunch.user_cache",
        "jaxlaunch.user_modules",
        "jaxlaunch.records.agent_job",
        "jaxlaunch.records.journal",
    },
    "jaxlaunch": {
        "jaxlaunch.launcher.errors",
        "jaxlaunch.launcher.local.trained",
        "jaxlaunch.trainer.data.records",
        "jaxlaunch.trainer.data.source",
        "jaxlaunch.trainer.data.sources.open",
        "jaxlaunch.trainer.errors",
        "jaxlaunch.trainer.evaluation.trained",
        "jaxlaunch.trainer.generate.generator",
        "jaxlaunch.trainer.generate.harness",
        "jaxlaunch.trainer.generate.loaded",
        "jaxlaunch.trainer.loop.run",
        "jaxlaunch.trainer.models.foreign",
        "jaxlaunch.trainer.spec",
        "jaxlaunch.trainer.task",
        "jaxlaunch.trainer.tasks.classify",
        "jaxlaunch.trainer.tasks.dpo",
        "jaxlaunch.trainer.tasks.lm",
    },
    "jaxlaunch.launcher": {
        "jaxlaunch.accelerators",
        "jaxlaunch.contract",
        "jaxlaunch.installation",
        "jaxlaunch.isolated",
        "jaxlaunch.programs",
        "jaxlaunch.records",
        "jaxlaunch.regular_files",
        "jaxlaunch.shown",
        "jaxlaunch.spelling",
        "jaxlaunch.trainer.spec",
        "jaxlaunch.user_cache",
    },
    "jaxlaunch.launcher.agent": {
        "jaxlaunch.contract",
        "jaxlaunch.isolated",
        "jaxlaunch.records",
        "jaxlaunch.regular_files",
    },
}


def module_name(path: Path) -> str:
    """The name that the file is imported by: `launcher` and `trainer` are links in the package jaxlaunch."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name if name.partition(".")[0] == "jaxlaunch" else f"jaxlaunch.{name}"


def side(module: str) -> str:
    """jaxlaunch, jaxlaunch.launcher or jaxlaunch.trainer."""
    return longest(module, ("jaxlaunch.launcher", "jaxlaunch.trainer")) or "jaxlaunch"


SIDES = ("jaxlaunch", "launcher", "trainer")
SOURCES = {module_name(path): path for side in SIDES for path in sorted((ROOT / side).rglob("*.py"))}


def imported(source: str) -> Iterator[str]:
    """Every name that `source` imports anywhere, in full: `from a import b` reads a.b. Relative imports are refused."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (f"{module}.{name.name}" for name in names)
            case ast.ImportFrom():
                raise AssertionError("a relative import: write it in full")
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]):
                yield module
            case ast.Call(func=ast.Name(id="import_module" | "__import__"), args=[ast.Constant(value=str(module)), *_]):
                yield module


def longest(name: str, names: object) -> str | None:
    """`name` or its nearest parent that is in `names`."""
    while name and name not in names:  # type: ignore[operator]
        name = name.rpartition(".")[0]
    return name or None


IMPORTS = {module: set(imported(path.read_text())) for module, path in SOURCES.items()}
OURS = {
    module: {found for name in names if (found := longest(name, SOURCES)) not in (None, module)}
    for module, names in IMPORTS.items()
}
PLACE = {name: floor for floor, names in enumerate(FLOORS) for name in names}
MODULES = sorted(module for module, path in SOURCES.items() if path.name != "__init__.py" or path.read_text())


def test_every_package_is_an_empty_init_but_those_that_gather_names() -> None:
    written = {module for module, path in SOURCES.items() if path.name == "__init__.py" and path.read_text()}
    assert written == {"jaxlaunch", "jaxlaunch.trainer.spec"}


def test_what_a_program_imports_imports_nothing_before_it_is_called() -> None:
    tree = ast.parse(SOURCES["jaxlaunch"].read_text())
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    found = {name.partition(".")[0] for name in imported("\n".join(map(ast.unparse, at_once)))}
    assert found <= set(sys.stdlib_module_names) | {"jaxlaunch"}
    assert set(OURS["jaxlaunch.reporting"]) == {"jaxlaunch.shown"} and not OURS["jaxlaunch.shown"]


def test_no_import_runs_in_a_circle() -> None:
    try:
        TopologicalSorter(OURS).prepare()
    except CycleError as error:
        pytest.fail(f"circular imports: {' -> '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize("module", MODULES)
def test_no_file_imports_upward(module: str) -> None:
    home = longest(module, PLACE)
    assert home is not None, f"{module} is on no floor: place it in FLOORS"
    for name in OURS[module]:
        target = longest(name, PLACE)
        assert target is None or target == home or PLACE[target] > PLACE[home], f"{module} imports {name} upward"


@pytest.mark.parametrize("module", MODULES)
def test_a_side_imports_of_the_other_only_what_is_shared(module: str) -> None:
    shared = SHARED.get(longest(module, SHARED) or "", set())
    assert {name for name in OURS[module] if side(name) != side(module) and longest(name, shared) is None} == set()


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_the_packages_of_its_side(module: str) -> None:
    allowed = OUTSIDE[longest(module, OUTSIDE) or ""] | {"jaxlaunch"} | set(sys.stdlib_module_names)
    assert {name.partition(".")[0] for name in IMPORTS[module]} <= allowed


def test_the_agent_imports_nothing_of_the_launcher_but_itself() -> None:
    agents = [module for module in MODULES if module.startswith("jaxlaunch.launcher.agent.")]
    found = {name for module in agents for name in OURS[module] if name.startswith("jaxlaunch.launcher.")}
    assert {name for name in found if not name.startswith("jaxlaunch.launcher.agent")} == set()


def test_the_launcher_takes_of_the_agent_what_no_record_says() -> None:
    """`local` runs agents on this machine, and so uses more of them."""
    own = ("jaxlaunch.launcher.agent", "jaxlaunch.launcher.local")
    found = {name for module in MODULES if not module.startswith(own) for name in OURS[module]}
    assert {name.removeprefix(own[0]) for name in found if name.startswith(own[0])} == {
        ".host.environment",
        ".leader.run_folder",
        ".leader.starts",
        ".pack",
    }


def test_the_agents_hook_does_not_import_jax_before_the_program_does() -> None:
    tree = ast.parse(SOURCES["jaxlaunch.launcher.agent.site.jaxhook"].read_text())
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [name for name in imported("\n".join(map(ast.unparse, at_once))) if name.partition(".")[0] == "jax"]


def package(module: str) -> str:
    """The last name of a module's package; a file of its own at the top is its own."""
    names = module.split(".")
    return names[-1] if len(names) <= 3 and "records" not in names else names[-2]


def test_every_arrow_of_the_architecture_is_an_import() -> None:
    drawn = re.findall(r"^    (\w+) --> (.+)$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    found = {(package(module), package(name)) for module in MODULES for name in OURS[module]}
    arrows = {(source, target) for source, targets in drawn for target in targets.split(" & ")}
    assert len(arrows) > 30
    assert arrows <= found


def test_every_floor_is_lived_on() -> None:
    assert {name for name in PLACE if not any(longest(module, PLACE) == name for module in MODULES)} == set()


@pytest.mark.parametrize(
    "source",
    [
        "import a.b",
        "from a import b",
        "def late():\n    from a import b",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a.b",
        "import importlib\nimportlib.import_module('a.b')",
        "__import__('a.b')",
    ],
)
def test_an_import_is_seen_wherever_it_stands(source: str) -> None:
    assert "a.b" in set(imported(source))
