"""A live gang with certificates: nobody without one of this job is told anything, and what is sent cannot be read."""

from __future__ import annotations

import datetime
import json
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from jaxlaunch import contract
from jaxlaunch.contract import AUTHORITY, CERTIFICATE, CERTIFICATE_KEY
from jaxlaunch.launcher.manifests import security
from tests.gang.agents import PATIENCE_S, Gang, job, program
from tests.gang.test_agent_strangers import listens


def kept(folder: Path, held: Mapping[str, bytes]) -> Path:
    """A gang's Secret as a pod has it."""
    folder.mkdir()
    for name, content in {"key": b"k" * 32, **held}.items():
        (folder / name).write_bytes(content)
    return folder


def answer(
    port: int, certificate: Path | None, minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> bytes:
    """What the leader tells who connects by TLS with this certificate, and trusts everybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = minimum
    if certificate is not None:
        context.load_cert_chain(certificate / CERTIFICATE, certificate / CERTIFICATE_KEY)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
            with context.wrap_socket(sock) as tls:
                return tls.recv(65536)
    except (ssl.SSLError, ConnectionResetError):
        return b""


def told(port: int, text: bytes) -> bytes:
    """What the leader tells who speaks without TLS."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sock.sendall(text)
        sock.shutdown(socket.SHUT_WR)
        try:
            return b"".join(iter(lambda: sock.recv(65536), b""))
        except ConnectionResetError:
            return b""


def test_strangers_and_certificates_that_are_expired_or_another_job_s_are_told_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(ec, "generate_private_key", lambda _, drawn=[*keys, *keys]: drawn.pop(0))
        own = kept(tmp_path / "own", security.make_certificates("mine"))
        patched.setattr(security, "CERTIFICATE_VALIDITY", -datetime.timedelta(hours=1))
        expired = kept(tmp_path / "expired", security.make_certificates("mine"))
    other = kept(
        tmp_path / "other", security.make_certificates("mine")
    )  # the next job of that name
    mixed = {
        CERTIFICATE: (other / CERTIFICATE).read_bytes(),
        CERTIFICATE_KEY: (other / CERTIFICATE_KEY).read_bytes(),
    }
    wrong = kept(tmp_path / "wrong", {AUTHORITY: (own / AUTHORITY).read_bytes(), **mixed})
    env = {contract.UID: "u", contract.GANG_SECRET: str(own / "key")}
    with Gang(
        tmp_path, job(program(tmp_path, "mark('up'); wait_for('go')")), hosts=2, env=env
    ) as gang:
        gang.start(0)
        gang.until("the leader", lambda: listens(gang.port))
        assert json.loads(answer(gang.port, own)).keys() == {"type", "nonce"}
        assert answer(gang.port, own, ssl.TLSVersion.TLSv1_2) == b""
        assert [answer(gang.port, each) for each in (None, expired, other, wrong)] == [b""] * 4
        assert b"nonce" not in told(gang.port, b'{"type": "hello"}\n')
        gang.start(1, env={contract.GANG_SECRET: str(other / "key")})
        gang.until("the refusal", lambda: "host 0 did not admit this host" in gang.talk)
        refused = gang.agents.pop(1)
        refused.kill()
        refused.wait()
        gang.start(1).until_marked("up-0", "up-1")
        gang.allow("go")
        codes = gang.wait()
    assert codes == [0, 0] and gang.summary["status"] == "done", gang.talk[-2_000:]
    assert "its certificate is not of this job: " in gang.talk
    assert "Traceback" not in gang.talk


def test_an_agent_whose_certificates_are_broken_says_so_and_does_not_start(tmp_path: Path) -> None:
    folder = kept(tmp_path / "own", {**security.make_certificates("mine"), AUTHORITY: b"none"})
    env = {contract.GANG_SECRET: str(folder / "key")}
    with Gang(tmp_path, job(program(tmp_path, "mark('up')")), env=env) as gang:
        gang.start(0)
        assert gang.wait() == [contract.BAD_SPEC]
    assert f"cannot use the certificates in {folder}" in gang.talk
