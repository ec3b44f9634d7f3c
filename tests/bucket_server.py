"""A local object store that speaks the JSON API of Google and the REST API of Amazon.

As much of both as gcsfs, s3fs and tensorstore use. As in the real ones there are no folders and no
rename, a put is whole or not there, every bucket exists except `deleted_buckets`, and ranges are
read alone. `requests`
records what was asked for. While `fault` is set, what is asked of names that hold its second part
fails as its first part says.
"""

from __future__ import annotations

import contextlib
import email
import hashlib
import http
import json
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from xml.sax.saxutils import escape

import pytest

TIME = "2026-01-01T00:00:00Z"
HTTP_TIME = "Thu, 01 Jan 2026 00:00:00 GMT"
END = "\U0010ffff"
LATE_S = 0.5  # of an answer, while the store is slow


class Bucket:
    """The server, its objects by `bucket/name`, and every request as (method, path, range)."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        # A status of HTTP, "cut" or "slow"; of which names.
        self.fault: tuple[str, str] | None = None
        self.is_hit = threading.Event()  # set by the first request that it meets
        self.lock = threading.RLock()
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.deleted_buckets: set[str] = set()
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, name="buckets", daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def environ(self) -> dict[str, str]:
        """Return variables with which a process takes this server for both clouds."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            # Which asks another service about each bucket.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        } | (
            {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
            if urllib.request.getproxies()
            else {}
        )

    def below(self, prefix: str) -> dict[str, bytes]:
        """Return the objects whose `bucket/name` begins with `prefix`."""
        with self.lock:
            return {name: data for name, data in self.objects.items() if name.startswith(prefix)}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that were killed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serve_bucket() -> Iterator[Bucket]:
    """Serve both clouds for this process, without what it cached of another server."""
    import fsspec
    import gcsfs.core
    import s3fs
    from etils.epath import backend

    bucket = Bucket()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in bucket.environ().items():
            patch.setenv(name, value)
        for protocol, kind in (("gcs", gcsfs.core.GCSFileSystem), ("s3", s3fs.S3FileSystem)):
            fsspec.register_implementation(protocol, kind, clobber=True)
            kind.clear_instance_cache()
        backend._FileSystemSpecBackend._get_filesystem.cache_clear()
        yield bucket
    bucket.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body in one packet, or each answer waits 40 ms for an acknowledgement.
    wbufsize = 1 << 16
    store: Bucket

    def handle_expect_100(self) -> bool:
        """Send the go-ahead at once: it must not wait in the buffer."""
        going_on = super().handle_expect_100()
        self.wfile.flush()
        return going_on

    def do_GET(self) -> None:
        self._route("GET")

    def do_HEAD(self) -> None:
        self._route("HEAD")

    def do_PUT(self) -> None:
        self._route("PUT")

    def do_POST(self) -> None:
        self._route("POST")

    def do_DELETE(self) -> None:
        self._route("DELETE")

    def _route(self, method: str) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        data = self._body()
        if self.store.fault is not None and self.store.fault[1] in urllib.parse.unquote(self.path):
            self.store.is_hit.set()
            if not self._goes_on(self.store.fault[0]):
                return
        with self.store.lock:
            self.store.requests.append((method, url.path, self.headers.get("Range")))
            if self._is_refused(method, url.path, data):
                return
            if "/storage/v1" in url.path:
                self._google(method, url.path.partition("/storage/v1")[2], query, data, url.path)
            else:
                self._amazon(method, urllib.parse.unquote(url.path.strip("/")), query, data)

    def _is_refused(self, method: str, path: str, data: bytes) -> bool:
        """Refuse a request to a deleted bucket, unless it creates the bucket again."""
        deleted_buckets = self.store.deleted_buckets
        if "/storage/v1" in path:
            if (method, path) == ("POST", "/storage/v1/b"):
                deleted_buckets.discard(json.loads(data)["name"])
                self._json(json.loads(data))
                return True
            if path.partition("/b/")[2].partition("/")[0] in deleted_buckets:
                message = "The specified bucket does not exist."
                self._json({"error": {"code": 404, "message": message}}, 404)
                return True
            return False
        bucket, _, name = urllib.parse.unquote(path.strip("/")).partition("/")
        if (method, name) == ("PUT", ""):
            deleted_buckets.discard(bucket)
        if bucket in deleted_buckets:
            self._error(404, "NoSuchBucket")
            return True
        return False

    def _goes_on(self, kind: str) -> bool:
        """Fail a request; return whether it is only late."""
        if kind == "slow":
            time.sleep(LATE_S)
        elif kind == "cut":
            self.close_connection = True
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4096\r\n\r\nhalf of")
        elif "/storage/v1" in self.path:
            self._json(
                {"error": {"code": int(kind), "message": http.HTTPStatus(int(kind)).phrase}},
                int(kind),
            )
        else:
            self._error(
                int(kind), {"403": "AccessDenied", "503": "SlowDown"}.get(kind, "InternalError")
            )
        return kind == "slow"

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                """Trailers."""
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            plain = b""
            while data:
                head, _, data = data.partition(b"\r\n")
                size = int(head.split(b";")[0], 16)
                if not size:
                    break
                plain, data = plain + data[:size], data[size + 2 :]
            return plain
        return data

    # Google.

    def _google(
        self, method: str, path: str, query: dict[str, str], data: bytes, whole: str
    ) -> None:
        if path in ("", "/") and whole.startswith("/batch"):
            return self._batch(data)
        bucket, _, name = path.removeprefix("/b/").partition("/o")
        name = name.removeprefix("/")
        objects = self.store.objects
        is_upload = (method, "uploadType" in query) == ("POST", True)
        is_part = (method, "upload_id" in query) == ("PUT", True)
        if whole.startswith("/upload") or is_upload or is_part:
            return self._upload(bucket, query, data)
        if not name and "/o" not in path:
            return self._json(
                {"name": bucket, "id": bucket, "storageClass": "STANDARD", "location": "X"}
            )
        if not name:
            return self._json(self._list(bucket, query))
        for verb in ("/moveTo/o/", "/copyTo/b/", "/rewriteTo/b/"):
            if verb in name:
                return self._google_copy(bucket, name, verb)
        key = f"{bucket}/{urllib.parse.unquote(name)}"
        if key not in objects:
            return self._json({"error": {"code": 404, "message": f"No such object: {key}"}}, 404)
        if method == "DELETE":
            del objects[key]
            return self._send(204, b"", {})
        if query.get("alt") == "media" or whole.startswith("/download"):
            return self._bytes(method, objects[key])
        return self._json(self._describe(*key.split("/", 1)))

    def _google_copy(self, bucket: str, name: str, verb: str) -> None:
        source, _, target = name.partition(verb)
        to_bucket, _, to_name = target.partition("/o/") if "/b/" in verb else (bucket, "", target)
        old, new = (
            f"{to}/{urllib.parse.unquote(bucket_or_name)}"
            for to, bucket_or_name in ((bucket, source), (to_bucket, to_name))
        )
        if old not in self.store.objects:
            return self._json({"error": {"code": 404, "message": f"No such object: {old}"}}, 404)
        self.store.objects[new] = self.store.objects[old]
        if "move" in verb:
            del self.store.objects[old]
        described = self._describe(*new.split("/", 1))
        return self._json({"done": True, "resource": described} if "rewrite" in verb else described)

    def _upload(self, bucket: str, query: dict[str, str], data: bytes) -> None:
        kind, name = query.get("uploadType"), query.get("name", "")
        if "upload_id" in query:
            key, parts = self.store.uploads[query["upload_id"]]
            place = self.headers.get("Content-Range", "")
            parts[len(parts)] = data
            if place.endswith("/*"):
                total = sum(len(part) for part in parts.values())
                return self._send(308, b"", {"Range": f"bytes=0-{total - 1}"})
            data, (bucket, name) = b"".join(parts.values()), tuple(key.split("/", 1))  # type: ignore[assignment]
        elif kind == "resumable":
            name = name or json.loads(data or b"{}").get("name", "")
            number = f"u{len(self.store.uploads)}"
            self.store.uploads[number] = (f"{bucket}/{name}", {})
            folder = f"{self.store.url}/upload/storage/v1/b/{bucket}/o"
            place = f"{folder}?uploadType=resumable&upload_id={number}"
            return self._send(200, b"{}", {"Location": place})
        elif kind == "multipart":
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            described, content = email.message_from_bytes(head + data).get_payload()  # type: ignore[misc]
            name = json.loads(described.get_payload())["name"]  # type: ignore[union-attr]
            mark = b"--" + self.headers["Content-Type"].split("boundary=")[1].strip("\"'").encode()
            data = data.split(mark)[2].split(
                b"\n\n" if b"\r\n\r\n" not in data.split(mark)[2] else b"\r\n\r\n", 1
            )[1]
            data = data[: -2 if data.endswith(b"\r\n") else -1]
            assert content is not None
        key = f"{bucket}/{name}"
        if query.get("ifGenerationMatch") == "0" and key in self.store.objects:
            return self._json({"error": {"code": 412, "message": "it exists"}}, 412)
        self.store.objects[key] = data
        return self._json(self._describe(bucket, name))

    def _batch(self, data: bytes) -> None:
        mark = self.headers["Content-Type"].split("boundary=")[1].strip("\"'")
        answers = []
        for part in data.decode().split(f"--{mark}"):
            for line in part.splitlines():
                if line.startswith("DELETE "):
                    path = urllib.parse.urlsplit(line.split()[1]).path.partition("/b/")[2]
                    bucket, _, name = path.partition("/o/")
                    gone = self.store.objects.pop(f"{bucket}/{urllib.parse.unquote(name)}", None)
                    status = "404 Not Found" if gone is None else "204 No Content"
                    answers.append(
                        f"--{mark}\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 "
                        f"{status}\r\n\r\n\r\n"
                    )
        body = ("".join(answers) + f"--{mark}--\r\n").encode()
        self._send(200, body, {"Content-Type": f"multipart/mixed; boundary={mark}"})

    def _list(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        start, end = query.get("startOffset", ""), query.get("endOffset", END)
        names, folders = self._found(bucket, query.get("prefix", ""), query.get("delimiter", ""))
        matches = [name for name in names if start <= name < end]
        listed: dict[str, Any] = {
            "kind": "storage#objects",
            "items": [self._describe(bucket, name) for name in matches],
        }
        return listed | ({"prefixes": folders} if folders else {})

    def _found(self, bucket: str, prefix: str, delimiter: str) -> tuple[list[str], list[str]]:
        """Return the names below a prefix and, with a delimiter, the folders among them."""
        every = sorted(
            key.partition("/")[2] for key in self.store.objects if key.startswith(f"{bucket}/")
        )
        names, folders = [], set()
        for name in every:
            if name.startswith(prefix):
                head, separator, _ = (
                    name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
                )
                if separator:
                    folders.add(prefix + head + delimiter)
                else:
                    names.append(name)
        return names, sorted(folders)

    def _describe(self, bucket: str, name: str) -> dict[str, Any]:
        data = self.store.objects[f"{bucket}/{name}"]
        times = dict.fromkeys(("timeCreated", "updated", "timeStorageClassUpdated"), TIME)
        digest = hashlib.md5(data).hexdigest()
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": bucket,
            "size": str(len(data)),
            "etag": digest,
            "generation": "1",
            "metageneration": "1",
            "contentType": "application/octet-stream",
            **times,
        }

    # Amazon.

    def _amazon(self, method: str, key: str, query: dict[str, str], data: bytes) -> None:
        bucket, _, name = key.partition("/")
        objects = self.store.objects
        if not name:
            return self._amazon_bucket(method, bucket, query, data)
        if "uploads" in query:
            number = f"u{len(self.store.uploads)}"
            self.store.uploads[number] = (key, {})
            return self._xml("InitiateMultipartUploadResult", f"<UploadId>{number}</UploadId>")
        if "uploadId" in query and method == "PUT":
            self.store.uploads[query["uploadId"]][1][int(query["partNumber"])] = data
            return self._send(200, b"", {"ETag": f'"{hashlib.md5(data).hexdigest()}"'})
        if "uploadId" in query and method == "POST":
            parts = self.store.uploads.pop(query["uploadId"])[1]
            objects[key] = b"".join(parts[number] for number in sorted(parts))
            return self._xml("CompleteMultipartUploadResult", f"<ETag>{self._etag(key)}</ETag>")
        if method == "PUT":
            return self._amazon_put(key, data)
        if method == "DELETE":
            objects.pop(key, None)
            return self._send(204, b"", {})
        if key not in objects:
            return self._error(404, "NoSuchKey")
        return self._bytes(
            method, objects[key], {"ETag": self._etag(key), "Last-Modified": HTTP_TIME}
        )

    def _amazon_put(self, key: str, data: bytes) -> None:
        objects = self.store.objects
        if source := self.headers.get("x-amz-copy-source"):
            source = urllib.parse.unquote(source).strip("/").split("?")[0]
            if source not in objects:
                return self._error(404, "NoSuchKey")
            objects[key] = objects[source]
            return self._xml(
                "CopyObjectResult",
                f"<ETag>{self._etag(key)}</ETag><LastModified>{TIME}</LastModified>",
            )
        if self.headers.get("If-None-Match") == "*" and key in objects:
            return self._error(412, "PreconditionFailed")
        if (wanted := self.headers.get("If-Match")) and wanted != (
            self._etag(key) if key in objects else ""
        ):
            return self._error(412, "PreconditionFailed")
        objects[key] = data
        return self._send(200, b"", {"ETag": self._etag(key)})

    def _amazon_bucket(self, method: str, bucket: str, query: dict[str, str], data: bytes) -> None:
        if "delete" in query:
            for entry in data.decode().split("<Key>")[1:]:
                self.store.objects.pop(
                    f"{bucket}/{urllib.parse.unquote(entry.split('</Key>')[0])}", None
                )
            return self._xml("DeleteResult", "")
        if method != "GET" or "location" in query:
            return self._send(200, b"", {"x-amz-bucket-region": "us-east-1"})
        names, folders = self._found(bucket, query.get("prefix", ""), query.get("delimiter", ""))
        after = query.get("start-after", "")
        items = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.store.objects[f'{bucket}/{name}'])}</Size>"
            f"<ETag>{self._etag(f'{bucket}/{name}')}</ETag><LastModified>{TIME}</LastModified>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for name in names
            if name > after
        )
        items += "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in folders
        )
        head = f"<Name>{bucket}</Name><IsTruncated>false</IsTruncated>"
        head += f"<KeyCount>{len(names) + len(folders)}</KeyCount>"
        return self._xml("ListBucketResult", head + items)

    def _etag(self, key: str) -> str:
        return f'"{hashlib.md5(self.store.objects[key]).hexdigest()}"'

    def _xml(self, name: str, inside: str) -> None:
        text = (
            f'<?xml version="1.0"?><{name} '
            f'xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inside}</{name}>'
        )
        self._send(200, text.encode(), {"Content-Type": "application/xml"})

    def _error(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self._send(
            status, body if self.command != "HEAD" else b"", {"Content-Type": "application/xml"}
        )

    # Answers.

    def _bytes(self, method: str, data: bytes, more: dict[str, str] | None = None) -> None:
        headers = {"x-goog-generation": "1", "Accept-Ranges": "bytes", **(more or {})}
        status, asked, whole = 200, self.headers.get("Range"), len(data)
        if asked and method == "GET":
            begin, end = asked.removeprefix("bytes=").split("-")
            first, last = (
                (int(begin), int(end) + 1 if end else whole) if begin else (whole - int(end), whole)
            )
            if first >= whole:
                return self._send(416, b"", {})
            status, data = 206, data[first:last]
            headers["Content-Range"] = f"bytes {first}-{min(last, whole) - 1}/{whole}"
        return self._send(status, data, headers)

    def _json(self, value: dict[str, Any], status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Write nothing."""
