"""Run the launcher and print its cost on stderr: requests to the API server, time, memory."""

from __future__ import annotations

import http.client
import json
import re
import sys
import time
from pathlib import Path

from jaxlaunch.launcher.cli.main import main

requests: list[str] = []
original_putrequest = http.client.HTTPConnection.putrequest


def count_request(
    self: http.client.HTTPConnection, method: str, url: str, *args: bool, **options: bool
) -> None:
    requests.append(f"{method} {url}")
    original_putrequest(self, method, url, *args, **options)


http.client.HTTPConnection.putrequest = count_request  # type: ignore[method-assign]
started_at = time.perf_counter()
try:
    main()
finally:
    elapsed_s = time.perf_counter() - started_at
    # The peak of this process alone: what getrusage counts has that of the process that began it.
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None, "Linux"
    print(
        json.dumps({"requests": requests, "seconds": elapsed_s, "peak_mib": int(peak[1]) / 1024}),
        file=sys.stderr,
    )
