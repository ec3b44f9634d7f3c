"""A client of the API server for the harness and the tests' preparations: dicts over HTTPS.

It is not the code under test, and quicker than a kubectl for every call. It reads the kubeconfigs
of this harness and of kind: one cluster, certificates or a token inside.
"""

import base64
import http.client
import json
import ssl
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import yaml

MERGE = "application/merge-patch+json"


class RefusedError(RuntimeError):
    """An error of the server, with its status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class Call(NamedTuple):
    method: str
    path: str
    body: object = None
    content: str = "application/json"


class Api:
    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        context = by_name(config, "contexts", config["current-context"])["context"]
        cluster = by_name(config, "clusters", context["cluster"])["cluster"]
        user = by_name(config, "users", context["user"])["user"]
        self.server = urlsplit(cluster["server"])
        self.tls = make_tls_context(cluster, user)
        self.own = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
        if "as" in user:
            self.own["Impersonate-User"] = user["as"]

    def call(
        self, method: str, path: str, body: object = None, content: str = "application/json"
    ) -> Any:
        """Return the answer, parsed if it is JSON. Raises Refused."""
        return next(self.calls([Call(method, path, body, content)]))

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def create(self, path: str, body: object) -> Any:
        return self.call("POST", path, body)

    def delete(self, *paths: str) -> None:
        """Delete objects; missing ones are ignored."""
        with closing(self.connect()) as connection:
            for path in paths:
                try:
                    self.exchange(connection, Call("DELETE", path))
                except RefusedError as error:
                    if error.status != 404:
                        raise

    def merge(self, path: str, patch: object) -> Any:
        return self.call("PATCH", path, patch, MERGE)

    def calls(self, calls: Iterable[Call]) -> Iterator[Any]:
        """Yield the answers one after the other, over one connection."""
        with closing(self.connect()) as connection:
            for call in calls:
                yield self.exchange(connection, call)

    def connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self.server.netloc, context=self.tls, timeout=30)

    def exchange(self, connection: http.client.HTTPSConnection, call: Call) -> Any:
        headers = {"Content-Type": call.content} | self.own
        connection.request(
            call.method, call.path, None if call.body is None else json.dumps(call.body), headers
        )
        answer = connection.getresponse()
        text = answer.read().decode()
        is_json = answer.headers.get_content_type() == "application/json"
        if answer.status >= 400:
            raise RefusedError(
                answer.status, json.loads(text).get("message", text) if is_json else text
            )
        return json.loads(text) if is_json and text else text


def by_name(config: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    return next(entry for entry in config[kind] if entry["name"] == name)


def make_tls_context(cluster: dict[str, Any], user: dict[str, Any]) -> ssl.SSLContext:
    """Return a context with the server's authority and the client's certificate.

    Python's ssl reads the latter only from files.
    """
    context = ssl.create_default_context(cadata=decode_data(cluster["certificate-authority-data"]))
    if "client-certificate-data" in user:
        with tempfile.NamedTemporaryFile("w") as pair:
            pair.write(
                decode_data(user["client-certificate-data"]) + decode_data(user["client-key-data"])
            )
            pair.flush()
            context.load_cert_chain(pair.name)
    return context


def decode_data(data: str) -> str:
    return base64.b64decode(data).decode()
