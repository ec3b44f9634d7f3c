"""TLS between agents of a gang whose Secret has certificates.

Both ends present a certificate that the job's own authority has signed. Host names are not checked,
because that authority signs only for this job. This module only encrypts and decrypts; `link` sends
and receives the data.
"""

from __future__ import annotations

import dataclasses
import functools
import ssl
from pathlib import Path

from jaxlaunch.contract import AUTHORITY, CERTIFICATE, CERTIFICATE_KEY

# Number of bytes that are decrypted in one call.
READ_CHUNK_BYTES = 65536


class UntrustedPeerError(Exception):
    """The other end has no certificate of this job, or does not accept that of this host."""


@dataclasses.dataclass(frozen=True)
class Contexts:
    """TLS contexts for incoming and outgoing connections of this host."""

    server: ssl.SSLContext
    client: ssl.SSLContext


@functools.cache
def load_contexts(folder: Path) -> Contexts:
    """Load the contexts from the files of a gang's Secret.

    Raises:
        OSError: A file is missing or invalid (ssl.SSLError).
    """
    return Contexts(
        _create_context(ssl.PROTOCOL_TLS_SERVER, folder),
        _create_context(ssl.PROTOCOL_TLS_CLIENT, folder),
    )


def _create_context(protocol: ssl._SSLMethod, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / AUTHORITY)
    context.load_cert_chain(folder / CERTIFICATE, folder / CERTIFICATE_KEY)
    return context


class Channel:
    """Encryption of one connection. It does no I/O."""

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=is_server)
        self._is_ready = False
        # Plaintext to send once the handshake has ended.
        self._pending_plaintext = bytearray()

    def start_handshake(self) -> bytes:
        """Return the first bytes to send: a client's greeting, or nothing for a server."""
        self.decrypt(b"")
        return self.encrypt(b"")

    def encrypt(self, plaintext: bytes) -> bytes:
        """Return the bytes to send next: of the handshake, or the encrypted plaintext."""
        self._pending_plaintext += plaintext
        if self._is_ready and self._pending_plaintext:
            self._tls.write(self._pending_plaintext)
            self._pending_plaintext.clear()
        return self._out.read()

    def decrypt(self, data: bytes) -> bytes:
        """Return the plaintext of received data. Afterwards `encrypt` may have bytes to send.

        Raises:
            UntrustedPeerError: The handshake or the connection failed.
        """
        self._in.write(data)
        plaintext = bytearray()
        try:
            if not self._is_ready:
                self._tls.do_handshake()
                self._is_ready = True
            while chunk := self._tls.read(READ_CHUNK_BYTES):
                plaintext += chunk
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError as error:
            fault = f"its certificate is not of this job: {error.verify_message}"
            raise UntrustedPeerError(fault) from None
        except ssl.SSLError as error:
            reason = (error.reason or str(error)).lower().replace("_", " ")
            raise UntrustedPeerError(f"TLS: {reason}") from None
        return bytes(plaintext)
