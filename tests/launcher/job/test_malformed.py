"""Malformed jobs: `malformed.txt` holds the files with their messages, word for word."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxlaunch.launcher.errors import JobFaultsError, UserError
from jaxlaunch.launcher.job import checks
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.schema import JobSpec
from tests.launcher.invoke import Launcher

GOLDEN = Path(__file__).parent / "malformed.txt"
LIMIT_S = 2.0
SLACK = 3
NOT_OURS = re.compile(
    r"Input should|Field required|Extra inputs|Value "
    r"error|pydantic|literal\[|union|Traceback|yaml\.",
    re.I,
)

HEAD = "name: lm\naccelerator: {type: cpu}\ncommand: [x]\n"


def read_cases() -> Iterator[tuple[str, str, str]]:
    for block in GOLDEN.read_text(encoding="utf-8").split("=== ")[1:]:
        title, _, rest = block.partition("\n")
        text, _, message = rest.partition("--- says\n")
        yield title, text, message.strip("\n")


CASES = list(read_cases())

# Too large, too deep or too strange for a text file: the content, and the start of its message.
HOSTILE: dict[str, tuple[bytes, str]] = {
    "two megabytes": (b"# " + b"x" * 2**21, "job.yaml: is larger than 1 MiB."),
    "one megabyte of keys": (
        HEAD.encode() + b"".join(b"k%d: 1\n" % i for i in range(90_000)),
        "job.yaml:9998: contains more than 10000 values.",
    ),
    "nine thousand unknown keys": (
        HEAD.encode() + b"".join(b"k%d: 1\n" % i for i in range(9_000)),
        'job.yaml:4: unknown key "k0" in job.',
    ),
    "one value of a megabyte": (
        HEAD.encode() + b"grace: " + b"1" * 900_000 + b"s",
        "job.yaml:4: grace = 1111",
    ),
    "a number of a megabyte": (
        HEAD.encode() + b"hosts: " + b"1" * 900_000,
        "job.yaml:4: hosts is a number of 900000 digits.",
    ),
    "brackets without end": (
        b"a: " + b"[" * 500_000,
        "job.yaml:1: is nested deeper than 64 levels.",
    ),
    "blocks 65 deep": (
        b"".join(b" " * i + b"a:\n" for i in range(66)) + b" " * 66 + b"b: 1\n",
        "job.yaml:66: is nested deeper than 64 levels.",
    ),
    "a bomb of aliases": (
        b"a0: &a0 [x, x]\n"
        + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (i, i, i - 1, i - 1) for i in range(1, 2_000)),
        "job.yaml: neither train nor command is set",
    ),
    "a cycle": (
        b"a: &a [*a]\n" + HEAD.encode(),
        "job.yaml:1: uses an anchor, an alias or a merge key",
    ),
    "latin-1": ("name: größe\n".encode("latin-1"), "job.yaml:1: is not UTF-8 (byte 0xf6)."),
    "utf-16": (HEAD.encode("utf-16"), "job.yaml:1: is not UTF-8 (byte 0xff)."),
    "a binary": (bytes(range(256)) * 100, "job.yaml:2: is not UTF-8 (byte 0x80)."),
    "a control character": (b"name: a\x07b\n", "job.yaml:1: contains the control character 0x07."),
}


def parse_faults(text: str) -> str:
    with pytest.raises(JobFaultsError) as faults:
        jobs.parse_job(text)
    return str(faults.value)


@pytest.mark.parametrize(("title", "text", "message"), CASES, ids=[title for title, _, _ in CASES])
def test_malformed_job_gets_golden_message(title: str, text: str, message: str) -> None:
    assert parse_faults(text) == message


def test_number_of_cases() -> None:
    assert len(CASES) + len(HOSTILE) >= 60


@pytest.mark.parametrize(
    "message", [message for _, _, message in CASES], ids=[title for title, _, _ in CASES]
)
def test_messages_name_a_place_and_hide_pydantic(message: str) -> None:
    assert not NOT_OURS.search(message)
    for line in message.splitlines():
        assert re.match(r"job\.yaml(:\d+)?: \S|  hint: \S", line), line
        assert line.endswith((".", "?")) or line.startswith("  hint: "), line


@pytest.mark.parametrize(
    "message", [message for _, _, message in CASES], ids=[title for title, _, _ in CASES]
)
def test_faults_are_sorted_by_line(message: str) -> None:
    lines = [int(number or 0) for number in re.findall(r"^job\.yaml(?::(\d+))?:", message, re.M)]
    assert lines == sorted(lines)


@pytest.mark.parametrize("title", HOSTILE)
def test_hostile_file_is_refused_in_time(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_launcher: Launcher
) -> None:
    content, message = HOSTILE[title]
    (tmp_path / "job.yaml").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    # The clock would measure what else this machine runs.
    start_cpu_s = time.process_time()
    result = run_launcher("validate", "job.yaml")
    assert time.process_time() - start_cpu_s < LIMIT_S * SLACK
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(message), result.err[:400]
    assert len(result.err) < 20_000
    assert not NOT_OURS.search(result.err)


def test_job_with_faults_is_never_returned() -> None:
    """Stand-ins let the rest be judged; a job with any fault must raise."""
    for _, text, _ in CASES:
        with pytest.raises(UserError):
            assert not isinstance(jobs.parse_job(text), JobSpec)


@pytest.mark.parametrize("kind", ["cpu", "tpu"])
def test_disjoint_rows_need_not_be_contiguous(kind: str) -> None:
    mesh = {"dp": 2, "fsdp": 16, "dcn": {"fsdp": 2}}
    accelerator = (
        {"type": "cpu", "per_host": 16} if kind == "cpu" else {"type": "v6e", "topology": "4x4"}
    )
    job = JobSpec.model_validate(
        {
            "name": "lm",
            "accelerator": accelerator,
            "slices": 2,
            "train": {"task": "a:B", "mesh": mesh},
        }
    )
    assert not list(checks.row_faults(job))


NEAR_MISSES = (
    *("0,01", "1,000", "1,000,000", "1e8", "2.0", "012", "1_0", "-3", "Übung_x", "3d", "Москва"),
    *("1.5s", "2 weeks", "99999w"),
)
NEAR_MISSES += (
    "9M",
    "32GB",
    "0.5 gib",
    "1 000",
    "yes",
    "a/b",
    "../a",
    "x" * 70,
    "A.b",
    "１２",
    "1.10",
    "1e400",
)


@pytest.mark.parametrize(
    ("text", "names"), [("Übung_x", ["ubung-x"]), ("Дом-b", []), ("größe", ["grosse"])]
)
def test_proposed_name_keeps_all_letters(text: str, names: list[str]) -> None:
    with pytest.raises(JobFaultsError) as error:
        jobs.parse_job(HEAD.partition("\n")[2] + f"name: {text}\n")
    assert re.findall(r"write ([a-z-]+)\.", str(error.value)) == names


@pytest.mark.parametrize("text", NEAR_MISSES)
def test_proposed_value_is_accepted(text: str) -> None:
    for key in (
        *("hosts", "name", "grace", "namespace", "priority", "workdir", "network_policy"),
        *("restarts: {crash", "x"),
    ):
        if key == "x":
            block = f"resources: {{memory: '{text}'}}\n"
        else:
            block = f"{key}: '{text}'{'}' * key.count('{')}\n"
        head = HEAD.partition("\n")[2] if key == "name" else HEAD
        try:
            jobs.parse_job(head + block)
        except JobFaultsError as faults:
            for value in re.findall(r"write ([^\s,]+?)[.,]?(?: |$)", str(faults), re.M):
                jobs.parse_job(head + block.replace(f"'{text}'", value))
