"""The dashboard's server: a table of runs, the page of each while it goes on, and several next to each other.

It listens on this machine alone, and answers only who has the token of its address. A page of another site can neither
ask it (Host, Origin) nor read it. What it serves is made here: no path of a request is ever opened.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import threading
import time
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from jaxlaunch.launcher.report import compare, folder, page
from jaxlaunch.launcher.report.run import Followed
from jaxlaunch.launcher.report.serving.answers import Answers, Listening
from jaxlaunch.launcher.wording import visible
from jaxlaunch.runs import catalog
from jaxlaunch.runs.layout import LOCK, SUMMARY

LOOPBACK = "127.0.0.1"
PERIOD_S = 1.0  # between two looks at a run
LIST_S = 2.0  # between two looks at all
MOST_COMPARED = 8
MOST_STREAMS = 32  # at a time
MOST_FOLLOWED = 64  # runs whose numbers are kept

Jobs = Callable[[], tuple[list[dict[str, Any]], list[str]]]  # rows of a cluster, and what could not be read


class Runs:
    """The runs of a folder, and the jobs of a cluster where `jobs` reads them."""

    def __init__(self, below: Path | None, jobs: Jobs | None) -> None:
        self._below, self._jobs = below, jobs
        self._lock = threading.Lock()
        self._listed: tuple[float, dict[str, Path], dict[str, Any]] | None = None
        self._followed: dict[str, tuple[threading.Lock, Followed]] = {}
        self._briefs: dict[Path, tuple[tuple[int, ...], dict[str, Any]]] = {}

    def table(self) -> dict[str, Any]:
        """The rows of all runs; read again after LIST_S."""
        with self._lock:
            return self._list()[2]

    def _list(self) -> tuple[float, dict[str, Path], dict[str, Any]]:
        if self._listed is not None and time.monotonic() - self._listed[0] < LIST_S:
            return self._listed
        paths = {_id(path): path for path in ([] if self._below is None else catalog.find_own_runs(self._below))}
        rows = [{**self._brief(path), "id": name} for name, path in paths.items()]
        unread = list[str]()
        if self._jobs is not None:
            found, unread = self._jobs()
            rows += found
        self._listed = time.monotonic(), paths, {"runs": rows, "unread": [visible(text) for text in unread]}
        return self._listed

    def _brief(self, path: Path) -> dict[str, Any]:
        """The row of a run, read again where its summary or lock has changed, or it may have been killed since."""
        stamp = *_stamp(f"{path}/{SUMMARY}"), *_stamp(f"{path}/{LOCK}")
        kept = self._briefs.get(path)
        if kept is None or kept[0] != stamp or kept[1]["state"] in ("running", "unknown"):
            kept = self._briefs[path] = stamp, _row(folder.brief(path))
        return kept[1]

    def seen(self, name: str) -> Any:
        """A run by its id, as it is now; None where it is not in the table."""
        with self._lock:
            path = self._list()[1].get(name)
            if path is None:
                return None
            if name not in self._followed and len(self._followed) >= MOST_FOLLOWED:
                del self._followed[next(iter(self._followed))]
            lock, followed = self._followed.setdefault(name, (threading.Lock(), Followed(path)))
        with lock:
            return followed.read()


def _id(path: Path) -> str:
    """What addresses call a run: its name may be anything."""
    return hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.lstat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino


def _row(brief: folder.Brief) -> dict[str, Any]:
    return {
        "name": visible(brief.name),
        "state": brief.state,
        "why": visible(brief.why)[:300],
        "step": brief.step,
        "steps": brief.steps,
        "goodput": brief.goodput,
        "restarts": brief.restarts,
        "began": brief.began,  # its age changes, and the row does not
        "owner": brief.owner,
        "where": "this machine",
    }


class Server(Listening):
    """Serves `runs` until it is shut down. Raises UserError where the port is taken."""

    def __init__(self, runs: Runs, port: int = 0) -> None:
        self.runs, self.token = runs, secrets.token_urlsafe(24)
        super().__init__(LOOPBACK, port, Handler, MOST_STREAMS)

    @property
    def address(self) -> str:
        """The address to open, with the token."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/{self.token}/"


class Handler(Answers):
    """One request."""

    server: Server

    def do_GET(self) -> None:
        """Answers a page or a stream, or refuses."""
        if (found := self.target()) is None:
            return self.refuse(HTTPStatus.BAD_REQUEST, "this is not an address")
        parts = found.path.split("/")
        if (
            not self._is_ours()
            or len(parts) < 3
            or not secrets.compare_digest(parts[1].encode(), self.server.token.encode())
        ):
            return self.refuse(HTTPStatus.FORBIDDEN, "open the address that launcher dashboard printed")
        query, runs = urllib.parse.parse_qs(found.query), self.server.runs
        match parts[2:]:
            case [""]:
                data = {**self._table(), "compare": f"/{parts[1]}/compare", "events": f"/{parts[1]}/events"}
                self.show(page.of("runs", "Runs", data))
            case ["events"]:
                self.stream(self._table, LIST_S, math.inf)
            case ["run", name] if (seen := runs.seen(name)) is not None:
                data = {**seen.to_json(), "home": f"/{parts[1]}/", "events": f"/{parts[1]}/run/{name}/events"}
                self.show(page.of("run", data["name"], data))
            case ["run", name, "events"] if runs.seen(name) is not None:
                self.stream(lambda: runs.seen(name).to_json(), PERIOD_S, math.inf)
            case ["compare"]:
                self._compare(query.get("run", [])[:MOST_COMPARED], parts[1])
            case _:
                self.refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def _is_ours(self) -> bool:
        """Whether the request is of our own page, or of a person: not of another site that found the port."""
        port = self.server.server_address[1]
        hosts = {f"{LOOPBACK}:{port}", f"localhost:{port}"}
        origin = self.headers.get("Origin")
        is_same = self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
        return (
            self.headers.get("Host") in hosts
            and is_same
            and (origin is None or origin in {f"http://{each}" for each in hosts})
        )

    def _table(self) -> dict[str, Any]:
        found = self.server.runs.table()
        rows = [
            {**run, "page": f"/{self.server.token}/run/{run['id']}" if run.get("page", True) else ""}
            for run in found["runs"]
        ]
        return {**found, "runs": rows}

    def _compare(self, names: list[str], token: str) -> None:
        found = {name: seen for name in names if (seen := self.server.runs.seen(name)) is not None}
        if len(found) < 2:
            return self.refuse(HTTPStatus.NOT_FOUND, "there are no such runs")
        data = compare.data(list(found.values()), (), "step")
        for run, name in zip(data["runs"], found, strict=True):
            run["page"] = f"/{token}/run/{name}"
        self.show(page.of("compare", "Compare", {**data, "home": f"/{token}/"}))
