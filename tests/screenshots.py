"""Pictures of the documentation's site: `make docs`, then `python -m tests.screenshots FOLDER`.

It takes five pages, each in light and in dark on a wide screen, and in light on one of 400 px, as
PNG files in FOLDER. It needs chromium on PATH, and no network.
"""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

SITE = Path(__file__).parents[1] / "build" / "site"
PAGES = ("index", "quickstart", "concepts", "troubleshooting", "job-yaml")
CHROMIUM = ("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
# A window of Chromium is 500 px wide at least: the narrow page is in a frame.
FRAME = (
    '<body style="margin:0"><iframe src="%s" '
    'style="border:0;width:400px;height:%dpx"></iframe></body>'
)
HEIGHT = 1800


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serve files without a line for each."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def take_picture(url: str, to: Path, width: int, *options: str) -> None:
    """Write a picture of the top of a page. Raises CalledProcessError if Chromium fails."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            *CHROMIUM,
            f"--user-data-dir={profile}",
            f"--window-size={width},{HEIGHT}",
            *options,
        ]
        command += ["--virtual-time-budget=5000", f"--screenshot={to}", url]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main(folder: Path) -> None:
    """Take all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(QuietHandler, directory=SITE)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    for page in PAGES:
        url = f"{address}/{page}.html"
        take_picture(url, folder / f"{page}-light.png", 1280)
        take_picture(
            url, folder / f"{page}-dark.png", 1280, "--blink-settings=preferredColorScheme=0"
        )
        frame = SITE / f"{page}-narrow.html"
        frame.write_text(FRAME % (url, HEIGHT))
        take_picture(f"{address}/{frame.name}", folder / f"{page}-narrow.png", 500)
        frame.unlink()
    server.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
