"""A Google Cloud Storage bucket in this process, small and true enough to save into.

tensorstore speaks to it over HTTP as it does to the real one, epath through fsspec: both see the same objects. As in
the real one there are no folders and no rename, and a put is whole or not there.
"""

from __future__ import annotations

import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Objects(MemoryFileSystem):  # type: ignore[misc]
    """fsspec's view: paths gs://bucket/name."""

    protocol = ("gcs", "gs")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = True

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + str(path).removeprefix("gs://").strip("/") if str(path).strip("/") else ""

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Nothing: a folder is there when an object is below it."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing, as `mkdir`."""

    def exists(self, path: str, **kwargs: Any) -> bool:
        return bool(path.removeprefix("gs://").strip("/").count("/") == 0 or super().exists(path, **kwargs))


class Handler(BaseHTTPRequestHandler):
    """The JSON API, as much of it as tensorstore uses."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet, or each answer waits 40 ms for an acknowledgement
    objects: Objects
    lock = threading.Lock()

    def do_GET(self) -> None:
        url = urllib.parse.urlparse(self.path)
        bucket, _, name = self._address(url)
        query = dict(urllib.parse.parse_qsl(url.query))
        with self.lock:
            if not name:
                return self._answer(200, self._list(bucket, query))
            file = self.objects.store.get(f"/{bucket}/{name}")
            if file is None:
                return self._answer(404, {})
            self._answer_bytes(file.getvalue())

    def do_POST(self) -> None:
        url = urllib.parse.urlparse(self.path)
        bucket, _, _ = self._address(url)
        name = dict(urllib.parse.parse_qsl(url.query))["name"]
        data = self.rfile.read(int(self.headers["Content-Length"]))
        with self.lock:
            self.objects.pipe_file(f"gs://{bucket}/{name}", data)
        self._answer(200, self._describe(bucket, name, len(data)))

    def do_DELETE(self) -> None:
        bucket, _, name = self._address(urllib.parse.urlparse(self.path))
        with self.lock:
            found = self.objects.store.pop(f"/{bucket}/{name}", None)
        self._answer(404 if found is None else 204, {})

    def _address(self, url: urllib.parse.ParseResult) -> tuple[str, str, str]:
        bucket, kind, name = (url.path.partition("/b/")[2] + "//").split("/", 2)
        return bucket, kind, urllib.parse.unquote(name.strip("/"))

    def _list(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        start, end, prefix = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff"), query.get("prefix", "")
        names = sorted(key.removeprefix(f"/{bucket}/") for key in self.objects.store if key.startswith(f"/{bucket}/"))
        found = [name for name in names if start <= name < end and name.startswith(prefix)]
        sizes = {name: len(self.objects.store[f"/{bucket}/{name}"].getvalue()) for name in found}
        return {"items": [self._describe(bucket, name, sizes[name]) for name in found]}

    def _describe(self, bucket: str, name: str, size: int) -> dict[str, Any]:
        times = dict.fromkeys(("timeCreated", "updated", "timeStorageClassUpdated"), "2026-01-01T00:00:00Z")
        return {"name": name, "bucket": bucket, "size": str(size), "generation": "1", "metageneration": "1", **times}

    def _answer_bytes(self, data: bytes) -> None:
        status, asked = 200, self.headers.get("Range")
        first, last, whole = 0, len(data), len(data)
        if asked:
            status, (begin, end) = 206, asked.removeprefix("bytes=").split("-")
            first, last = (int(begin), int(end) + 1 if end else whole) if begin else (whole - int(end), whole)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data[first:last])))
        self.send_header("x-goog-generation", "1")
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{min(last, whole) - 1}/{whole}")
        self.end_headers()
        self.wfile.write(data[first:last])

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        body = b"" if status == 204 else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Silent."""


def serve() -> ThreadingHTTPServer:
    """Starts the bucket's server; its port is `server_port`. Every bucket name exists."""
    fsspec.register_implementation("gcs", Objects, clobber=True)
    Handler.objects = fsspec.filesystem("gcs", finalize_on_close=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="bucket", daemon=True).start()
    return server
