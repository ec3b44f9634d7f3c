"""The drawings of the pages: `python -m tests.drawings` draws those whose source has changed.

A page has a drawing as a block of Mermaid, which GitHub draws by itself. The site takes
docs/drawings/PAGE.svg in its place: Mermaid's own output, drawn once by a headless Chromium, in the
colours of the site's theme. It needs npm and chromium on PATH.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.screenshots import CHROMIUM

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A screen that is too narrow shows it so small, where its text can still be read, and scrolls.
SCALE = 0.65
MERMAID = "mermaid@11.17.2"
# The theme's variables have values for light and dark.
STYLE = """
.node rect, .node path {
  fill: var(--md-mermaid-node-bg-color); stroke: var(--md-mermaid-node-fg-color);
}
.marker, .marker path { fill: var(--md-mermaid-edge-color); stroke: var(--md-mermaid-edge-color); }
.flowchart-link { stroke: var(--md-mermaid-edge-color); }
.cluster rect {
  fill: var(--md-default-fg-color--lightest); stroke: var(--md-default-fg-color--lighter);
}
.edgeLabel .background { fill: var(--md-mermaid-label-bg-color); opacity: 1; }
text, tspan { fill: var(--md-mermaid-label-fg-color); font-family: var(--md-mermaid-font-family); }
"""
PAGE = """<body><script src="%s"></script><script>
mermaid.initialize({
  startOnLoad: false, htmlLabels: false, themeCSS: %s, flowchart: {htmlLabels: false}
});
mermaid.render("drawing", %s).then(({svg}) => { document.body.innerHTML = svg; });
</script></body>"""


def drawing_path(page: Path) -> Path:
    """Return the path of a page's drawing."""
    return DOCS / "drawings" / f"{page.stem}.svg"


def source_digest(source: str) -> str:
    """Return what a drawing records of its source."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def find_sources() -> Iterator[tuple[Path, str]]:
    """Yield each page that has a drawing, with its source."""
    for page in sorted(DOCS.glob("*.md")):
        if match := BLOCK.search(page.read_text(encoding="utf-8")):
            yield page, match[1]


def is_current(page: Path, source: str) -> bool:
    """Check that the committed drawing was made from this source."""
    return drawing_path(page).exists() and f'data-source="{source_digest(source)}"' in drawing_path(
        page
    ).read_text(encoding="utf-8")


def draw_source(source: str, folder: Path) -> str:
    """Return the SVG of a source, drawn by Mermaid's script in `folder`."""
    (folder / "page.html").write_text(
        PAGE
        % (
            folder / "node_modules/mermaid/dist/mermaid.min.js",
            json.dumps(STYLE),
            json.dumps(source),
        )
    )
    command = [*CHROMIUM, "--virtual-time-budget=20000", "--dump-dom", f"file://{folder}/page.html"]
    dom = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout
    (svg,) = re.findall(r"<svg .*</svg>", dom, re.DOTALL)
    plain = re.sub(
        r'\s+|data-[\w-]+="[^"]*" ?', lambda match: " " if match[0].isspace() else "", svg
    )
    short = re.sub(r"(\d+\.\d)\d+", r"\1", plain)
    sized = re.sub(
        r"max-width: ([\d.]+)px;",
        lambda width: f"{width[0]} min-width: {SCALE * float(width[1]):.0f}px;",
        short,
    )
    return sized.replace("<svg ", f'<svg data-source="{source_digest(source)}" ', 1)


def main() -> None:
    """Draw what is not current."""
    stale = [(page, source) for page, source in find_sources() if not is_current(page, source)]
    with tempfile.TemporaryDirectory() as folder:
        if stale:
            install = [
                "npm",
                "install",
                "--no-audit",
                "--no-fund",
                "--ignore-scripts",
                "--prefix",
                folder,
                MERMAID,
            ]
            subprocess.run(install, check=True, stdout=sys.stderr)
        for page, source in stale:
            drawing_path(page).parent.mkdir(exist_ok=True)
            drawing_path(page).write_text(
                draw_source(source, Path(folder)) + "\n", encoding="utf-8"
            )
            print(drawing_path(page).relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
