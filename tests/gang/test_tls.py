"""A live gang with certificates answers nobody without one of this job."""

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
from tests.gang.agents import PATIENCE_S, Gang, make_job, write_program
from tests.gang.test_agent_strangers import is_listening


def write_secret(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write a gang's Secret as a pod has it."""
    folder.mkdir()
    for name, content in {"key": b"k" * 32, **files}.items():
        (folder / name).write_bytes(content)
    return folder


def tls_answer(
    port: int, certificate: Path | None, minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> bytes:
    """Return the leader's answer to a TLS client that has this certificate and trusts everybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = minimum
    if certificate is not None:
        context.load_cert_chain(certificate / CERTIFICATE, certificate / CERTIFICATE_KEY)
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock,
            context.wrap_socket(sock) as tls,
        ):
            return tls.recv(65536)
    except (ssl.SSLError, ConnectionResetError):
        return b""


def plain_answer(port: int, text: bytes) -> bytes:
    """Return the leader's answer to a client without TLS."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sock.sendall(text)
        sock.shutdown(socket.SHUT_WR)
        try:
            return b"".join(iter(lambda: sock.recv(65536), b""))
        except ConnectionResetError:
            return b""


def test_clients_without_a_valid_certificate_of_the_job_get_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(ec, "generate_private_key", lambda _, drawn=[*keys, *keys]: drawn.pop(0))
        own_secret = write_secret(tmp_path / "own", security.make_certificates("mine"))
        patched.setattr(security, "CERTIFICATE_VALIDITY", -datetime.timedelta(hours=1))
        expired = write_secret(tmp_path / "expired", security.make_certificates("mine"))
    # The next job of that name.
    other = write_secret(tmp_path / "other", security.make_certificates("mine"))
    mixed = {
        CERTIFICATE: (other / CERTIFICATE).read_bytes(),
        CERTIFICATE_KEY: (other / CERTIFICATE_KEY).read_bytes(),
    }
    wrong = write_secret(
        tmp_path / "wrong", {AUTHORITY: (own_secret / AUTHORITY).read_bytes(), **mixed}
    )
    env = {contract.UID: "u", contract.GANG_SECRET: str(own_secret / "key")}
    with Gang(
        tmp_path, make_job(write_program(tmp_path, "mark('up'); wait_for('go')")), hosts=2, env=env
    ) as gang:
        gang.start(0)
        gang.wait_until("the leader", lambda: is_listening(gang.port))
        assert json.loads(tls_answer(gang.port, own_secret)).keys() == {"type", "nonce"}
        assert tls_answer(gang.port, own_secret, ssl.TLSVersion.TLSv1_2) == b""
        assert [
            tls_answer(gang.port, certificate) for certificate in (None, expired, other, wrong)
        ] == [b""] * 4
        assert b"nonce" not in plain_answer(gang.port, b'{"type": "hello"}\n')
        gang.start(1, env={contract.GANG_SECRET: str(other / "key")})
        gang.wait_until("the refusal", lambda: "host 0 did not admit this host" in gang.stderr)
        refused = gang.agents.pop(1)
        refused.kill()
        refused.wait()
        gang.start(1).wait_for_marks("up-0", "up-1")
        gang.release("go")
        codes = gang.wait()
    assert codes == [0, 0] and gang.summary["status"] == "done", gang.stderr[-2_000:]
    assert "its certificate is not of this job: " in gang.stderr
    assert "Traceback" not in gang.stderr


def test_agent_with_broken_certificates_does_not_start(tmp_path: Path) -> None:
    folder = write_secret(
        tmp_path / "own", {**security.make_certificates("mine"), AUTHORITY: b"none"}
    )
    env = {contract.GANG_SECRET: str(folder / "key")}
    with Gang(tmp_path, make_job(write_program(tmp_path, "mark('up')")), env=env) as gang:
        gang.start(0)
        assert gang.wait() == [contract.BAD_SPEC]
    assert f"cannot use the certificates in {folder}" in gang.stderr
