"""What an agent knows of its gang from its environment."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.agent import run_agent
from jaxlaunch.launcher.agent.gang import config
from jaxlaunch.records import log_lines

ENVIRON = {
    contract.LEADER: "t-w-0-0.t:9401",
    contract.HOSTS: "2",
    contract.INDEX: "0",
    contract.UID: "a-uid",
    contract.JOB: AgentJob("t", ("true",)).to_json(),
}


def test_handshake_key_consists_of_secret_and_uid(tmp_path: Path) -> None:
    assert config.read_config(ENVIRON).handshake_key == b"a-uid"
    secret = tmp_path / "key"
    secret.write_bytes(bytes(range(32)))
    result = config.read_config(ENVIRON | {contract.GANG_SECRET: str(secret)})
    assert result.handshake_key == bytes(range(32)) + b"a-uid" and "key=" not in repr(result)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {contract.UID: ""},
            "JAXLAUNCH_UID is not set; `launcher run` sets it, and a JobSet of version "
            "0.10 or later",
        ),
        (
            {contract.GANG_SECRET: "/no/such"},
            "JAXLAUNCH_GANG_SECRET = '/no/such' cannot be read: No such file",
        ),
        (
            {contract.GANG_SECRET: "/dev/null"},
            "JAXLAUNCH_GANG_SECRET = '/dev/null' holds 0 bytes, and needs at least 16",
        ),
    ],
)
def test_config_without_a_key_is_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(config.ConfigError, match=words):
        config.read_config(ENVIRON | changes)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (contract.OUTPUT_PATIENCE, "abc", "is not a number of seconds from 0"),
        (contract.OUTPUT_PATIENCE, "-1", "is not a number of seconds from 0"),
        (contract.OUTPUT_PATIENCE, "nan", "is not a number of seconds from 0"),
        (contract.STARTED, "today", "is not a number of seconds from 0 to 60000000000"),
        (contract.STARTED, "inf", "is not a number of seconds from 0 to 60000000000"),
        (contract.HOSTS, "two", "is not a whole number from 0"),
        (contract.SLICES, "-1", "is not a whole number from 0"),
        (contract.GENERATION, "9" * 5000, "is not a whole number from 0"),
        (contract.LEADER, "t-w-0-0.t", "is not host:port"),
        (contract.LEADER, "t-w-0-0.t:94010", "is not host:port with a port up to 65535"),
        (contract.NOTIFY, "no JSON", "is not the JSON that the launcher writes"),
        (contract.NOTIFY, '{"url": 3}', "is not the JSON that the launcher writes: url must be"),
        (contract.NOTIFY, '{"url": "A", "stall_s": "x"}', "stall_s must be"),
        (contract.TRACKER, "[]", "is not the JSON that the launcher writes"),
        (contract.TRACKER, "{}", "is not the JSON that the launcher writes"),
        (contract.JOB, "{", "is not a valid job"),
    ],
)
def test_malformed_variable_is_refused_by_name_and_value(
    name: str, value: str, expected: str
) -> None:
    with pytest.raises(config.ConfigError) as refusal:
        config.read_config(ENVIRON | {name: value})
    assert str(refusal.value).startswith(f"{name} = {value[:200]!r} ")
    assert expected in str(refusal.value)


def test_code_without_a_folder_is_refused() -> None:
    words = "JAXLAUNCH_CODE_ROOT is not set, the folder for JAXLAUNCH_CODE = '/code.tgz'"
    with pytest.raises(config.ConfigError, match=words):
        config.read_config(ENVIRON | {contract.CODE: "/code.tgz"})


def test_empty_variables_have_defaults() -> None:
    names = (contract.OUTPUT_PATIENCE, contract.STARTED, contract.SLICES, contract.NOTIFY)
    result = config.read_config(ENVIRON | dict.fromkeys(names, ""))
    assert (result.output_patience_s, result.run_started_at, result.hosts) == (0.0, None, 2)
    changes = {contract.OUTPUT_PATIENCE: "inf", contract.STARTED: "1764300000.5"}
    result = config.read_config(ENVIRON | changes)
    assert (result.output_patience_s, result.run_started_at) == (math.inf, 1764300000.5)


def test_agent_with_a_malformed_variable_ends_as_a_wrong_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (ENVIRON | {contract.OUTPUT_PATIENCE: "abc"}).items():
        monkeypatch.setenv(name, value)
    assert run_agent() == contract.BAD_SPEC
    assert capsys.readouterr().err == (
        "agent: JAXLAUNCH_OUTPUT_PATIENCE = 'abc' is not a number of seconds from 0; "
        "`launcher run` sets it\n"
    )


@pytest.mark.parametrize(
    ("job", "code"),
    [
        ('{"may_fail": true, "name": 3}', contract.DONE),
        ('{"may_fail": "yes"}', contract.BAD_SPEC),
        ('["may_fail"]', contract.BAD_SPEC),
        ("{", contract.BAD_SPEC),
    ],
)
def test_refusal_of_a_role_that_may_fail_completes_its_pod(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: str, code: int
) -> None:
    (message := tmp_path / "termination-log").touch()
    monkeypatch.setattr(log_lines, "TERMINATION_LOG", str(message))
    for name, value in (ENVIRON | {contract.JOB: job, contract.NODE: "node-1"}).items():
        monkeypatch.setenv(name, value)
    assert run_agent() == code
    report = log_lines.parse_termination_message(message.read_text())
    assert report is not None and report.verdict.code == contract.BAD_SPEC


@pytest.mark.parametrize(
    ("changes", "address"),
    [
        ({contract.POD_IP: "10.4.0.7"}, "10.4.0.7"),
        ({contract.POD_IP: "fd00::7"}, "fd00::7"),
        ({contract.LEADER: "127.0.0.1:20001"}, "127.0.0.1"),
        ({contract.LEADER: "[::1]:20001", contract.POD_IP: "10.4.0.7"}, "::1"),
        ({}, ""),
    ],
)
def test_leader_listens_on_pod_address_or_loopback(changes: dict[str, str], address: str) -> None:
    assert config.read_config(ENVIRON | changes).listen_address == address


@pytest.mark.parametrize(
    ("changes", "keeps_run"),
    [
        ({}, False),
        ({contract.RUN_DIR: "/run"}, True),
        ({contract.RUN_URL: "gs://bucket/run"}, True),
    ],
    ids=["none", "folder", "bucket"],
)
def test_config_accepts_run_folder_or_bucket(changes: dict[str, str], keeps_run: bool) -> None:
    assert config.read_config(ENVIRON | changes).has_run_folder is keeps_run
