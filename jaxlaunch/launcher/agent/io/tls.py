"""TLS between agents of a gang whose Secret has certificates, without the connection itself.

Both ends show a certificate that the job's own authority signed. No host name is compared, because that authority signs
for this job only. `link` sends and receives the encrypted data.
"""

from __future__ import annotations

import dataclasses
import functools
import ssl
from pathlib import Path

from jaxlaunch.contract import AUTHORITY, CERTIFICATE, CERTIFICATE_KEY

# Bytes that are decrypted in one call.
AT_ONCE = 65536


class NotTrusted(Exception):
    """The other end has no certificate of this job, or does not accept this host's."""


@dataclasses.dataclass(frozen=True)
class Contexts:
    """TLS contexts for incoming and outgoing connections of this host."""

    server: ssl.SSLContext
    client: ssl.SSLContext


@functools.cache
def contexts(folder: Path) -> Contexts:
    """Load the contexts from the files of a gang's Secret.

    Raises:
        OSError: A file is missing or invalid (ssl.SSLError).
    """
    return Contexts(_context(ssl.PROTOCOL_TLS_SERVER, folder), _context(ssl.PROTOCOL_TLS_CLIENT, folder))


def _context(protocol: ssl._SSLMethod, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / AUTHORITY)
    context.load_cert_chain(folder / CERTIFICATE, folder / CERTIFICATE_KEY)
    return context


class Channel:
    """Encryption of one connection, without the connection itself."""

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=is_server)
        self._is_ready = False
        # Text to send once the handshake has ended.
        self._early = bytearray()

    def begin(self) -> bytes:
        """Return the first bytes to send: a client's greeting, or nothing for a server."""
        self.opened(b"")
        return self.sealed(b"")

    def sealed(self, text: bytes) -> bytes:
        """Return the bytes to send next: those of the handshake, and the encrypted text once it has ended."""
        self._early += text
        if self._is_ready and self._early:
            self._tls.write(self._early)
            self._early.clear()
        return self._out.read()

    def opened(self, data: bytes) -> bytes:
        """Return the text of received data. Afterwards `encrypt` may have bytes to send.

        Raises:
            UntrustedPeer: The handshake or the connection failed.
        """
        self._in.write(data)
        text = bytearray()
        try:
            if not self._is_ready:
                self._tls.do_handshake()
                self._is_ready = True
            while more := self._tls.read(AT_ONCE):
                text += more
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError as error:
            raise NotTrusted(f"its certificate is not of this job: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise NotTrusted(f"TLS: {(error.reason or str(error)).lower().replace('_', ' ')}") from None
        return bytes(text)
