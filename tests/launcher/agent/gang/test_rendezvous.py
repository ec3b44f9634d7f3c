"""Which hosts may join."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.protocol import Hello, find_refusal
from jaxlaunch.records.codec import MalformedError
from jaxlaunch.records.verdict import render_numbers

VERSIONS = {"python": "3.11.7", "jax": "0.10.2", "agent": "1"}
LEADER = Hello(0, 2, "pod-0", "a", "node-7", VERSIONS, "f" * 64, 1, 9400)


def hello(host: int, **changes: Any) -> Hello:
    return dataclasses.replace(LEADER, host=host, pod=f"pod-{host}", hostname=f"h{host}", **changes)


@pytest.mark.parametrize(
    ("guest", "words", "ends_gang", "may_retry"),
    [
        (
            hello(1, generation=1),
            "set of pods: it has generation 1, host 0 has generation 2",
            False,
            True,
        ),
        (hello(4), "not below the number of hosts, 4", False, False),
        (
            hello(2),
            "same index as host 2 (old on node-7, pod pod-old), which has already joined",
            False,
            False,
        ),
        (
            hello(1, versions=VERSIONS | {"jax": "0.11.2"}),
            "host 1 has jax 0.11.2, host 0 has 0.10.2",
            True,
            False,
        ),
        (
            hello(1, versions=VERSIONS | {"jax": None}),
            "host 1 has jax none, host 0 has 0.10.2",
            True,
            False,
        ),
        (hello(1, spec="e" * 64), "spec eeeeeeeeeeee, host 0 has ffffffffffff", True, False),
        (
            hello(1, fault="TPU_WORKER_ID = 3 but JOB_COMPLETION_INDEX = 1"),
            "TPU_WORKER_ID = 3",
            True,
            False,
        ),
    ],
)
def test_refusal_names_host_and_differing_values(
    guest: Hello, words: str, ends_gang: bool, may_retry: bool
) -> None:
    present = {2: dataclasses.replace(hello(2), pod="pod-old", hostname="old")}
    refusal = find_refusal(guest, LEADER, present, host_count=4)
    assert (
        refusal is not None and words in refusal.message and f"host {guest.host}" in refusal.message
    )
    assert (refusal.ends_gang, refusal.may_retry) == (ends_gang, may_retry)
    assert refusal.exit_code == (contract.BAD_SPEC if ends_gang else contract.LOST)


def test_same_pod_may_rejoin() -> None:
    assert find_refusal(hello(2), LEADER, {2: hello(2)}, host_count=4) is None


def test_list_of_missing_hosts_is_cut() -> None:
    assert render_numbers([3]) == "host 3"
    assert render_numbers([2, 5]) == "hosts 2, 5"
    assert render_numbers(list(range(30))).endswith("19 and 10 more")


NUMBERS, TEXTS = ("host", "generation", "pid", "metrics_port"), ("pod", "hostname", "node", "spec")
WRONG_VALUES: list[tuple[tuple[str, ...], tuple[Any, ...]]] = [
    (NUMBERS, (True, "1", 1.0, None, [], -1, 10**400)),
    (TEXTS, (1, None, ["x"], {}, "x" * 1_001)),
    (("versions",), (None, [], "x", {"jax": 1}, {"jax": {}})),
    (("versions",), ({"jax": "9" * 1_001}, {"j" * 1_001: None})),
    (("fault",), (3, "x" * 1_001)),
]


@pytest.mark.parametrize(
    ("field", "value"),
    [(name, value) for names, values in WRONG_VALUES for name in names for value in values],
)
def test_hello_with_wrong_field_is_malformed(field: str, value: Any) -> None:
    with pytest.raises(MalformedError, match=f"^{field}"):
        Hello.from_wire(LEADER.to_wire() | {field: value})


def test_hello_without_required_field_is_malformed() -> None:
    for name in LEADER.to_wire().keys() - {"fault", "attempt", "saved"}:
        with pytest.raises(MalformedError, match=f"^{name} must be given"):
            Hello.from_wire({key: value for key, value in LEADER.to_wire().items() if key != name})
    assert Hello.from_wire({**LEADER.to_wire(), "newer": 1}) == LEADER
