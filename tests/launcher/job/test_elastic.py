"""Jobs with fewer hosts for a while, and spares."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from jaxlaunch.launcher.cli import validate
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job.load import parse_job

TRAIN = {
    "task": "classify",
    "model": {"kind": "mlp"},
    "data": {"source": "synthetic", "shape": [8, 8]},
    "batch": 24,
}


def make_document(**keys: Any) -> dict[str, Any]:
    return {
        "name": "t",
        "hosts": {"min": 2, "max": 4},
        "accelerator": {"type": "cpu"},
        "train": TRAIN,
        **keys,
    }


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hosts": {"min": 5, "max": 4}}, "hosts.min = 5 is above hosts.max = 4"),
    ({"train": TRAIN | {"mesh": {"mp": 4}}}, "mp 4 does not shrink to 2 devices"),
    (
        {"hosts": {"min": 3, "max": 4}, "train": TRAIN | {"batch": 32}},
        "batch 32 cannot be divided evenly over 3 devices",
    ),
    ({"restarts": {"crash": 0}}, "hosts.min = 2 needs several hosts that are replaced one by one"),
    ({"slices": 2}, "hosts.min = 2 does not apply to 2 slices"),
    ({"hosts": 1, "spares": 1}, "spares = 1 needs several hosts that are replaced one by one"),
    ({"hosts": 2, "slices": 2, "spares": 1}, "spares = 1 does not apply to 2 slices"),
    (
        {"accelerator": {"type": "v5e", "topology": "4x4"}, "hosts": 4, "spares": 1},
        "spares = 1 does not apply to v5e",
    ),
    ({"train": None, "command": ["python"]}, "hosts.min = 2 is of train: jobs"),
]


@pytest.mark.parametrize(("keys", "message"), WRONG, ids=[message for _, message in WRONG])
def test_unsupported_elastic_jobs_are_refused(keys: dict[str, Any], message: str) -> None:
    job = {key: value for key, value in make_document(**keys).items() if value is not None}
    with pytest.raises(UserError, match="hosts|spares|batch") as error:
        parse_job(yaml.safe_dump(job))
    assert message in str(error.value)


def test_request_describes_fewer_hosts() -> None:
    def lost_host_lines(**keys: Any) -> list[str]:
        document = {key: value for key, value in make_document(**keys).items() if value is not None}
        lines = validate.describe_request(parse_job(yaml.safe_dump(document)))
        return lines[
            next(at for at, line in enumerate(lines) if line.startswith("a lost host: ")) :
        ]

    mesh = TRAIN | {"mesh": {"dp": -1}}
    assert lost_host_lines(train=mesh, spares=2) == [
        "a lost host: 2 spares take its ranks, and only its pod is created again; after "
        "timeouts.replace it continues with fewer:",
        "  3 hosts: dp 3 × fsdp 1 × mp 1, 4 per device, accumulate 2",
        "  2 hosts: dp 2 × fsdp 1 × mp 1, 6 per device, accumulate 2",
    ]
    assert lost_host_lines(hosts=3) == ["a lost host: only its pod is created again"]
    assert lost_host_lines(hosts=3, restarts={"crash": 0}) == ["a lost host: all pods are replaced"]
    slices = lost_host_lines(
        hosts=4, accelerator={"type": "v5e", "topology": "4x4"}, train=None, command=["true"]
    )
    assert slices == ["a lost host: all pods are replaced: a TPU slice is lost as a whole"]
