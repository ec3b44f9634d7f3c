"""Sources: what one module alone may do, and platforms of which every fact has its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from jaxlaunch import accelerators
from jaxlaunch.accelerators import ACCELERATORS, Source
from jaxlaunch.launcher.cli import output
from jaxlaunch.launcher.kubernetes import labels
from jaxlaunch.launcher.platforms import facts, runtime, table
from tests import platforms_page

ROOT = Path(__file__).parents[2]
FACTS = (*(platforms_page.platform_module(name) for name in table.PLATFORMS), runtime)
# Modules of the command line that may write in a way of their own.
WRITERS = {
    "data.py": ["json.dumps("],  # the request to the trainer's process, which is not output
    "models.py": ["json.dumps("],  # a file in the run folder
    "main.py": ["click.echo("],  # errors, before all else
    "schema.py": ["json.dumps("],  # values in the text of its page
}


def find_labels_spelled_twice() -> Iterator[str]:
    for path in (ROOT / "jaxlaunch" / "launcher").rglob("*.py"):
        if path == Path(labels.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if any(f"{domain}/" in node.value for domain in labels.RESERVED_DOMAINS):
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield f"{place}: {node.value} is not in labels.py"


def find_modules_that_write_by_themselves() -> Iterator[str]:
    for path in Path(output.__file__).parent.glob("*.py"):
        text = path.read_text()
        used = [
            word for word in ("print(", "click.echo(", "json.dumps(", "launcher: {") if word in text
        ]
        if path.name != "output.py" and used != WRITERS.get(path.name, []):
            yield f"{path.relative_to(ROOT)} uses {used}: write by output.py"


def find_facts_without_a_source() -> Iterator[str]:
    for module in (*FACTS, table):
        public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        for fact in platforms_page.find_facts(public):
            if fact.source is None or not fact.source.title or not fact.source.location:
                yield f"{module.__name__}: {fact}"


def find_constants_of_platforms_that_are_no_facts() -> Iterator[str]:
    elsewhere = {**vars(facts), **vars(accelerators)}
    for module in FACTS:
        for name, value in vars(module).items():
            is_constant = name.isupper() and not name.startswith("_") and name not in elsewhere
            is_fact = isinstance(value, Source) or any(platforms_page.find_facts(value))
            if is_constant and not is_fact:
                yield f"{module.__name__}.{name}"


def find_unused_sources() -> Iterator[str]:
    for module in FACTS:
        used = {fact.source for fact in platforms_page.find_facts(dict(vars(module)))}
        yield from (
            f"{module.__name__}: {source}"
            for source in set(platforms_page.find_sources(module)) ^ used
        )


def find_accelerators_of_no_platform() -> Iterator[str]:
    yield from {kind for kinds in table.NODES.values() for kind in kinds} ^ set(ACCELERATORS)
