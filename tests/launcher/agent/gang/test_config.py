"""What an agent knows of its gang from its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.gang import config

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
            "JAXLAUNCH_GANG_SECRET = '/dev/null' holds 0 bytes, not at least 16",
        ),
    ],
)
def test_config_without_a_key_is_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(config.ConfigError, match=words):
        config.read_config(ENVIRON | changes)


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
