"""The data of the platforms: every fact has its source, and docs/platforms.md says them all."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from jaxlaunch import accelerators
from jaxlaunch.accelerators import KNOWN, Source
from jaxlaunch.launcher.platforms import facts, runtime, table
from tests import platforms_page

PAGE = Path(__file__).parents[3] / "docs" / "platforms.md"
FACTS = (*(platforms_page.module(where) for where in table.PLATFORMS), runtime)


@pytest.mark.parametrize("module", (*FACTS, table), ids=lambda module: module.__name__)
def test_every_fact_names_its_source(module: ModuleType) -> None:
    found = list(
        platforms_page.facts({name: value for name, value in vars(module).items() if not name.startswith("_")})
    )
    assert found
    for fact in found:
        assert fact.source is not None and fact.source.title and fact.source.where, fact


@pytest.mark.parametrize("module", FACTS, ids=lambda module: module.__name__)
def test_nothing_is_said_of_a_platform_but_as_a_fact(module: ModuleType) -> None:
    """Constants of the modules are facts, mappings of facts, or sources."""
    elsewhere = {**vars(facts), **vars(accelerators)}
    constants = {name: value for name, value in vars(module).items() if name.isupper() and name not in elsewhere}
    for name, value in constants.items():
        assert name.startswith("_") or isinstance(value, Source) or list(platforms_page.facts(value)), name


@pytest.mark.parametrize("module", FACTS, ids=lambda module: module.__name__)
def test_every_source_is_that_of_a_fact(module: ModuleType) -> None:
    used = {fact.source for fact in platforms_page.facts({name: value for name, value in vars(module).items()})}
    assert set(platforms_page.sources(module)) == used


def test_every_accelerator_is_known_somewhere_and_no_other() -> None:
    assert {kind for known in table.NODES.values() for kind in known} == set(KNOWN)


def test_the_page_is_what_the_data_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == platforms_page.markdown()
