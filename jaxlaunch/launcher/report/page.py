"""HTML pages, each a single file with its data, scripts and styles that loads nothing else.

Untrusted data is in the page as JSON, and the scripts insert it as text and never as HTML. The
content security policy of the page allows no other script.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import importlib.resources
import json
from collections.abc import Iterable
from typing import Any

from jaxlaunch.launcher.wording import escape_controls

_SCRIPTS = (
    *("uPlot.iife.min.js", "charts.js", "classes.js", "page.js", "tables.js", "sweep.js"),
    "start.js",
)
_STYLES = ("uPlot.min.css", "page.css")
_HTML_ESCAPES = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)


def render_page(kind: str, title: str, data: dict[str, Any]) -> str:
    """Return a page. `kind` selects the script that draws it: run, runs, sweep or compare."""
    script, style = _read_assets(_SCRIPTS), _read_assets(_STYLES)
    sources = f"script-src '{_policy_digest(script)}'; style-src '{_policy_digest(style)}'"
    policy = (
        f"default-src 'none'; {sources}; img-src data:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'"
    )
    body = (
        "<noscript><p>This page is drawn by its own script, which this browser does not "
        "run.</p></noscript>",
        f'<script type="application/json" id="data">{to_json({**data, "kind": kind})}</script>',
        f"<script>{script}</script>",
    )
    return _render_document(title, policy, "no-referrer", style, body)


def render_form(title: str, body: Iterable[str]) -> str:
    """Return a page without scripts that may send forms to its own server."""
    style = _read_assets(("page.css",))
    policy = (
        f"default-src 'none'; style-src '{_policy_digest(style)}'; img-src data:; base-uri "
        "'none'; form-action 'self'"
    )
    return _render_document(title, policy, "same-origin", style, body)


def _render_document(
    title: str, policy: str, referrer: str, style: str, body: Iterable[str]
) -> str:
    lines = "\n".join(body)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="{referrer}">
<link rel="icon" href="data:,">
<title>{html.escape(escape_controls(title))}</title>
<style>{style}</style>
</head>
<body>
{lines}
</body>
</html>
"""


def to_json(data: Any) -> str:
    """Return JSON that HTML can embed. Raises ValueError for a number that is not finite."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_HTML_ESCAPES).encode("utf-8", "backslashreplace").decode()


@functools.cache
def _read_assets(names: tuple[str, ...]) -> str:
    folder = importlib.resources.files("jaxlaunch.launcher.report") / "web"
    return "\n".join((folder / name).read_text("utf-8") for name in names)


def _policy_digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
