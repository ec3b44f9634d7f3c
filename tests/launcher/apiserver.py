"""A small API server on loopback: objects in a dictionary, and the faults that a test asks for.

It knows paths, names, uids, versions, selectors, dry runs and ownership by uid; no schema, no
admission. What the real server makes of a request is the matter of tests/cluster.
"""

from __future__ import annotations

import collections
import copy
import io
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import yaml

Object = dict[str, Any]
Fault = Callable[["Handler"], bool]  # True if it has answered


class Server(ThreadingHTTPServer):
    """Serves objects by path. Each fault meets one request with its method and part of a path."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, handler: type[Handler] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.objects: dict[str, Object] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.faults: dict[tuple[str, str], collections.deque[Fault]] = {}
        self.groups: dict[str, list[str]] = {
            "jobset.x-k8s.io": ["v1alpha2"],
            "kueue.x-k8s.io": ["v1beta2"],
        }
        self.denied: set[tuple[str, str]] = set()
        self.events: list[Object] = []  # of every watch, oldest first
        self.changed = threading.Condition()
        self.closing = threading.Event()
        self._versions = itertools.count(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def version(self) -> str:
        return str(next(self._versions))

    def put(self, path: str, obj: Object, event: str = "") -> Object:
        """Store an object under its path, as another client's write, and return it."""
        existing = self.objects.get(path)
        obj = copy.deepcopy(obj)
        obj.setdefault("metadata", {}).setdefault("name", path.rpartition("/")[2])
        version = self.version()
        obj["metadata"] |= {
            "uid": (existing or {}).get("metadata", {}).get("uid") or f"uid-{version}"
        }
        obj["metadata"] |= {"resourceVersion": version}
        obj["metadata"].setdefault("creationTimestamp", "2026-11-21T06:00:00Z")
        with self.changed:
            self.objects[path] = obj
            self.events.append(
                {
                    "type": event or ("MODIFIED" if existing else "ADDED"),
                    "object": obj,
                    "path": path,
                }
            )
            self.changed.notify_all()
        return obj

    def drop(self, path: str) -> Object:
        with self.changed:
            obj = self.objects.pop(path)
            deleted = copy.deepcopy(obj)
            deleted["metadata"]["resourceVersion"] = self.version()
            self.events.append({"type": "DELETED", "object": deleted, "path": path})
            self.changed.notify_all()
        return obj

    def on(self, method: str, part: str, *faults: Fault) -> None:
        """Let the next requests with this method and part of a path meet these faults."""
        self.faults.setdefault((method, part), collections.deque()).extend(faults)

    def count(self, method: str, part: str = "") -> int:
        return sum(command == method and part in path for command, path, _ in self.requests)

    def stored(self, part: str) -> list[str]:
        return sorted(path for path in self.objects if part in path)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = (
        True  # a body is written after its head, and would wait 40 ms for the client's ACK
    )
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # the client was killed, or had enough
            self.close_connection = True

    def _take(self) -> None:
        split = urlsplit(self.path)
        self.at = split.path
        self.query = {key: values[-1] for key, values in parse_qs(split.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        self.body = json.loads(self.rfile.read(length)) if length else None
        self.server.requests.append((self.command, self.at, self.query))
        self.server.bodies.append(self.body)
        self.server.headers.append(dict(self.headers))
        command = "DRY" if self.query.get("dryRun") else self.command
        for (method, part), waiting in self.server.faults.items():
            if method == command and part in self.at and waiting and waiting.popleft()(self):
                return
        getattr(self, f"_{self.command.lower()}")()

    do_GET = do_POST = do_PATCH = do_DELETE = _take

    # --- verbs ------------------------------------------------------------------------------------

    def _get(self) -> None:
        if self.at == "/version":
            self.answer(200, {"gitVersion": "v1.35.4"})
        elif self.at == "/readyz":
            self.send(200, b"ok", "text/plain")
        elif self.at.startswith("/apis/") and self.at.count("/") == 2:
            versions = self.server.groups.get(self.at.split("/")[2])
            versions_answer = {"versions": [{"version": version} for version in versions or []]}
            self.answer(200, versions_answer) if versions else self.fail(
                404, "NotFound", "the server could not find it"
            )
        elif self.at.endswith("/log") and self.at in self.server.objects:
            self.send(200, self.server.objects[self.at]["text"].encode(), "text/plain")
        elif self.query.get("watch"):
            self._watch()
        elif self.at in self.server.objects:
            self.answer(200, self.server.objects[self.at])
        elif self.at.rsplit("/", 1)[1] in PLURALS:
            self._list()
        else:
            self.fail(404, "NotFound", f'"{self.at.rpartition("/")[2]}" not found')

    def _below(self) -> list[str]:
        head, _, plural = self.at.rpartition("/")
        below = [path for path in sorted(self.server.objects) if path.startswith(f"{head}/")]
        return [path for path in below if path.split("/")[-2] == plural and self._is_selected(path)]

    def _is_selected(self, path: str) -> bool:
        fields = self.query.get("fieldSelector", "")
        if (
            fields.startswith("metadata.name=")
            and fields != f"metadata.name={path.rpartition('/')[2]}"
        ):
            return False
        labels = self.server.objects[path]["metadata"].get("labels", {})
        requirements = filter(None, self.query.get("labelSelector", "").split(","))
        return all(
            (labels.get(key) == value) if equals else key in labels
            for key, equals, value in map(_split_requirement, requirements)
        )

    def _list(self) -> None:
        items = [self.server.objects[path] for path in self._below()]
        first, limit = int(self.query.get("continue", "0")), int(self.query.get("limit", "500"))
        more = {"continue": str(first + limit)} if len(items) > first + limit else {}
        metadata = {"resourceVersion": self.server.version(), **more}
        self.answer(200, {"metadata": metadata, "items": items[first : first + limit]})

    def _watch(self) -> None:
        """Events newer than the version asked for, for as long as was asked for."""
        self.begin_stream()
        since, plural = int(self.query.get("resourceVersion") or 0), self.at.rpartition("/")[2]
        sent = 0
        end = (
            threading.TIMEOUT_MAX
            if "timeoutSeconds" not in self.query
            else float(self.query["timeoutSeconds"])
        )
        with self.server.changed:
            while not self.server.closing.is_set():
                for event in self.server.events[sent:]:
                    obj = event["object"]
                    version = int(obj["metadata"]["resourceVersion"])
                    if event["path"].split("/")[-2] == plural and version > since:
                        self.chunk({"type": event["type"], "object": obj})
                sent = len(self.server.events)
                if not self.server.changed.wait(end):
                    break
        self.end_stream()

    def _post(self) -> None:
        if self.at.endswith("/selfsubjectaccessreviews"):
            attributes = self.body["spec"]["resourceAttributes"]
            is_allowed = (attributes["verb"], attributes["resource"]) not in self.server.denied
            self.answer(201, {"status": {"allowed": is_allowed}})
            return
        name = self.body["metadata"]["name"]
        path = f"{self.at}/{name}"
        if path in self.server.objects:
            self.fail(409, "AlreadyExists", f'"{name}" already exists')
        elif self.query.get("dryRun"):
            self.answer(201, self.body)
        else:
            self.answer(201, self.server.put(path, self.body))

    def _patch(self) -> None:
        existing = self.server.objects.get(self.at)
        if existing is None and self.headers["Content-Type"] != "application/apply-patch+yaml":
            self.fail(404, "NotFound", "not found")
        else:
            self.answer(200, self.server.put(self.at, merge_patch(existing or {}, self.body)))

    def _delete(self) -> None:
        existing = self.server.objects.get(self.at)
        uid = ((self.body or {}).get("preconditions") or {}).get("uid")
        if existing is None:
            self.fail(404, "NotFound", "not found")
        elif uid not in (None, existing["metadata"]["uid"]):
            self.fail(409, "Conflict", "the uid in the precondition does not match")
        else:
            self.answer(200, self.server.drop(self.at))

    # --- answers ----------------------------------------------------------------------------------

    def answer(self, code: int, obj: Any, **headers: str) -> None:
        self.send(code, json.dumps(obj).encode(), "application/json", **headers)

    def fail(self, code: int, reason: str, message: str, **headers: str) -> None:
        self.answer(
            code, {"kind": "Status", "code": code, "reason": reason, "message": message}, **headers
        )

    def send(self, code: int, body: bytes, kind: str, **headers: str) -> None:
        self.send_response_only(code)
        self.send_header("Date", formatdate(usegmt=True))
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **headers,
        }.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def begin_stream(self) -> None:
        self.send_response_only(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, obj: Any) -> None:
        self.raw_chunk(json.dumps(obj).encode() + b"\n")

    def raw_chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")


PLURALS = frozenset(
    # A list would take a line for each name.
    "configmaps events jobs jobsets limitranges localqueues namespaces networkpolicies nodes pods "  # noqa: SIM905
    "priorityclasses workloads workloadpriorityclasses".split()
)


def _split_requirement(selector: str) -> tuple[str, str, str]:
    return selector.partition("=")


def merge_patch(base: Any, patch: Any) -> Any:
    """A JSON merge patch."""
    if not isinstance(patch, dict) or not isinstance(base, dict):
        return patch
    merged = dict(base)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(base.get(key), value)
    return merged


# --- faults ---------------------------------------------------------------------------------------


def refuse_with(code: int, **headers: str) -> Fault:
    """An answer with this code instead of the act."""

    def fault(handler: Handler) -> bool:
        handler.fail(code, "Fault", f"a fault of the test: {code}", **headers)
        return True

    return fault


def drop_connection(handler: Handler) -> bool:
    """The connection breaks; nothing was done."""
    handler.close_connection = True
    handler.connection.close()
    return True


def commit_then_drop(handler: Handler) -> bool:
    """It is done, and the answer never arrives."""
    wfile, handler.wfile = handler.wfile, io.BytesIO()
    getattr(handler, f"_{handler.command.lower()}")()
    handler.wfile = wfile
    return drop_connection(handler)


def hang_request(handler: Handler) -> bool:
    """No answer, for as long as the server lives."""
    handler.server.closing.wait()
    handler.close_connection = True
    return True


S = TypeVar("S", bound=Server)


@contextmanager
def serve_in_thread(server: S) -> Iterator[S]:
    """A server that answers while the block lasts."""
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        with server.changed:
            server.changed.notify_all()
        server.shutdown()
        server.server_close()


def write_kubeconfig(folder: Path, server: str, namespace: str = "team-a", **user: Any) -> Path:
    """A kubeconfig for a server without TLS."""
    file = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server}}],
        "contexts": [
            {"name": "test", "context": {"cluster": "test", "user": "me", "namespace": namespace}}
        ],
        "users": [{"name": "me", "user": user}],
    }
    file.write_text(yaml.safe_dump(config))
    return file
