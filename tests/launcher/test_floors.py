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
    ("jaxlaunch", "launcher.cli"),
    ("launcher.plan",),
    ("launcher.local", "launcher.profiling"),
    ("launcher.doctor", "launcher.explain", "launcher.lifecycle", "launcher.logs"),
    ("launcher.manifests", "launcher.status"),
    ("launcher.cluster", "launcher.job"),
    ("launcher.agent", "launcher.kube", "launcher.yaml12"),
    ("launcher.troubleshooting", "launcher.wording"),
    ("launcher.errors",),
    ("trainer.__main__",),
    ("trainer.evaluation", "trainer.export", "trainer.plan", "trainer.text.prepare"),
    ("trainer.loop",),
    ("trainer.tasks", "trainer.train"),
    ("trainer.generate",),
    ("trainer.process", "trainer.step"),
    ("trainer.adapters",),
    ("trainer.models",),
    ("trainer.attention", "trainer.data.sources", "trainer.task"),
    ("trainer.text",),
    ("trainer.data.sources.files", "trainer.data.sources.share"),
    (
        "trainer.checkpoint",
        "trainer.data",
        "trainer.data.sources.cache",
        "trainer.huggingface",
        "trainer.numerics",
        "trainer.optim",
        "trainer.parallel",
        "trainer.preflight",
        "trainer.profiling",
    ),
    ("trainer.distributed", "trainer.metrics", "trainer.buckets", "trainer.plugin"),
    ("trainer.errors", "trainer.spec"),
    ("trainer.adapters.keys", "trainer.optim.keys"),
    ("trainer.architectures", "trainer.contract"),
    ("trainer.presets",),
)

# What each side may import that is neither ours nor the standard library's. The longest name that fits counts.
# The base install holds only the launcher's; TRAINER is the extra [train].
LAUNCHER = {"click", "kubernetes", "pydantic", "pydantic_core", "urllib3", "websocket", "yaml"}
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
    "jaxlaunch": set(),  # in a function alone: what it imports is not there in every install
    "launcher": LAUNCHER,
    "launcher.agent": set(),  # runs in images that hold nothing of ours but its zipapp
    "launcher.agent.site.jaxhook": {"jax"},  # in functions that JAX's own import calls
    "trainer": TRAINER,
    "trainer.contract": set(),  # travels in that zipapp
    "trainer.models.foreign": TRAINER | {"haiku"},  # an extra
    "trainer.generate.harness": TRAINER | {"lm_eval"},  # which calls it
    "trainer.architectures": LAUNCHER,
    "trainer.presets": set(),
    "trainer.spec": LAUNCHER,  # the launcher validates with it
    "trainer.optim.keys": LAUNCHER,
    "trainer.adapters.keys": LAUNCHER,
    "trainer.errors": set(),
}
SHARED = {
    "jaxlaunch": {
        "launcher.local.run_folders",
        "trainer.evaluation.loaded",
        "trainer.generate.loaded",
        "trainer.loop.run",
    },
    "launcher": {"trainer.contract", "trainer.spec"},
    "launcher.agent": {"trainer.contract"},
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


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
MODULES = sorted(module for module, path in SOURCES.items() if path.name != "__init__.py" or module == "jaxlaunch")


def test_every_package_is_an_empty_init() -> None:
    written = {module for module, path in SOURCES.items() if path.name == "__init__.py" and path.read_text()}
    assert written == {"jaxlaunch"}


def test_what_a_program_imports_imports_nothing_before_it_is_called() -> None:
    tree = ast.parse(SOURCES["jaxlaunch"].read_text())
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    found = {name.partition(".")[0] for name in imported("\n".join(map(ast.unparse, at_once)))}
    assert found <= set(sys.stdlib_module_names) | {"jaxlaunch"}
    assert set(OURS["jaxlaunch.reporting"]) == set()


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
    side = module.partition(".")[0]
    shared = SHARED.get(longest(module, SHARED) or "", set())
    assert {name for name in OURS[module] if name.partition(".")[0] != side} <= shared


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_the_packages_of_its_side(module: str) -> None:
    allowed = (
        OUTSIDE[longest(module, OUTSIDE) or ""] | {"jaxlaunch", "launcher", "trainer"} | set(sys.stdlib_module_names)
    )
    assert {name.partition(".")[0] for name in IMPORTS[module]} <= allowed


def test_the_agent_imports_nothing_of_the_launcher_but_itself() -> None:
    agents = [module for module in MODULES if module.startswith("launcher.agent.")]
    found = {name for module in agents for name in OURS[module] if name.startswith("launcher.")}
    assert {name for name in found if not name.startswith("launcher.agent")} == set()


def test_the_agents_hook_does_not_import_jax_before_the_program_does() -> None:
    tree = ast.parse(SOURCES["launcher.agent.site.jaxhook"].read_text())
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [name for name in imported("\n".join(map(ast.unparse, at_once))) if name.partition(".")[0] == "jax"]


def package(module: str) -> str:
    """The last name of a module's package; a file of its own at the top is its own."""
    names = module.split(".")
    return names[-1] if len(names) <= 2 else names[-2]


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
