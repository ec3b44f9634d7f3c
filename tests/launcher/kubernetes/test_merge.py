from __future__ import annotations

from typing import Any

import pytest

from jaxlaunch.launcher.kubernetes.merge import merge_patch


@pytest.mark.parametrize(
    ("base", "patch", "merged"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3, "d": 4}}, {"a": {"b": 1, "c": 3, "d": 4}}),
        ({"a": 1, "b": {"c": 2}}, {"a": None, "b": {"c": None}}, {"b": {}}),
        ({"command": ["a", "b"]}, {"command": ["c"]}, {"command": ["c"]}),
        (
            {"containers": [{"name": "main", "image": "a"}]},
            {"containers": [{"name": "side"}, {"name": "main", "tty": True}]},
            {"containers": [{"name": "main", "image": "a", "tty": True}, {"name": "side"}]},
        ),
        (
            {"tolerations": [{"key": "a"}]},
            {"tolerations": [{"key": "a"}, {"key": "b"}]},
            {"tolerations": [{"key": "a"}, {"key": "b"}]},
        ),
        (
            {"volumeMounts": [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}]},
            {"volumeMounts": [{"name": "w", "mountPath": "/b"}]},
            {"volumeMounts": [{"name": "v", "mountPath": "/a"}, {"name": "w", "mountPath": "/b"}]},
        ),
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"env": [{"name": "A", "valueFrom": {}}]},
            {"env": [{"name": "A", "valueFrom": {}}, {"name": "B", "value": "2"}]},
        ),
        (
            {"volumes": [{"name": "tmp", "emptyDir": {}}]},
            {"volumes": [{"name": "tmp", "persistentVolumeClaim": {}}]},
            {"volumes": [{"name": "tmp", "persistentVolumeClaim": {}}]},
        ),
        ({}, {"a": {"b": None, "c": 1}}, {"a": {"c": 1}}),
        ({"a": 1}, {}, {"a": 1}),
        ({"drop": ["ALL"]}, {"drop": []}, {"drop": []}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": []}, {"tolerations": [{"key": "a"}]}),
        (
            {"volumes": [{"name": "a"}]},
            {"volumes": [{"name": ["b"]}]},
            {"volumes": [{"name": "a"}, {"name": ["b"]}]},
        ),
    ],
)
def test_patch_is_merged_over_base(base: Any, patch: Any, merged: Any) -> None:
    assert merge_patch(base, patch) == merged


def test_merge_neither_changes_nor_shares_its_arguments() -> None:
    base: dict[str, Any] = {"a": [{"name": "x", "b": {}}]}
    patch: dict[str, Any] = {"c": {"d": []}}
    merged = merge_patch(base, patch)
    merged["a"][0]["b"]["new"] = merged["c"]["d"].append(1)
    assert base == {"a": [{"name": "x", "b": {}}]} and patch == {"c": {"d": []}}
