"""Record what README shows: `python -m tests.recording` writes docs/pictures from a real run.

Four hosts train on this machine. One of them is killed (SIGKILL of its agent with its processes),
the run names the lost host, and continues from its newest checkpoint.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

from tests.launcher.report import browser

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
JOB = (
    "name=digits",
    "hosts=4",
    "accelerator.per_host=2",
    "train.epochs=30",
    "train.checkpoint.every=50",
)
COMMAND = "launcher run digits.yaml"
KILLED = 2  # the host
KILL_AT = "step 120/"
LAUNCHER = Path(sys.prefix) / "bin" / "launcher"
# The terminal: characters, and px.
COLUMNS, ROWS = 96, 17
WIDTH, LINE, LEFT, TOP = 800, 19, 14, 44
LONGEST_S, HELD_S = 0.5, 5.0
# Names this machine: an agent that came too soon, and comes again.
HERE = re.compile(r"\(\S+, pod [0-9a-f-]{36}\)")
LOUD = re.compile(r"lost|killed|restarting|another agent")


def record_run(folder: Path) -> list[tuple[float, str]]:
    """Return the lines that the run prints, each with the seconds since its start."""
    command = [LAUNCHER, "run", ROOT / "examples" / "digits.yaml", *JOB]
    started = time.monotonic()
    lines = [(0.0, f"$ {COMMAND}")]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            elapsed_s = time.monotonic() - started
            lines.append((elapsed_s, line.rstrip().replace(f"{folder}/", "")))
            if KILL_AT in line and not any(text.startswith("$ kill") for _, text in lines):
                os.kill(_find_agent(running.pid), signal.SIGKILL)
                lines.append(
                    (elapsed_s, f"$ kill -9 $AGENT_OF_HOST_{KILLED}   # in another terminal")
                )
    assert running.returncode == 0, lines[-5:]
    return lines


def _find_agent(launcher: int) -> int:
    """Return the agent of the host to kill: agents are the launcher's children in order."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    agents = [
        int(child) for child in children if b"agent" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return agents[KILLED]


def select_lines(lines: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the story: some steps, the loss of a host, some more steps, and the end.

    A traceback of a process whose neighbour is gone becomes one line with its length.
    """
    selected: list[tuple[float, str]] = []
    at = next(number for number, (_, text) in enumerate(lines) if text.startswith("$ kill"))
    resumed = next(number for number, (_, text) in enumerate(lines) if "resumed at" in text)
    skipped: list[str] = []
    for number, (when, text) in enumerate(lines):
        is_near = at - 5 < number <= at or resumed < number < resumed + 7 or number > len(lines) - 4
        if re.match(r"\[\d+\](?! step | resumed )", text):  # an abort has empty lines, too
            skipped += [text] if at < number < resumed else []
        elif text and not HERE.search(text) and (is_near or not re.match(r"\[\d+\] step ", text)):
            if skipped:
                selected.append((when, f"{skipped[0][:4]}({len(skipped)} lines) {skipped[-1][4:]}"))
            skipped = []
            selected.append((when, text))
    return selected


def _svg_line(number: int, appears: float, total: float, text: str) -> str:
    kind = "typed" if text.startswith("$") else "loud" if LOUD.search(text) else "quiet"
    text = text if len(text) <= COLUMNS else text[: COLUMNS - 1] + "…"
    start = 100 * appears / total
    return (
        "<style>@keyframes "
        f"l{number}{{0%,{start:.2f}%{{opacity:0}}{start + 0.01:.2f}%,100%{{opacity:1}}}}"
        f"#l{number}{{animation-name:l{number}}}</style>"
        f'<text id="l{number}" class="{kind}" x="{LEFT}" '
        f'y="{TOP + number * LINE}">{escape(text)}</text>'
    )


def make_svg(lines: list[tuple[float, str]]) -> str:
    """Return the terminal, which scrolls as its lines appear, again and again, or stands still."""
    times, last = [], 0.0
    for line, other in zip([(0.0, ""), *lines], lines, strict=False):
        last += min(LONGEST_S, max(0.08, other[0] - line[0]))
        times.append(last)
    total = last + HELD_S
    drawn = "".join(
        _svg_line(number, when, total, text)
        for number, (when, (_, text)) in enumerate(zip(times, lines, strict=True))
    )
    moves = "".join(
        f"{100 * when / total:.2f}%{{transform:translateY({-max(0, number + 1 - ROWS) * LINE}px)}}"
        for number, when in enumerate(times)
    )
    end = -max(0, len(lines) - ROWS) * LINE
    height = TOP + ROWS * LINE
    title = (
        "A run on four hosts: host 2 is killed, the launcher names it, training resumes from "
        "its checkpoint"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{title}">'
        f"<title>{title}</title><style>@keyframes "
        f"up{{{moves}100%{{transform:translateY({end}px)}}}}"
        "text{font:13.4px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans "
        "Mono',monospace;white-space:pre;"
        "fill:#c9d1d9}.typed{fill:#7ee787}.loud{fill:#ffa657;font-weight:bold}"
        f"g text{{animation:{total:.1f}s linear infinite}}g g{{animation:up {total:.1f}s "
        "steps(1) infinite}"
        f"@media (prefers-reduced-motion){{g text,g g{{animation:none!important}}"
        f"g g{{transform:translateY({end}px)}}}}</style>"
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#0d1117"/><g fill="#6e7681">'
        '<circle cx="18" cy="15" r="5"/><circle cx="36" cy="15" r="5"/><circle cx="54" cy="15" '
        'r="5"/></g>'
        f'<clipPath id="c"><rect y="{TOP - LINE + 3}" width="{WIDTH}" '
        f'height="{ROWS * LINE + 4}"/></clipPath>'
        f'<g clip-path="url(#c)"><g>{drawn}</g></g></svg>\n'
    )


def main() -> None:
    """Write all pictures."""
    with tempfile.TemporaryDirectory() as made, browser.page() as page:
        folder = Path(made)
        PICTURES.mkdir(exist_ok=True)
        (PICTURES / "lost-host.svg").write_text(
            make_svg(select_lines(record_run(folder))), encoding="utf-8"
        )
        subprocess.run([LAUNCHER, "report", "digits"], cwd=folder, check=True)
        take_pictures((folder / "digits.html").as_uri(), page)


def take_pictures(url: str, page: browser.Page) -> None:
    """Write a run's page as README and docs/seeing-runs.md show it: light, dark, 400 px wide."""
    for name, width, is_dark in (
        ("run", 1180, False),
        ("run-dark", 1180, True),
        ("run-narrow", 400, False),
    ):
        page.open(url, width, is_dark)
        (PICTURES / f"{name}.png").write_bytes(page.picture(width, most=1150))


if __name__ == "__main__":
    main()
