"""Pages: links, headings, the site's navigation, and facts that the code has too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from jaxlaunch import contract
from jaxlaunch.launcher import troubleshooting
from jaxlaunch.launcher.agent.host.environment import TRAINER_VARIABLES
from jaxlaunch.launcher.cli import help
from jaxlaunch.launcher.diagnose.doctor.checks import CHECKS, SERVER
from jaxlaunch.launcher.diagnose.doctor.checks import section_link as see_check
from jaxlaunch.launcher.diagnose.explain.situations import SITUATIONS, section_link
from jaxlaunch.launcher.job import load
from tests import drawings, generated
from tests.found import PAGE, ROWS
from tests.lint.words import faults
from tests.messages import texts

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
READ = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "helm/launcher/README.md",
    *PAGES,
]
_FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
# What people type into the search of the site, which looks through the words of all pages.
SEARCHED = (
    *("timeout", "tensor parallel", "mixed precision", "gradient checkpointing", "torchrun"),
    *("OOM", "NCCL", "multislice", "preemption", "root cause"),
)
# Pages that are generated as a whole, and limits of the others.
GENERATED_PAGES = ("api.md", "cli.md", "job-yaml.md", "platforms.md")
MAX_PAGES, MAX_WORDS = 55, 65_000
# Situations of a job that needs nobody's help.
WELL = frozenset(
    [
        "creating",
        "queued",
        "gathering",
        "running",
        "restarted",
        "restarting",
        "stopping",
        "stopped",
        "done",
        "deleting",
        "starting",
        "scaling-up",
        "init-runs",
    ]
)


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files and anchors of a page's relative links, except those in code."""
    text = re.sub(r"`[^`\n]*`", "`code`", _FENCED.sub("", page.read_text(encoding="utf-8")))
    for target in _LINK.findall(text):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield ((page.parent / path).resolve() if path else page), anchor


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, by the rule of GitHub and Python-Markdown."""
    headings = re.findall(
        r"^#+ (.+)$", _FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    plain = (
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def jobs() -> Iterator[tuple[str, str]]:
    """Yield every whole job that a page shows, with its place."""
    for page in (ROOT / "README.md", *PAGES):
        for number, block in enumerate(
            re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        ):
            if re.search(r"^name: ", block, re.MULTILINE) and re.search(
                r"^accelerator: ", block, re.MULTILINE
            ):
                yield f"{page_name(page)}, yaml {number}", block


def find_dead_links() -> Iterator[str]:
    for page in READ:
        for path, anchor in links(page):
            if not path.exists():
                yield f"{page_name(page)} links to {path}, which does not exist"
            elif anchor and path.suffix == ".md" and anchor not in anchors(path):
                yield f"{page_name(page)} links to {path.name}#{anchor}, which is no heading"


def find_pages_outside_of_the_site() -> Iterator[str]:
    def listed(nav: Any) -> Iterator[str]:
        for entry in (
            [nav] if isinstance(nav, str) else nav.values() if isinstance(nav, dict) else nav
        ):
            yield from [entry] if isinstance(entry, str) else listed(entry)

    nav = list(
        listed(
            yaml.safe_load((ROOT / "mkdocs.yml").read_text().replace("!!python/name:", ""))["nav"]
        )
    )
    names = [page.relative_to(DOCS).as_posix() for page in PAGES]
    yield from (
        f"{name} is not in mkdocs.yml exactly once"
        for name in {*nav, *names}
        if nav.count(name) != 1
    )
    yield from (f"mkdocs.yml names {name}, which is no page" for name in nav if name not in names)


def find_lonely_pages() -> Iterator[str]:
    """Yield pages without links from or to others, or that the first page does not list."""
    reached = {path for page in PAGES for path, _ in links(page) if path != page}
    listed = {path for path, _ in links(DOCS / "index.md")}
    for page in PAGES:
        if page not in reached and page != DOCS / "index.md":
            yield f"no page links to {page_name(page)}"
        if all(path == page for path, _ in links(page)):
            yield f"{page_name(page)} links to no other page"
        if page.parent == DOCS and page not in listed and page.stem != "index":
            yield f"docs/index.md does not list {page_name(page)}"


def find_words_that_no_page_has() -> Iterator[str]:
    whole = "".join(page.read_text(encoding="utf-8").lower() for page in PAGES)
    yield from (words for words in SEARCHED if words.lower() not in whole)


def find_blocks_that_the_site_does_not_know() -> Iterator[str]:
    """Yield blocks of a language in two words (`sh cluster`), which the site does not accept."""
    two_words = re.compile(r"^ *```\S+ +\S.*", re.MULTILINE)
    yield from (
        f"{page_name(page)}: {block}"
        for page in PAGES
        for block in two_words.findall(page.read_text())
    )


def find_old_drawings() -> Iterator[str]:
    for page, source in drawings.find_sources():
        if not drawings.is_current(page, source):
            yield f"{page_name(page)}: run python -m tests.drawings"
    for page in PAGES:
        if len(drawings.BLOCK.findall(page.read_text(encoding="utf-8"))) > 1:
            yield f"{page_name(page)} has more than one drawing"


def find_files_that_are_not_current() -> Iterator[str]:
    """Yield files that are made from the code and differ from what it makes now."""
    texts_now = {
        name: make((ROOT / name).read_text(encoding="utf-8"))
        for name, make in generated.files().items()
    }
    for name, text in (texts_now | generated.badges()).items():
        if (ROOT / name).read_text(encoding="utf-8") != text:
            yield f"{name}: run make generated"


def find_wrong_jobs() -> Iterator[str]:
    for place, text in jobs():
        try:
            load.parse_job(text)
        except Exception as error:
            yield f"{place}: {error}"


def find_sections_that_help_does_not_show() -> Iterator[str]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        shown = {anchor for anchor in help.list_anchors(text) if help.find_section(text, anchor)}
        yield from (f"{page_name(page)}#{anchor}" for anchor in shown ^ anchors(page))


def find_wrong_variables() -> Iterator[str]:
    text = (DOCS / "environment.md").read_text()
    defined = {value for value in vars(contract).values() if isinstance(value, str)}
    named = set(re.findall(r"`(JAX(?:LAUNCH)?_[A-Z_]+[A-Z])`", text)) - {
        "JAX_PLATFORMS",
        "JAX_OPTIMIZATION_LEVEL",
    }
    yield from (
        f"docs/environment.md names {name}, which does not exist" for name in named - defined
    )
    of_platforms = {name for of_platform in TRAINER_VARIABLES.values() for name in of_platform}
    for name in (*of_platforms, *contract.PHASES):
        if f"`{name}`" not in text:
            yield f"docs/environment.md does not name {name}"


def find_gaps_of_troubleshooting() -> Iterator[str]:
    screens, answers = [row[0].strip() for row in ROWS], "".join(row[2] for row in ROWS)
    yield from (
        f"a row is not whole: {row}"
        for row in ROWS
        if len(row) != 4 or not all(map(str.strip, row))
    )
    yield from (f"explained twice: {text}" for text in {*screens} if screens.count(text) > 1)
    yield from (f"situation {name} has no row" for name in SITUATIONS if f"`{name}`" not in answers)
    if {name for name in SITUATIONS if section_link(name) is None} != WELL:
        yield (
            "a situation in which something is wrong has no link, or one in which all is "
            "well has one"
        )
    for code, outcome in contract.OUTCOMES.items():
        row = next((row for row in ROWS if f"`exit {code}`" in row[0]), None)
        if row is None or f"{outcome.cause} ({code})" not in row[2]:
            yield f"exit code {code} has no row with its cause {outcome.cause}"
    yield from (
        f"exit code {code} of a signal is not named"
        for code in (134, 137, 139, 143)
        if f"`exit {code}`" not in PAGE
    )
    codes = {
        outcome.cause: outcome.code
        for outcome in contract.OUTCOMES.values()
        if outcome.cause != "killed"
    }
    for cause, code in re.findall(r"\b([a-z_]+) \((\d+)\)", PAGE):
        if codes.get(cause, int(code)) != int(code):
            yield f"{cause} ({code}): its code is {codes[cause]}"
    targets = [troubleshooting.command_for_code(code) for code in contract.OUTCOMES]
    targets += [*map(section_link, SITUATIONS), *(see_check(check) for check in (SERVER, *CHECKS))]
    named = {target.partition("#")[2] for target in targets if target is not None}
    yield from (
        f"a command links to #{anchor}" for anchor in named - anchors(ROOT / troubleshooting.PAGE)
    )


def find_unsorted_terms() -> Iterator[str]:
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    if len(terms) < 20 or terms != sorted(dict.fromkeys(terms), key=str.lower):
        yield "docs/glossary.md: its terms are not each there once, in order"


def find_forbidden_words() -> Iterator[str]:
    yield from (fault for name, text in texts() for fault in faults(name, text))


def find_other_oldest_kubernetes() -> Iterator[str]:
    """Yield pages that name another oldest Kubernetes than kubeVersion of the chart."""
    chart = (ROOT / "helm/launcher/Chart.yaml").read_text(encoding="utf-8")
    oldest = re.findall(r'kubeVersion: ">=(\d+\.\d+)', chart)
    pages = ("README.md", "docs/how-do-i.md", "docs/kubernetes.md", "helm/launcher/README.md")
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        named = re.findall(r"Kubernetes \(?(\d+\.\d+) or\s+newer", text)
        if {*named} != {*oldest}:
            yield f"{page} names Kubernetes {', '.join(named) or 'of no version'}, not {oldest[0]}"


def count_words(page: Path) -> int:
    """Return the number of words of a page, without those that `make generated` writes."""
    if page.name in GENERATED_PAGES:
        return 0
    text = page.read_text(encoding="utf-8").partition("\n| situation |")[0]
    generated_row = r"^\| (?:`jaxlaunch_|\d+ \||Equal|Different).*\n"
    return len(re.sub(generated_row, "", text, flags=re.MULTILINE).split())


def find_too_many_pages_or_words() -> Iterator[str]:
    """Yield a fault if docs/ has more than a reader can find things in; delete repetition first."""
    words = sum(map(count_words, PAGES))
    if len(PAGES) > MAX_PAGES or words > MAX_WORDS:
        yield f"docs/ has {len(PAGES)} pages (at most {MAX_PAGES}) and {words} words ({MAX_WORDS})"


def find_other_versions_of_controllers() -> Iterator[str]:
    """Yield versions of JobSet and Kueue on pages that differ from those of k8s/kind/up.sh."""
    script = (ROOT / "k8s/kind/up.sh").read_text(encoding="utf-8")
    installed = dict(re.findall(r"^(jobset|kueue)=(v[\d.]+)$", script, re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name, version in re.findall(
            r"kubernetes-sigs/(\w+)/releases/download/(v[\d.]+)/", text
        ):
            if version != installed[name]:
                yield f"{page_name(page)} installs {name} {version}, not {installed[name]}"


def find_a_long_readme() -> Iterator[str]:
    text, example = (ROOT / "README.md").read_text(), (ROOT / "examples/digits.yaml").read_text()
    job = example.partition("\n")[2]  # the first line is a comment
    if len(text.splitlines()) > 150:
        yield "README.md has more than 150 lines"
    first = re.search(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if (
        first is None
        or first[1] != job
        or f"```yaml\n{job}```" not in (DOCS / "quickstart.md").read_text()
    ):
        yield "README.md and docs/quickstart.md do not show examples/digits.yaml first"


def find_folders_outside_of_the_tree() -> Iterator[str]:
    """Yield what the tree of docs/architecture.md leaves out, or names without being there."""
    tree = (DOCS / "architecture.md").read_text().split("## The files")[1].split("```")[1]
    for package in ("launcher", "trainer"):
        rows = (
            tree.partition(f"jaxlaunch/{package}/\n")[2].partition("\njaxlaunch/")[0].splitlines()
        )
        folders = {f"{path.parent.name}/" for path in (ROOT / "jaxlaunch" / package).glob("*/*.py")}
        named = {row.split()[0] for row in rows}
        yield from (
            f"{package}/{name}" for name in {name for name in named if name.endswith("/")} ^ folders
        )
        yield from (
            f"{package}/{name}"
            for name in named
            if not (ROOT / "jaxlaunch" / package / name).exists()
        )


def find_an_example_that_differs_from_its_page() -> Iterator[str]:
    from tests import tutorials

    shown = {
        step.file: step.text
        for step in tutorials.find_steps((DOCS / "your-script.md").read_text())
        if step.file
    }
    if shown.keys() != {"train.py", "mine.yaml"}:
        yield f"docs/your-script.md shows {sorted(shown)}"
    for file, text in shown.items():
        example = (ROOT / "examples" / "own_program" / file).read_text()
        example = example.split('"""', 2)[2] if file.endswith(".py") else example
        if example.strip() != text.strip():
            yield f"examples/own_program/{file} is not that of docs/your-script.md"
