"""Long pages of docs/ are several pages of the site, cut at their headings of the second level.

In the repository and for `launcher help` such a page is whole. Its own page on the site keeps what
is before the first heading, lists the pieces, and knows to which of them each anchor has moved
(docs/theme/search.js follows).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from jaxlaunch.launcher.cli import help


def _topic(topics: Mapping[str, tuple[str, ...]]) -> Callable[[str], str]:
    """Return a function from headings to topics; it raises KeyError for unlisted headings."""
    listed = {heading: topic for topic, headings in topics.items() for heading in headings}
    return listed.__getitem__


TROUBLESHOOTING = {
    "Before a job is accepted": ("Access to the cluster", "Rejected requests"),
    "While a job waits": ("Queues", "Pending pods"),
    "While pods start": ("Images", "Container start", "Volumes, Secrets and ConfigMaps"),
    "Devices, hosts and hangs": (
        *("Devices and backends", "Rendezvous and lost hosts", "Hangs and timeouts"),
        "Communication between processes",
    ),
    "Errors of the training program": (
        *("Out of memory", "Shapes, sharding and tracers", "Checkpoints and storage"),
        "Data and loss",
    ),
    "After a job ended": (
        "Exit codes",
        "Restarts and evictions",
        "Deletion",
        "States that are not errors",
    ),
    "What explain reports": ("What explain reports",),
}
KUBERNETES = {
    "Prepare a cluster": (
        "What a cluster needs",
        "A namespace for a team",
        "Cluster defaults",
        "Trying it",
    ),
    "Rights and users": ("What a submitter may do", "The pods' user"),
    "Nodes, objects and many hosts": ("Which nodes", "What is created", "Many hosts", "Output"),
    "Failures and what remains": ("Failure, eviction and preemption", "After the pods"),
}
# A page -> the title of the piece that has a heading.
SPLIT: Mapping[str, Callable[[str], str]] = {
    "job-yaml.md": str,
    "cli.md": str,
    "api.md": str,
    "platforms.md": str,
    "troubleshooting.md": _topic(TROUBLESHOOTING),
    "kubernetes.md": _topic(KUBERNETES),
    "project/benchmarks-results.md": str,
}


@dataclass(frozen=True)
class Piece:
    """One page of the site: its title, path and Markdown, and the anchors that only it has."""

    title: str
    path: str
    text: str
    anchors: tuple[str, ...]


def split_page(path: str, text: str) -> list[Piece]:
    """Return the pieces of a page, its own first; a page that is not long is one piece."""
    start, *sections = _sections(text) if path in SPLIT else [text]
    topics: dict[str, list[str]] = {}
    for section in sections:
        topics.setdefault(SPLIT[path](_title(section)), []).append(section)
    made = [_piece(path, title, sections) for title, sections in topics.items()]
    listed = "".join(f"- {', '.join(_links(sections))}\n" for sections in topics.values())
    overview = f"{start}\n\n## Pages\n\n{listed}" if made else start
    return [Piece(_title(start), path, overview, tuple(help.list_anchors(start))), *made]


def _piece(path: str, title: str, sections: list[str]) -> Piece:
    text = "\n\n".join(sections)
    if len(sections) == 1:
        text = _lifted(text)
    elif _title(sections[0]) == title:
        text = text.removeprefix("#")
    else:
        text = f"# {title}\n\n{text}"
    name = re.sub(r"\W+", "-", title.lower()).strip("-")
    return Piece(
        title.replace("`", ""),
        f"{path.removesuffix('.md')}/{name}.md",
        text,
        tuple(help.list_anchors(text)),
    )


def _sections(text: str) -> list[str]:
    """Return the text before the first heading of level 2, and each such heading with its text."""
    lines = text.splitlines()
    starts = [number for number, level, _ in help.list_headings(text) if level == 2]
    return [
        "\n".join(lines[start:end]).strip()
        for start, end in itertools.pairwise([0, *starts, len(lines)])
    ]


def _title(section: str) -> str:
    return section.partition("\n")[0].lstrip("# ")


def _links(sections: list[str]) -> Iterator[str]:
    for section in sections:
        yield f"[{_title(section)}](#{help.make_anchor(_title(section))})"


def _lifted(text: str) -> str:
    """Return the text with every heading one level higher."""
    lines = text.splitlines()
    for number, _, _ in help.list_headings(text):
        lines[number] = lines[number].removeprefix("#")
    return "\n".join(lines)
