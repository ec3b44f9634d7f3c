"""How a host and its leader prove to each other that they have the run's key, which is never sent. Pure but for nonces.

    leader  challenge {nonce}
    host    hello {nonce, fields, proof}
    leader  welcome or refused {fields, proof}

A proof is HMAC-SHA256 over the message's type, both nonces and the fields, so that none fits another connection,
direction or content. The fields are JSON within a text: both ends have the same bytes. It guards against who can
connect, and not against who can change what is on its way.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any

from jaxlaunch.records import wire

NONCE_BYTES = 16
_NONCE_CHARS = 2 * NONCE_BYTES


class NotProven(Exception):
    """A message of the handshake that whoever has the key would not have sent."""


class LeaderSide:
    """The handshake of one connection, as the leader sees it."""

    def __init__(self, key: bytes) -> None:
        self._key, self._own, self._theirs = key, secrets.token_hex(NONCE_BYTES), ""

    def challenge(self) -> dict[str, Any]:
        """The fields of the first message."""
        return {"nonce": self._own}

    def opened(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields of a hello. Raises NotProven for any other message."""
        if message.get("type") != "hello":
            raise NotProven("its first message is not a hello")
        self._theirs = _nonce(message)
        return _opened(self._key, self._own, self._theirs, message)

    def sealed(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The fields of the answer to the hello: a `welcome`, or a `refused`."""
        return _sealed(self._key, kind, self._own, self._theirs, fields)


class HostSide:
    """The handshake of one connection, as a host sees it."""

    def __init__(self, key: bytes) -> None:
        self._key, self._own, self._theirs = key, secrets.token_hex(NONCE_BYTES), ""

    def hello(self, challenge: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the answer to the leader's challenge. Raises NotProven for any other message."""
        if challenge.get("type") != "challenge" or self._theirs:
            raise NotProven("its first message is not a challenge")
        self._theirs = _nonce(challenge)
        return {"nonce": self._own, **_sealed(self._key, "hello", self._theirs, self._own, fields)}

    def opened(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields of the leader's answer. Raises NotProven where it has another key, or none."""
        if message.get("type") not in ("welcome", "refused"):
            raise NotProven("it did not answer the hello")
        return _opened(self._key, self._theirs, self._own, message)


def _nonce(message: Mapping[str, Any]) -> str:
    found = message.get("nonce")
    if not isinstance(found, str) or len(found) != _NONCE_CHARS:
        raise NotProven("it sent no nonce")
    return found


def _proof(key: bytes, *parts: str) -> str:
    return hmac.digest(key, json.dumps(parts).encode(), "sha256").hex()


def _sealed(key: bytes, kind: str, leader: str, host: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(fields)
    return {"fields": text, "proof": _proof(key, kind, leader, host, text)}


def _opened(key: bytes, leader: str, host: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    text, proof = message.get("fields"), message.get("proof")
    if not isinstance(text, str) or not isinstance(proof, str):
        raise NotProven("it sent no proof")
    if not hmac.compare_digest(proof.encode(), _proof(key, message["type"], leader, host, text).encode()):
        raise NotProven("it does not have this run's key")
    try:
        fields = wire.decoded(text.encode())
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise NotProven("the fields of its message are not JSON")
    return fields
