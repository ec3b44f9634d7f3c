"""The chart as the tests speak to Helm's engine about it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests import environments

CHART = Path(__file__).parents[2] / "helm" / "launcher"
ENGINE = Path(__file__).parent / "engine.py"
Object = dict[str, Any]
Values = Mapping[str, Any]


class RefusedError(RuntimeError):
    """The engine, or the cluster behind it, said no; the text is its own."""


class Helm:
    """The engine in a child process, for as long as `with` lasts."""

    def __enter__(self) -> Helm:
        command = [str(environments.find_python("helm")), "-I", str(ENGINE)]
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.child.communicate()

    def call(self, name: str, /, **arguments: Any) -> Any:
        """Return the answer to one call of engine.py; raise RefusedError if it refuses."""
        assert self.child.stdin is not None and self.child.stdout is not None
        self.child.stdin.write(json.dumps([name, arguments]) + "\n")
        self.child.stdin.flush()
        answer = json.loads(self.child.stdout.readline() or '{"refused": "the engine died"}')
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return answer["result"]

    def lint(self, values: Values, version: str) -> Any:
        return self.call("lint", chart=str(CHART), values=values, kube_version=version)

    def package(self, destination: Path) -> Path:
        """Return the archive that is published."""
        return Path(self.call("package", chart=str(CHART), destination=str(destination)))

    def files(
        self, values: Values, name: str = "team", namespace: str = "ns", chart: Path = CHART
    ) -> dict[str, str]:
        """Return the text of each rendered template, by its path in templates/."""
        files = self.call("render", chart=str(chart), values=values, name=name, namespace=namespace)
        return {path.partition("/templates/")[2]: text for path, text in files.items()}

    def render(self, values: Values, name: str = "team", namespace: str = "ns") -> list[Object]:
        """Return every object, including those of the test."""
        return list(documents(self.files(values, name, namespace)))

    def validate(self, objects: list[Object], version: str) -> str:
        """Return the version whose schemas accept the objects; raise RefusedError if none does."""
        return str(self.call("validate", objects=objects, version=version))

    def release(self, kubeconfig: Path, namespace: str, action: str, **arguments: Any) -> Any:
        """Run an action of Helm: install, upgrade, test, rollback, uninstall or history."""
        return self.call(
            "release",
            kubeconfig=str(kubeconfig),
            namespace=namespace,
            action=action,
            arguments=arguments,
        )


def documents(files: Mapping[str, str]) -> Iterator[Object]:
    for path, text in sorted(files.items()):
        if path.endswith(".yaml"):
            yield from filter(None, yaml.load_all(text, Loader=yaml.CSafeLoader))


def find_object(objects: list[Object], kind: str, name: str | None = None) -> Object:
    """Return the only object of this kind, and of this name if there is one."""
    matches = [
        candidate
        for candidate in objects
        if candidate["kind"] == kind and name in (None, candidate["metadata"]["name"])
    ]
    assert len(matches) == 1, f"{kind} {name}: {len(matches)}"
    return matches[0]
