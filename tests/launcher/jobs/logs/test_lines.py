import json
import re

import pytest

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.jobs.logs import lines
from jaxlaunch.launcher.jobs.logs.follow import Notices, ShownLines
from jaxlaunch.launcher.jobs.logs.lines import (
    Line,
    check_ranks_exist,
    log_source,
    merge_lines,
    parse_line,
    parse_selection,
    parse_stamped_line,
)
from jaxlaunch.launcher.jobs.status.hosts import Host, newest_hosts
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import (
    CONTINUATION_MARK,
    LineSplitter,
    PastLine,
    TailLine,
    TerminationMessage,
)
from jaxlaunch.records.members import Members
from jaxlaunch.records.verdict import verdict_for_code
from tests.launcher import objects


def test_line_with_rank_is_of_process() -> None:
    assert parse_line(1, "[3] step 2") == Line(1, 3, "step 2")
    assert parse_line(1, "[3]") == Line(1, 3, "")
    assert parse_line(1, "agent 1: waiting for host 2") == Line(
        1, None, "agent 1: waiting for host 2"
    )
    assert parse_line(1, "[x] y").rank is None


def test_rank_prefix_round_trip() -> None:
    assert parse_line(0, Line(0, 12, "[not a rank] text").text_with_rank()) == Line(
        0, 12, "[not a rank] text"
    )


def test_split_bytes_give_whole_lines() -> None:
    lines = LineSplitter()
    text = "one\ntwo ünd\n\nlast".encode()
    lines_value = [line for byte in text for line in lines.feed(bytes([byte]))] + lines.finish()
    assert [line.decode() for line in lines_value] == ["one", "two ünd", "", "last"]
    assert lines.finish() == []


def test_long_line_is_split_between_characters() -> None:
    text = ("ab" + "é" * 14 + "\nshort\n" + "x" * 10 + "\n").encode()
    for size in (1, 3, len(text)):
        lines = LineSplitter(limit=10)
        fed = [lines.feed(text[at : at + size]) for at in range(0, len(text), size)]
        assert [piece.decode() for pieces in fed for piece in pieces] == [
            "abéééé",
            f"{CONTINUATION_MARK}ééééé",
            f"{CONTINUATION_MARK}ééééé",
            "short",
            "x" * 10,
        ]


def test_endless_line_takes_bounded_memory() -> None:
    lines = LineSplitter(limit=10)
    assert lines.feed(b"\x80" * 25) == [b"\x80" * 10, CONTINUATION_MARK.encode() + b"\x80" * 10]
    assert lines.finish() == [CONTINUATION_MARK.encode() + b"\x80" * 5]


def timestamp(second: int, text: str) -> str:
    return f"2026-01-02T03:04:{second:02d}.000000000Z {text}"


def make_jobset(hosts_per_slice: int = 2, slices: int = 2, **job: int) -> dict:
    """A JobSet as the API gives it."""
    variables = [
        {
            "name": "JAXLAUNCH_JOB",
            "value": json.dumps({"name": "t", "processes_per_host": 1} | job),
        },
        {"name": "JAXLAUNCH_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
    ]
    template = {"spec": {"containers": [{"name": "main", "env": variables}]}}
    line = {"parallelism": hosts_per_slice, "template": template}
    return {
        "metadata": {"name": "t"},
        "spec": {"replicatedJobs": [{"name": "w", "replicas": slices, "template": {"spec": line}}]},
    }


def make_host(number: int = 0, generation: int = 0, state: dict | None = None) -> Host:
    """One of its hosts, by the pod that the API gives."""
    labels = {
        "jobset.sigs.k8s.io/replicatedjob-name": "w",
        "jobset.sigs.k8s.io/job-index": str(number // 2),
        "batch.kubernetes.io/job-completion-index": str(number % 2),
        "jobset.sigs.k8s.io/restart-attempt": str(generation),
    }
    statuses = [] if state is None else [{"name": "main", "state": state}]
    pod = {
        "metadata": {"name": f"t-w-{number}", "labels": labels},
        "spec": {},
        "status": {"phase": "Pending", "containerStatuses": statuses},
    }
    (lines_value,) = newest_hosts(make_jobset(), [pod])
    return lines_value


def ended_pod(text: str, code: int = 83, rank: int = 0, host: int = 0, generation: int = 0) -> dict:
    """The state of a container whose agent left a verdict."""
    verdict = verdict_for_code(code, text, rank=rank, host=rank)
    message = log_lines.format_termination_message(TerminationMessage(verdict, host, generation, 1))
    return {"terminated": {"exitCode": code, "message": message}}


def test_timestamp_precedes_rank() -> None:
    assert parse_stamped_line(1, 2, timestamp(5, "[3] step 2")) == Line(
        1, 3, "step 2", "2026-01-02T03:04:05.000000000Z", 2
    )
    assert parse_stamped_line(0, 0, timestamp(5, "")).text == ""
    assert parse_stamped_line(0, 0, "no time") == Line(0, None, "no time")


def test_continuation_has_time_and_rank() -> None:
    first = parse_stamped_line(0, 1, timestamp(5, "[3] begin"))
    assert parse_stamped_line(0, 1, "… 2026-01-02Tthe rest", first) == Line(
        0, 3, "… 2026-01-02Tthe rest", first.at, 1
    )


def test_kubelet_message_is_no_continuation() -> None:
    first = parse_stamped_line(0, 1, timestamp(5, "[3] begin"))
    assert parse_stamped_line(0, 1, "failed to watch file: no such file", first) == Line(
        0, None, "failed to watch file: no such file", "", 1
    )


@pytest.mark.parametrize(
    "words", ["unable to retrieve container logs", "2026-13-41T99:99:99Z odd", "2026-01-02Tx"]
)
def test_kubelet_message_without_time_comes_first(words: str) -> None:
    """It answers so, with 200, when a container's log is gone."""
    streams = [[parse_stamped_line(0, 0, timestamp(1, "[0] a"))], [parse_stamped_line(1, 0, words)]]
    assert list(merge_lines(map(iter, streams)))[0].host == 1


def test_reopened_stream_shows_lines_once() -> None:
    lines_shown = ShownLines()
    first = [
        parse_stamped_line(0, 0, timestamp(second, text))
        for second, text in ((1, "a"), (3, "b"), (2, "late"), (3, "c"))
    ]
    assert all(map(lines_shown.is_new, first))
    lines_shown.restart_stream()
    repeated = [
        parse_stamped_line(0, 0, timestamp(second, text))
        for second, text in ((2, "late"), (3, "b"), (3, "c"), (3, "d"), (4, "e"))
    ]
    assert [line.text for line in repeated if lines_shown.is_new(line)] == ["d", "e"]


def test_lines_of_pods_are_merged_by_time() -> None:
    streams = [
        [
            parse_stamped_line(host, 0, timestamp(second, f"[{host}] {second}"))
            for second in (host, host + 4)
        ]
        for host in range(4)
    ]
    assert [line.text for line in merge_lines(map(iter, streams))] == [
        str(second) for second in range(8)
    ]


def test_times_of_other_zones_are_compared() -> None:
    early, late = (
        parse_stamped_line(0, 0, f"2026-01-02T{time} x")
        for time in ("09:00:00.5+02:00", "08:00:00.1Z")
    )
    assert list(merge_lines([iter([late]), iter([early])])) == [early, late]


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, {0, 1, 2, 3}), ("all", {0, 1, 2, 3}), ("2", {2}), ("0,2-3", {0, 2, 3}), ("7", set())],
)
def test_rank_selection(text: str | None, expected: set[int]) -> None:
    chosen = parse_selection(text, None)
    assert {
        rank for rank in range(4) if chosen.matches(Line(rank, rank, "x"), range(rank, rank + 1))
    } == expected


def test_agent_line_belongs_to_all_ranks() -> None:
    assert parse_selection("5", None).matches(Line(1, None, "agent 1: talk"), range(4, 8))
    assert not parse_selection("5", None).matches(Line(0, None, "agent 0: talk"), range(4))


def test_pattern_is_searched_in_text() -> None:
    assert parse_selection(None, r"loss [0-9.]+").matches(Line(0, 0, "step 2 loss 0.5"), range(1))
    assert not parse_selection(None, "^2").matches(Line(2, 2, "step 2"), range(2, 3))


@pytest.mark.parametrize(
    ("rank", "pattern", "expected"), [("1-", None, "--rank 1-"), (None, "(", "--grep (")]
)
def test_invalid_option_is_named(rank: str | None, pattern: str | None, expected: str) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        parse_selection(rank, pattern)


def test_source_has_ranks_of_host() -> None:
    lines_value = log_source(make_jobset(processes_per_host=4), make_host(3, generation=2))
    assert (lines_value.pod, lines_value.host, lines_value.ranks, lines_value.generation) == (
        "t-w-3",
        3,
        range(12, 16),
        2,
    )
    assert log_source(objects.foreign(), make_host(3)).ranks == range(3, 4)


def test_previous_lines_come_from_leader() -> None:
    ends = {3: ["ValueError: x", "[0] odd"], 0: ["step 7"]}
    tails = [
        TailLine(at=1.0, attempt=1, generation=0, rank=rank, lines=lines)
        for rank, lines in ends.items()
    ]
    lines_value = list(lines.previous_lines([*tails, PastLine(attempt=1)], Members(range(2), 2)))
    assert [line.text_with_rank() for line in lines_value] == [
        "[3] ValueError: x",
        "[3] [0] odd",
        "[0] step 7",
    ]
    assert [(line.host, line.generation) for line in lines_value] == [(1, 0), (1, 0), (0, 0)]


def test_previous_line_has_host_of_that_time() -> None:
    """Host 3 holds the rank now, whose last attempt was on host 1."""
    tails = [TailLine(attempt=1, generation=0, rank=1, lines=["step 7"], host=1)]
    (line,) = lines.previous_lines(tails, Members([0, 3], 1))
    assert line.host == 1


def test_generation_notices_are_shown_once() -> None:
    notices = Notices()
    lines_value = [
        make_host(0, 0, {"running": {}}),
        make_host(1, 0, ended_pod("rank 1 raised", rank=1)),
        make_host(0, 0, ended_pod("rank 1 raised", rank=1)),
        make_host(0, 1),
        make_host(1, 1, {"running": {}}),
    ]
    assert [text for line in lines_value for text in notices.host_notices(line)] == [
        "generation 0 ended: rank 1 raised",
        "generation 1 begins",
    ]


def test_suspension_is_shown_at_begin() -> None:
    notices = Notices()
    lines_shown = [
        list(notices.jobset_notices({"spec": {"suspend": value}}))
        for value in (False, True, True, False, True)
    ]
    assert [len(texts) for texts in lines_shown] == [0, 1, 0, 0, 1]


@pytest.mark.parametrize(("processes", "hint"), [(1, "the only rank is 0"), (2, "ranks are 0–1")])
def test_missing_rank_is_refused_with_existing_ranks(processes: int, hint: str) -> None:
    check_ranks_exist(parse_selection("0", None), processes)
    check_ranks_exist(parse_selection(None, None), processes)
    with pytest.raises(UserError, match=f"--rank 7 does not exist: {hint}"):
        check_ranks_exist(parse_selection("0,7-9", None), processes)
