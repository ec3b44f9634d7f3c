"""Words that users meet: plain technical English, and one word for one thing (docs/glossary.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest

from launcher.cli import main
from launcher.job import reference
from tests import house

ROOT = Path(__file__).parents[2]
# A pattern -> what to write instead. Each is unusual English, or a second word for a term of the glossary.
FORBIDDEN: Mapping[str, str] = {
    r"mend(s|ed|ing)?": "fix",
    r"for want of": "because … is missing",
    r"can(not)? be had": "is (not) available",
    r"look(s|ing)? on|onlooker": "view, viewer",
    r"(yours|theirs) to": "you (they) can, or must",
    r"stand(s|ing)? in|stand(s|ing)? (above|below|beside|there|in the place)": "replaces, is, supplies defaults for",
    r"lie(s)?|lay": "is, is placed",
    r"(is|are|was|were|and) said": "is reported",
    r"in (one|a) sentence": "with an error",
    r"rehears\w*": "dry run",
    r"once more": "again",
    r"comes? by": "reaches, arrives",
    r"unasked": "by default, without being asked",
    r"anew": "again",
    r"talks? (to|by|between)": "connects to, communicates over, is between",
    r"shared out": "distributed",
    r"meant for": "designed for, for",
    r"beside": "next to (a place), in addition to",
    r"who(so)?ever": "anyone who, the user who",
    r"one's own": "your own",
    r"thereof|therein|whence|hence|hitherto|lest|ere": "plain words",
    r"restart budgets?": "restart limits; budgets are timeouts",
    r"(un)?charged": "(does not) count toward the limit",
    r"verdicts?": "job result; `verdict` only as the name of the field",
    r"(?<!TPU )generations?(?! of (TPU|text))": "JobSet restart; `generation` only as the name of the field",
}
PATTERNS = {re.compile(rf"\b({pattern})\b", re.IGNORECASE): instead for pattern, instead in FORBIDDEN.items()}
OF_CONTRIBUTORS = {"docs/architecture.md"}  # the code's own words, explained there


def _prose(page: str) -> str:
    """The text of a page without code and the targets of links; its lines stay where they are."""
    page = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), page, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)", "·", page)


def _pages() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))):
        name = path.relative_to(ROOT).as_posix()
        if name not in OF_CONTRIBUTORS:
            yield name, _prose(path.read_text())


def _comments() -> Iterator[tuple[str, str]]:
    """Of the files that users copy or configure."""
    others = (ROOT / "helm/launcher/values.yaml", ROOT / "k8s/profile.yaml")
    for path in (*sorted((ROOT / "examples").glob("*.yaml")), *others):
        lines = (line.partition("#")[2] for line in path.read_text().splitlines())
        yield path.relative_to(ROOT).as_posix(), _prose("\n".join(lines))


def _help(command: click.Command, name: str, context: click.Context) -> Iterator[tuple[str, str]]:
    texts = [command.help or "", *(getattr(each, "help", None) or "" for each in command.params)]
    yield f"{name} --help", _prose("\n".join(texts))
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from _help(found, f"{name} {each}", context)


def _messages() -> Iterator[tuple[str, str]]:
    """The string constants of the sources that read as text, docstrings aside; each on a line of its own.

    `generation` and `verdict` are left out: they are words of the code too.
    """
    for path, tree in house.sources().items():
        blocks = [node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | house.Function)]
        docstrings = {id(body[0].value) for body in blocks if body and isinstance(body[0], ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                text = re.sub(r"\b(generation|verdict)\b", "·", " ".join(_prose(node.value).split()))
                if " " in text:
                    yield f"{path}:{node.lineno}", text


def texts() -> Iterator[tuple[str, str]]:
    yield from _pages()
    yield from _comments()
    yield from _help(main.cli, "launcher", click.Context(main.cli))
    yield "launcher schema", _prose(reference.markdown())
    yield from _messages()


def _faults(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, instead in PATTERNS.items():
            if (found := pattern.search(line)) is not None:
                yield f"{name}:{number}: {found[0]!r}: write {instead}: {line.strip()[:160]}"


def test_no_text_for_users_has_a_forbidden_word() -> None:
    assert [fault for name, text in texts() for fault in _faults(name, text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "fix it, or mend the file",
        "Who looks on may read",
        "this verdict says",
        "the next generation of pods",
        "it LIES",
    ],
)
def test_a_forbidden_word_is_found(text: str) -> None:
    assert list(_faults("page", _prose(text)))


@pytest.mark.parametrize(
    "text", ["the field `verdict`", "a TPU generation", "recommended", "believes", "```\nlie\n```", "[x](verdict.md)"]
)
def test_code_links_and_other_words_are_not(text: str) -> None:
    assert list(_faults("page", _prose(text))) == []


def test_the_glossary_has_each_term_once_in_order() -> None:
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(terms) >= 20
    assert terms == sorted(dict.fromkeys(terms), key=str.lower)
